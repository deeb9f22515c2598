// Finds the documents to train on.
//
// A source is one of
//   "python-stdlib"   the source files of the Python standard library of the `python3` on the path,
//   as its own sysconfig
//                     places it, without installed packages and tests;
//   a folder          all regular files below it whose names end with one of `suffixes` (none
//   given: all files); a token file      a file with a sidecar FILE.json: {"dtype": "uint16" or
//   "uint32", "vocab_size": V, "count": N}; any other file    text, as bytes.
#pragma once

#include <string>
#include <vector>

#include "dovetail/trainer/token_stream.h"

namespace dovetail::trainer {

// Throws ConfigError for a source that does not exist or holds nothing, FileError for a bad sidecar
// or file.
// `key`: of the configuration, for messages.
std::vector<Document> find_documents(const std::vector<std::string>& sources,
                                     const std::vector<std::string>& suffixes,
                                     const std::string& key = "data.sources");

}  // namespace dovetail::trainer
