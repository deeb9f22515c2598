// The text form of layouts and plans: one fact a line, words separated by one space, names in quotes, numbers
// exact.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace dovetail {

// "a\"b": quotes, backslashes and control characters are escaped, so that a name never spans lines.
std::string quoted_name(std::string_view name);
// [2,3]; [] for an empty list.
std::string list_text(const std::vector<int64_t>& numbers);

// Reads such a text word by word. Every failure is a PlanError "WHAT, line N: ..." (lines count from 1).
class TextReader {
 public:
  // `text` outlives the reader; `what` names it in errors ("plan").
  TextReader(std::string_view text, std::string what);

  // Goes to the next line; false at the end of the text. Fails when words of the current line were left
  // unread.
  bool next_line();
  void need_line(std::string_view wanted);  // next_line(), or an error that says what was wanted
  int64_t line() const { return line_; }

  std::string_view peek() const;  // the next word of the line; empty at its end
  std::string_view word(std::string_view wanted);
  void expect(std::string_view exactly);
  int64_t number(int64_t least = 0, int64_t most = std::numeric_limits<int64_t>::max());
  bool boolean();                 // "true" or "false"
  std::string name();             // a quoted name
  std::vector<int64_t> list();    // [2,3]

  [[noreturn]] void fail(std::string_view message) const;

 private:
  int64_t to_number(std::string_view digits) const;

  std::string_view rest_;       // lines not read yet
  std::string_view line_rest_;  // words of this line not read yet
  std::string what_;
  int64_t line_ = 0;
};

}  // namespace dovetail
