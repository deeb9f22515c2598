#include "dovetail/layout/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string error_of(std::string_view text, const std::function<void(TextReader&)>& read) {
  TextReader reader(text, "thing");
  try {
    reader.need_line("a line");
    read(reader);
    reader.next_line();
  } catch (const PlanError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Text, EveryNameComesBack) {
  std::string all;
  for (int c = 0; c < 256; ++c) all += static_cast<char>(c);
  for (const std::string& name : {all, std::string(), std::string("a b"), std::string("\"\\x00\n")}) {
    const std::string text = quoted_name(name) + " 1\n";
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
    TextReader reader(text, "thing");
    ASSERT_TRUE(reader.next_line());
    EXPECT_EQ(reader.name(), name);
    EXPECT_EQ(reader.number(), 1);
    EXPECT_FALSE(reader.next_line());
  }
}

TEST(Text, WordsNumbersAndLists) {
  TextReader reader("a 12 [] [1,-2,3] true\nb\n", "thing");
  ASSERT_TRUE(reader.next_line());
  reader.expect("a");
  EXPECT_EQ(reader.number(), 12);
  EXPECT_THAT(reader.list(), IsEmpty());
  EXPECT_THAT(reader.list(), ElementsAre(1, -2, 3));
  EXPECT_TRUE(reader.boolean());
  ASSERT_TRUE(reader.next_line());
  EXPECT_EQ(reader.line(), 2);
  EXPECT_EQ(reader.peek(), "b");
  EXPECT_EQ(reader.word("b"), "b");
  EXPECT_FALSE(reader.next_line());
}

TEST(Text, OnlyTheCanonicalSpellingIsRead) {
  const auto number = [](TextReader& r) { r.number(-10, 100); };
  EXPECT_EQ(error_of("7\n", number), "no error");
  for (std::string_view bad :
       {"07\n", "+7\n", "-0\n", "7x\n", "0x7\n", "\n", "7.0\n", "99999999999999999999\n", "101\n", "7"})
    EXPECT_THAT(error_of(bad, number), HasSubstr("thing, line 1:")) << bad;
  const auto list = [](TextReader& r) { r.list(); };
  EXPECT_EQ(error_of("[1,2]\n", list), "no error");
  for (std::string_view bad : {"[1,]\n", "[,1]\n", "1,2\n", "[1 2]\n", "[1\n", "[01]\n", "[\n", "]\n"})
    EXPECT_THAT(error_of(bad, list), HasSubstr("thing, line 1:")) << bad;
  const auto name = [](TextReader& r) { r.name(); };
  for (std::string_view bad :
       {"a\n", "\"a\n", "\"a\"b\n", "\"\\n\"\n", "\"\\x41\"\n", "\"\\x0A\"\n", "\"\\\n", "\"\\x0\n"})
    EXPECT_THAT(error_of(bad, name), HasSubstr("thing, line 1:")) << bad;
  const auto boolean = [](TextReader& r) { r.boolean(); };
  EXPECT_THAT(error_of("True\n", boolean), HasSubstr("wanted true or false, got \"True\""));
}

TEST(Text, SpacesAndLeftoverWordsAreErrors) {
  const auto two = [](TextReader& r) { r.expect("a"), r.expect("b"); };
  EXPECT_EQ(error_of("a b\n", two), "no error");
  for (std::string_view bad : {" a b\n", "a  b\n", "a b \n", "a b c\n", "a\n", "a\tb\n"})
    EXPECT_THAT(error_of(bad, two), HasSubstr("thing, line 1:")) << bad;
  EXPECT_THAT(error_of("", two), HasSubstr("line 1: wanted a line, got the end of the text"));
}

}  // namespace
}  // namespace dovetail
