// Status and Result<T>: how every fallible function of the library reports failure.
//
// A Status is a code plus one line that names the thing, the expected value and the actual one, for
// example "layer 12 expert 7 up_proj.weight_scale: expected (1536, 448) F8_E4M3, got (1536, 224)".
// A failure caused by a named finding of a checkpoint has the finding's id at its end: "...:
// expected a finite scale, got NaN [tensor_scale_nan]".
//
// Messages contain names from files and arguments, so the constructor makes every message printable
// (core/printable.h). Nothing in the library prints, aborts or throws across include/. Inside, a
// failed allocation throws std::bad_alloc. Each entry to the library (the C interface, the Python
// module, the command line) has one place that turns exceptions into a Status, by caught_exception.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/printable.h"

namespace nvfp4_moe::internal {

enum class Code : int {
  kOk = 0,
  kCheckFailed = 1,      // a comparison ran and did not hold
  kInvalidArgument = 2,  // the caller's option, shape, dtype or pointer is wrong
  kUnsupported = 3,      // valid, but no backend supports it here
  kBadInput = 4,         // the contents of a file are wrong
  kIo = 5,               // the operating system refused a file operation
  kOutOfMemory = 6,
  kBusy = 7,  // the object is in use elsewhere
  kInternal = 8,
  kCancelled = 9,  // a progress callback asked to stop
};

const char* to_string(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string_view message)
      : code_(code), message_(printable(message, kWholeText)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // The id of the finding that caused the failure; empty if there is none.
  std::string finding() const {
    return finding_size_ == 0 ? ""
                              : message_.substr(message_.size() - 1 - finding_size_, finding_size_);
  }

  // The same failure with `where` put in front: "where: message".
  Status in(const std::string& where) const {
    Status status = *this;
    if (!ok()) status.message_ = printable(where, kWholeText) + ": " + message_;
    return status;
  }
  // The same failure, caused by the finding of that id.
  Status of_finding(const std::string& id) const {
    Status status = *this;
    status.message_ += " [" + id + "]";
    status.finding_size_ = static_cast<uint32_t>(id.size());
    return status;
  }

 private:
  Code code_ = Code::kOk;
  uint32_t finding_size_ = 0;  // the message ends with "[", that many characters and "]"
  std::string message_;
};

// Turns the current exception into a Status. Call it only from a handler. Allocates nothing if
// memory ran out.
Status caught_exception() noexcept;

inline Status invalid_argument(std::string_view message) {
  return {Code::kInvalidArgument, message};
}
inline Status unsupported(std::string_view message) { return {Code::kUnsupported, message}; }
inline Status bad_input(std::string_view message) { return {Code::kBadInput, message}; }
inline Status io_error(std::string_view message) { return {Code::kIo, message}; }
inline Status check_failed(std::string_view message) { return {Code::kCheckFailed, message}; }

// A value, or the Status that explains why there is no value.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

// NVFP4_MOE_TRY(status_expression): returns the status from the enclosing function unless it is ok.
#define NVFP4_MOE_TRY(...)                                                          \
  do {                                                                              \
    if (::nvfp4_moe::internal::Status try_status = (__VA_ARGS__); !try_status.ok()) \
      return try_status;                                                            \
  } while (false)

#define NVFP4_MOE_CONCAT_(a, b) a##b
#define NVFP4_MOE_CONCAT(a, b) NVFP4_MOE_CONCAT_(a, b)

// NVFP4_MOE_ASSIGN(auto x, result_expression): declares x from the value, or returns the status.
#define NVFP4_MOE_ASSIGN(declaration, ...) \
  NVFP4_MOE_ASSIGN_(NVFP4_MOE_CONCAT(assign_result_, __LINE__), declaration, __VA_ARGS__)
#define NVFP4_MOE_ASSIGN_(result, declaration, ...) \
  auto result = (__VA_ARGS__);                      \
  if (!result.ok()) return result.status();         \
  declaration = std::move(*result)

}  // namespace nvfp4_moe::internal
