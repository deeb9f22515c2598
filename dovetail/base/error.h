// Errors of two classes. A broken invariant of ours (DT_CHECK) prints both sides of the comparison; a fault of the
// user or the machine is one of the typed errors below and names the thing, what was wanted and what was got.
// Nothing in the library calls exit() or falls back in silence.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace dovetail {

// Root of every exception that the library throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An invariant of ours does not hold: a bug in Dovetail.
class InvariantError : public Error {
 public:
  using Error::Error;
};

// Bad configuration or arguments: unknown keys, impossible degrees, wrong shapes.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A layout or plan that cannot exist or does not match another rank's.
class PlanError : public Error {
 public:
  using Error::Error;
};

// A rank is gone, silent, or took part in another operation. `peer` is the rank at fault, -1 when unknown.
class CommError : public Error {
 public:
  CommError(int peer, const std::string& what) : Error(what), peer(peer) {}
  int peer;
};

// An engine call out of order, or a limit of the engine that the call ran into.
class StateError : public Error {
 public:
  using Error::Error;
};

// A checkpoint or data file that is missing, damaged or of another shape; the message names the file.
class FileError : public Error {
 public:
  using Error::Error;
};

namespace detail {

template <class E, class... Args>
[[noreturn]] void raise(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void fail_check(const char* file, int line, const char* condition, const std::string& message);

template <class A, class B>
[[noreturn]] void fail_compare(const char* file, int line, const char* condition, const A& a, const B& b,
                               const std::string& message) {
  fail_check(file, line, condition, fmt::format("{} against {}{}{}", a, b, message.empty() ? "" : ": ", message));
}

inline std::string check_message() { return {}; }
template <class... Args>
std::string check_message(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}

}  // namespace detail

// Throws a typed error with a formatted message: raise<ConfigError>("zero1 {} does not divide world {}", a, b).
using detail::raise;

}  // namespace dovetail

#define DT_CHECK(condition, ...)                                                                     \
  do {                                                                                               \
    if (!(condition)) [[unlikely]]                                                                   \
      ::dovetail::detail::fail_check(__FILE__, __LINE__, #condition,                                 \
                                     ::dovetail::detail::check_message(__VA_ARGS__));                \
  } while (false)

#define DT_CHECK_OP_(a, op, b, ...)                                                                  \
  do {                                                                                               \
    const auto& dt_a_ = (a);                                                                         \
    const auto& dt_b_ = (b);                                                                         \
    if (!(dt_a_ op dt_b_)) [[unlikely]]                                                              \
      ::dovetail::detail::fail_compare(__FILE__, __LINE__, #a " " #op " " #b, dt_a_, dt_b_,          \
                                       ::dovetail::detail::check_message(__VA_ARGS__));              \
  } while (false)

#define DT_CHECK_EQ(a, b, ...) DT_CHECK_OP_(a, ==, b, __VA_ARGS__)
#define DT_CHECK_LE(a, b, ...) DT_CHECK_OP_(a, <=, b, __VA_ARGS__)
#define DT_CHECK_LT(a, b, ...) DT_CHECK_OP_(a, <, b, __VA_ARGS__)
#define DT_CHECK_GE(a, b, ...) DT_CHECK_OP_(a, >=, b, __VA_ARGS__)
