#include "dovetail/trainer/token_stream.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"

namespace dovetail::trainer {
namespace {

constexpr size_t kHashWhole = size_t{64} << 20;  // larger documents are hashed at both ends only
constexpr size_t kHashEnd = size_t{1} << 20;

template <class T>
void widen(const std::byte* from, int64_t count, int64_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    to[i] = static_cast<int64_t>(value);
  }
}

void widen_tokens(const Document& document, int64_t begin, int64_t count, int64_t* to) {
  const std::byte* from = document.bytes->data() + begin * document.token_bytes;
  switch (document.token_bytes) {
    case 1: return widen<uint8_t>(from, count, to);
    case 2: return widen<uint16_t>(from, count, to);
    default: return widen<uint32_t>(from, count, to);
  }
}

}  // namespace

TokenStream::TokenStream(std::vector<Document> documents) {
  if (documents.empty())
    raise<ConfigError>("data.sources: wanted at least one document, found none");
  auto key = [](const Document& d) { return std::pair(hash64(d.name), std::string_view(d.name)); };
  std::stable_sort(documents.begin(), documents.end(),
                   [&](const Document& a, const Document& b) { return key(a) < key(b); });
  const Document& first = documents.front();
  text_ = first.token_bytes == 1;
  vocab_size_ = first.vocab_size;
  for (Document& d : documents) {
    if ((d.token_bytes == 1) != text_)
      raise<ConfigError>("data.sources: {} and {} are text and tokens: wanted one of the two",
                         pieces_.front().document.name, d.name);
    if (d.vocab_size != vocab_size_)
      raise<ConfigError>("data.sources: {} has a vocabulary of {}, {} of {}: wanted one",
                         pieces_.front().document.name, vocab_size_, d.name, d.vocab_size);
    const int64_t tokens = static_cast<int64_t>(d.bytes->size()) / d.token_bytes;
    pieces_.push_back({std::move(d), size_, tokens});
    size_ += tokens + (text_ ? 1 : 0);
  }
}

void TokenStream::read(int64_t begin, std::span<int64_t> out) const {
  DT_CHECK_GE(begin, 0);
  DT_CHECK_LE(begin + static_cast<int64_t>(out.size()), size_);
  auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), begin,
                                [](int64_t at, const Piece& p) { return at < p.begin; }) -
               1;
  size_t done = 0;
  for (; done < out.size(); ++piece) {
    const int64_t offset = begin + static_cast<int64_t>(done) - piece->begin;
    const int64_t count =
        std::clamp<int64_t>(piece->tokens - offset, 0, static_cast<int64_t>(out.size() - done));
    widen_tokens(piece->document, offset, count, out.data() + done);
    for (int64_t i = 0; i < count; ++i)
      if (out[done + static_cast<size_t>(i)] >= vocab_size_)
        raise<FileError>("{}: token {} is {}, wanted less than vocab_size {}", piece->document.name,
                         offset + i, out[done + static_cast<size_t>(i)], vocab_size_);
    done += static_cast<size_t>(count);
    if (text_ && done < out.size()) out[done++] = 0;
  }
}

uint64_t TokenStream::digest() const {
  uint64_t digest = hash64("", static_cast<uint64_t>(vocab_size_));
  for (const Piece& p : pieces_) {
    const std::span<const std::byte> bytes = *p.document.bytes;
    digest = hash64(p.document.name, digest ^ bytes.size());
    if (bytes.size() <= kHashWhole) {
      digest = hash64(bytes, digest);
    } else {
      digest = hash64(bytes.last(kHashEnd), hash64(bytes.first(kHashEnd), digest));
    }
  }
  return digest;
}

}  // namespace dovetail::trainer
