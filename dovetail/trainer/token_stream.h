// All documents one after another, as tokens. Text is bytes: vocabulary 256, and each document ends
// with a 0 byte, which tells the model (and the sampler) where one ends. Token files are taken as
// they are.
//
// Documents are ordered by the hash of their names, so that any piece of the stream is a fair
// sample of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace dovetail::trainer {

struct Document {
  std::string name;  // path relative to its source: orders the stream, and appears in errors
  std::shared_ptr<const std::span<const std::byte>> bytes;
  int token_bytes = 1;  // 1: text; 2 and 4: little-endian token numbers
  int64_t vocab_size = 256;
};

class TokenStream {
 public:
  // Throws ConfigError when text and tokens, or two vocabularies, are mixed.
  explicit TokenStream(std::vector<Document> documents);

  int64_t size() const { return size_; }  // tokens
  int64_t documents() const { return static_cast<int64_t>(pieces_.size()); }
  int64_t vocab_size() const { return vocab_size_; }
  bool is_text() const { return text_; }

  // Tokens [begin, begin + out.size()). Throws FileError for a number outside the vocabulary,
  // naming document and place.
  void read(int64_t begin, std::span<int64_t> out) const;

  // Of names, sizes and contents (of very large documents: both ends). Equal where ranks train on
  // the same data.
  uint64_t digest() const;

 private:
  struct Piece {
    Document document;
    int64_t begin = 0;   // in the stream
    int64_t tokens = 0;  // without the end mark
  };
  std::vector<Piece> pieces_;
  int64_t size_ = 0;
  int64_t vocab_size_ = 256;
  bool text_ = true;
};

}  // namespace dovetail::trainer
