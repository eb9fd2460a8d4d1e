// Failures of the library as Python exceptions. They carry the message, the status and, if a
// finding of a checkpoint caused the failure, the finding's id.
//
// Every class derives from nvfp4_moe.Error and from a matching built-in exception: ValueError for
// an argument and for bad input, OSError, MemoryError, NotImplementedError, else RuntimeError.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "core/status.h"
#include "interpreter.h"

namespace nvfp4_moe::internal::python {

class Failure : public std::exception {
 public:
  explicit Failure(Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return status_.message().c_str(); }
  Code code() const { return status_.code(); }
  const Status& status() const { return status_; }
  std::string finding() const { return status_.finding(); }

 private:
  Status status_;
};

[[noreturn]] inline void fail(std::string message) {
  throw Failure(invalid_argument(std::move(message)));
}

// Converts any exception to a Status. A Python exception's text is "TypeError: ...". Needs the
// interpreter lock.
Status status_of(const std::exception& raised);

inline void check(const Status& status) {
  if (!status.ok()) throw Failure(status);
}
template <class T>
T take(Result<T> result) {
  if (!result.ok()) throw Failure(result.status());
  return std::move(*result);
}

// Called in a handler, if a collective call fails on this rank while the other ranks wait. Calls
// report(status) without the interpreter lock, which broadcasts the failure. Then it raises: for a
// failure of the library the error that all ranks raise, otherwise the original exception.
template <class Report>
[[noreturn]] void raise_on_all_ranks(const std::exception& raised, const Report& report) {
  const Status failure = status_of(raised);
  Status of_all;
  {
    const WithoutLock unlocked;
    of_all = report(failure);
  }
  if (dynamic_cast<const Failure*>(&raised) != nullptr) check(of_all);
  throw;
}

void bind_errors(nanobind::module_& m);
void bind_formats(nanobind::module_& m);
void bind_codecs(nanobind::module_& m);
void bind_checkpoint(nanobind::module_& m);
void bind_layer(nanobind::module_& m);
void bind_layer_open(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_router(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
void bind_quantize_checkpoint(nanobind::module_& m);
void bind_tool(nanobind::module_& m);

}  // namespace nvfp4_moe::internal::python
