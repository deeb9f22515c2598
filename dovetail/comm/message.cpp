#include "dovetail/comm/message.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "dovetail/base/hash.h"

namespace dovetail::comm {
namespace {

constexpr uint32_t kPayloadBit = 1u << 30;

// Little-endian fields of a fixed number of bytes.
class Writer {
 public:
  explicit Writer(std::byte* at) : at_(at) {}
  void put(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) *at_++ = static_cast<std::byte>(value >> (8 * i));
  }
  std::byte* at() { return at_; }

 private:
  std::byte* at_;
};

class Reader {
 public:
  explicit Reader(const std::byte* at) : at_(at) {}
  uint64_t get(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(*at_++) << (8 * i);
    return value;
  }
  const std::byte* at() { return at_; }

 private:
  const std::byte* at_;
};

int64_t sign_extend_48(uint64_t value) { return static_cast<int64_t>(value << 16) >> 16; }

}  // namespace

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::none: return "none";
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_reduce: return "all_reduce";
    case Operation::exchange: return "exchange";
    case Operation::gather_bytes: return "gather_bytes";
    case Operation::barrier: return "barrier";
    case Operation::split: return "split";
  }
  return "?";
}

void Header::set_label(std::string_view text) {
  label.fill('\0');
  std::copy_n(text.data(), std::min(text.size(), label.size()), label.data());
}

Identity Header::identity() const {
  return {phase, unit, step, std::string_view(label.data(), strnlen(label.data(), label.size()))};
}

std::string Header::describe() const {
  if (operation == Operation::none) return "no operation yet";
  return fmt::format("{}, {}, sequence {} of group {}", name_of(operation), identity().describe(), sequence, group);
}

std::array<std::byte, kHeaderBytes> encode(const Header& h) {
  std::array<std::byte, kHeaderBytes> bytes;
  Writer w(bytes.data());
  w.put(static_cast<uint8_t>(h.operation), 1);
  w.put(static_cast<uint8_t>(h.phase), 1);
  w.put(h.group, 2);
  w.put(static_cast<uint32_t>(h.unit), 4);
  w.put(h.sequence, 4);
  w.put(static_cast<uint64_t>(h.step), 6);
  w.put(static_cast<uint64_t>(h.sends), 6);
  w.put(static_cast<uint64_t>(h.expects), 6);
  w.put(h.messages, 3);
  std::memcpy(w.at(), h.label.data(), kLabelBytes);
  static_assert(1 + 1 + 2 + 4 + 4 + 6 + 6 + 6 + 3 + kLabelBytes == kHeaderBytes);
  return bytes;
}

Header decode(const std::array<std::byte, kHeaderBytes>& bytes) {
  Header h;
  Reader r(bytes.data());
  h.operation = static_cast<Operation>(r.get(1));
  h.phase = static_cast<Phase>(r.get(1));
  h.group = static_cast<uint16_t>(r.get(2));
  h.unit = static_cast<int32_t>(r.get(4));
  h.sequence = static_cast<uint32_t>(r.get(4));
  h.step = sign_extend_48(r.get(6));
  h.sends = sign_extend_48(r.get(6));
  h.expects = sign_extend_48(r.get(6));
  h.messages = static_cast<uint32_t>(r.get(3));
  std::memcpy(h.label.data(), r.at(), kLabelBytes);
  return h;
}

bool same_operation(const Header& a, const Header& b) {
  return a.operation == b.operation && a.phase == b.phase && a.group == b.group && a.unit == b.unit &&
         a.sequence == b.sequence && a.step == b.step && a.label == b.label;
}

uint32_t add_size(uint32_t hash, int64_t bytes) {
  const uint64_t mixed = (hash ^ static_cast<uint64_t>(bytes)) * 0x9E3779B97F4A7C15u + 1;
  return static_cast<uint32_t>(mixed >> 40);
}

uint32_t header_tag(uint16_t group) { return group; }

uint32_t payload_base(const Header& header) {
  Header same = header;
  same.sends = same.expects = 0;
  same.messages = 0;
  return static_cast<uint32_t>(hash64(encode(same)));
}

uint32_t payload_tag(uint32_t base, int stage, int64_t bytes) {
  const uint32_t linear =
      base + static_cast<uint32_t>(stage) * 0x3C6EF372u + static_cast<uint32_t>(bytes) * 0x9E3779B1u;
  return kPayloadBit | (linear & (kPayloadBit - 1));
}

}  // namespace dovetail::comm
