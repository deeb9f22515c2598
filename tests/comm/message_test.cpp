#include "dovetail/comm/message.h"

#include <gtest/gtest.h>

#include <set>

namespace dovetail::comm {
namespace {

Header sample() {
  Header h;
  h.operation = Operation::reduce_scatter;
  h.phase = Phase::reduce_main;
  h.group = 65535;
  h.unit = -1;
  h.sequence = 0xfffffffe;
  h.step = (int64_t{1} << 47) - 1;
  h.sends = (int64_t{1} << 40) + 5;
  h.expects = 12345678901;
  h.messages = 0xabcdef;
  h.set_label("exactly thirty-one characters!!and more");
  return h;
}

TEST(Header, TravelsWhole) {
  const Header h = sample(), back = decode(encode(h));
  EXPECT_TRUE(same_operation(h, back));
  EXPECT_EQ(back.sends, h.sends);
  EXPECT_EQ(back.expects, h.expects);
  EXPECT_EQ(back.messages, h.messages);
  EXPECT_EQ(back.identity().label, "exactly thirty-one characters!!");
  EXPECT_EQ(back.describe(), "reduce_scatter, reduce_main of exactly thirty-one characters!!, step 140737488355327, "
                             "sequence 4294967294 of group 65535");
}

TEST(Header, EveryFieldOfTheIdentityIsCompared) {
  const Header h = sample();
  const auto differs = [&](auto change) {
    Header other = h;
    change(other);
    return !same_operation(h, decode(encode(other))) && payload_base(h) != payload_base(other);
  };
  EXPECT_TRUE(differs([](Header& o) { o.operation = Operation::all_gather; }));
  EXPECT_TRUE(differs([](Header& o) { o.phase = Phase::reduce; }));
  EXPECT_TRUE(differs([](Header& o) { o.group = 1; }));
  EXPECT_TRUE(differs([](Header& o) { o.unit = 0; }));
  EXPECT_TRUE(differs([](Header& o) { o.sequence = 2; }));
  EXPECT_TRUE(differs([](Header& o) { o.step = 3; }));
  EXPECT_TRUE(differs([](Header& o) { o.set_label("other"); }));
  EXPECT_FALSE(differs([](Header& o) { o.sends = 1; }));
}

TEST(Tags, SizesOfOneStageNeverShareATag) {
  const uint32_t base = payload_base(sample());
  std::set<uint32_t> tags;
  for (int64_t bytes = 1; bytes <= 20'000; ++bytes) tags.insert(payload_tag(base, 0, bytes * 65521));
  EXPECT_EQ(tags.size(), 20'000u);
  for (uint32_t tag : tags) {
    EXPECT_LT(tag, 1u << 31);
    EXPECT_GT(tag, header_tag(UINT16_MAX));
  }
  EXPECT_NE(payload_tag(base, 0, 64), payload_tag(base, 1, 64));
}

}  // namespace
}  // namespace dovetail::comm
