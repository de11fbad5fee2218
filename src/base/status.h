// Status and Result<T>: how every fallible call of Forebay reports.
//
// A miss, "full" and "end of stream" are values of their own types, not errors. Messages carry what
// a person needs to act: path, offset, errno text, remedy.
#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace forebay {

enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,  // the caller's input is wrong
  kNotFound,         // a named file, folder or object does not exist
  kPermissionDenied,
  kDataLoss,           // bytes are missing or do not match their checksum
  kChanged,            // the data set differs from its catalog
  kResourceExhausted,  // budget, disk or descriptors
  kUnavailable,        // storage or peer does not answer now; a retry may succeed
  kDeadlineExceeded,
  kCancelled,
  kUnimplemented,  // this build or kernel lacks the feature
  kAlreadyExists,  // a name is taken
  kInternal,       // our own bug
};

std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Maps an errno value to the nearest code. `what` names the operation and its object.
Status ErrnoStatus(int error, std::string_view what);

// Holds a T or a non-ok Status. Member names follow std::expected.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit by design
  Result(Status error) : state_(std::move(error)) {  // NOLINT: implicit by design
    assert(!std::get<Status>(state_).ok());
  }

  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Status& error() const { return std::get<Status>(state_); }
  Status status() const { return has_value() ? Status() : error(); }

 private:
  std::variant<T, Status> state_;
};

// Concatenates strings and numbers; the only formatting most messages need.
namespace internal {
inline void Append(std::string& out, std::string_view s) { out.append(s); }
inline void Append(std::string& out, const char* s) { out.append(s); }
inline void Append(std::string& out, const std::string& s) { out.append(s); }
inline void Append(std::string& out, char c) { out.push_back(c); }
template <typename N>
requires std::is_arithmetic_v<N>
void Append(std::string& out, N n) { out.append(std::to_string(n)); }
}  // namespace internal

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string out;
  (internal::Append(out, parts), ...);
  return out;
}

#define FOREBAY_RETURN_IF_ERROR(expr)        \
  do {                                       \
    ::forebay::Status fb_status_ = (expr);   \
    if (!fb_status_.ok()) return fb_status_; \
  } while (false)

}  // namespace forebay
