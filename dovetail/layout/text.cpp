#include "dovetail/layout/text.h"

#include <charconv>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

// The value of a hexadecimal digit as quoted_name() writes it; -1 for anything else.
int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// Decodes what follows a backslash and moves `at` to its last character; -1 where quoted_name()
// writes no such escape.
int unescape(std::string_view text, size_t& at) {
  if (at >= text.size()) return -1;
  if (text[at] == '"' || text[at] == '\\') return static_cast<unsigned char>(text[at]);
  if (text[at] != 'x' || at + 2 >= text.size()) return -1;
  const int high = hex_digit(text[at + 1]), low = hex_digit(text[at + 2]);
  at += 2;
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

}  // namespace

std::string quoted_name(std::string_view name) {
  std::string text = "\"";
  for (char c : name) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      text += {'\\', c};
    else if (code < 32 || code == 127)
      text += fmt::format("\\x{:02x}", code);
    else
      text += c;
  }
  return text + '"';
}

std::string list_text(const std::vector<int64_t>& numbers) { return fmt::format("[{}]", fmt::join(numbers, ",")); }

TextReader::TextReader(std::string_view text, std::string what) : rest_(text), what_(std::move(what)) {}

bool TextReader::next_line() {
  if (!line_rest_.empty()) fail(fmt::format("wanted the end of the line, got \"{}\"", line_rest_));
  if (rest_.empty()) return false;
  ++line_;
  const size_t end = rest_.find('\n');
  if (end == std::string_view::npos) fail("wanted a line end after the last line");
  line_rest_ = rest_.substr(0, end);
  rest_.remove_prefix(end + 1);
  return true;
}

void TextReader::need_line(std::string_view wanted) {
  if (next_line()) return;
  ++line_;
  fail(fmt::format("wanted {}, got the end of the text", wanted));
}

std::string_view TextReader::peek() const { return line_rest_.substr(0, line_rest_.find(' ')); }

std::string_view TextReader::word(std::string_view wanted) {
  const std::string_view found = peek();
  if (found.empty())
    fail(fmt::format("wanted {}, got {}", wanted, line_rest_.empty() ? "the end of the line" : "a space"));
  line_rest_.remove_prefix(found.size());
  if (line_rest_.size() == 1) fail("a space at the end of the line");
  if (!line_rest_.empty()) line_rest_.remove_prefix(1);
  return found;
}

void TextReader::expect(std::string_view exactly) {
  const std::string_view found = word(fmt::format("\"{}\"", exactly));
  if (found != exactly) fail(fmt::format("wanted \"{}\", got \"{}\"", exactly, found));
}

int64_t TextReader::to_number(std::string_view digits) const {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  // Only the canonical spelling: one text for one plan.
  if (error != std::errc{} || end != digits.data() + digits.size() || std::to_string(value) != digits)
    fail(fmt::format("wanted a number, got \"{}\"", digits));
  return value;
}

int64_t TextReader::number(int64_t least, int64_t most) {
  const int64_t value = to_number(word("a number"));
  if (value < least || value > most) fail(fmt::format("wanted a number from {} to {}, got {}", least, most, value));
  return value;
}

bool TextReader::boolean() {
  const std::string_view found = word("true or false");
  if (found != "true" && found != "false") fail(fmt::format("wanted true or false, got \"{}\"", found));
  return found == "true";
}

std::string TextReader::name() {
  if (line_rest_.empty() || line_rest_[0] != '"') fail(fmt::format("wanted a name in quotes, got \"{}\"", peek()));
  std::string name;
  size_t at = 1;
  for (; at < line_rest_.size() && line_rest_[at] != '"'; ++at) {
    int code = static_cast<unsigned char>(line_rest_[at]);
    if (code == '\\') code = unescape(line_rest_, ++at);
    if (code < 0) fail("an unknown escape in a name");
    name += static_cast<char>(code);
  }
  if (at >= line_rest_.size()) fail("a name without its closing quote");
  if (quoted_name(name) != line_rest_.substr(0, at + 1)) fail("a name with needless or missing escapes");
  line_rest_.remove_prefix(at + 1);
  if (line_rest_.empty()) return name;
  if (line_rest_[0] != ' ' || line_rest_.size() == 1) fail("wanted one space and a word after a name");
  line_rest_.remove_prefix(1);
  return name;
}

std::vector<int64_t> TextReader::list() {
  std::string_view found = word("a list");
  if (found.size() < 2 || found.front() != '[' || found.back() != ']')
    fail(fmt::format("wanted a list of numbers in brackets, got \"{}\"", found));
  found = found.substr(1, found.size() - 2);
  std::vector<int64_t> numbers;
  while (!found.empty()) {
    const size_t comma = found.find(',');
    numbers.push_back(to_number(found.substr(0, comma)));
    if (comma == found.size() - 1) fail("a list that ends with a comma");
    found.remove_prefix(comma == std::string_view::npos ? found.size() : comma + 1);
  }
  return numbers;
}

void TextReader::fail(std::string_view message) const { raise<PlanError>("{}, line {}: {}", what_, line_, message); }

}  // namespace dovetail
