// The header that every member sends to every other one for each operation (docs/communication.md), and the tags.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "dovetail/comm/identity.h"

namespace dovetail::comm {

enum class Operation : uint8_t { none, all_gather, reduce_scatter, all_reduce, exchange, gather_bytes, barrier, split };
std::string_view name_of(Operation operation);

inline constexpr size_t kHeaderBytes = 64;
inline constexpr size_t kLabelBytes = 31;

// Fields marked = must be equal on both sides; `sends` of one side must be `expects` of the other.
struct Header {
  Operation operation = Operation::none;    // =
  Phase phase = Phase::control;             // =
  uint16_t group = 0;                       // = by its tag
  int32_t unit = -1;                        // =
  uint32_t sequence = 0;                    // = operations of this group so far, modulo 2^32
  int64_t step = 0;                         // = 48 bits travel
  int64_t sends = 0;                        // bytes from the sender of the header to its receiver, 48 bits
  int64_t expects = 0;                      // and the other way
  uint32_t messages = 0;                    // 24-bit hash of the sizes of the messages that make up `sends`
  std::array<char, kLabelBytes> label{};    // = padded with zeros

  void set_label(std::string_view text);    // cut to 31 bytes
  Identity identity() const;                // label points into this header
  // "reduce_scatter, reduce of layers.3, step 7, sequence 12 of group 2"
  std::string describe() const;
};

std::array<std::byte, kHeaderBytes> encode(const Header& header);
Header decode(const std::array<std::byte, kHeaderBytes>& bytes);

// True when both name the same operation (fields marked =).
bool same_operation(const Header& a, const Header& b);

// Hash of message sizes, in order; start with 0.
uint32_t add_size(uint32_t hash, int64_t bytes);

// The tag of all headers of a group.
uint32_t header_tag(uint16_t group);
// The first tag of an operation's payload: a hash of its identity.
uint32_t payload_base(const Header& header);
// The tag of a message of the operation. Messages of one stage and different sizes never share a
// tag while their sizes differ by less than a gigabyte, so that a message is never received into
// memory of another size.
uint32_t payload_tag(uint32_t base, int stage, int64_t bytes);

}  // namespace dovetail::comm
