// Failures of the library as Python exceptions that carry its text, its status and, if a finding of
// a checkpoint is behind one, the finding's id.
//
// Every class derives from nvfp4_moe.Error and from the built-in exception that a caller catches
// anyway: ValueError for an argument and for bad input, OSError, MemoryError, NotImplementedError,
// else RuntimeError.
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

// Any exception as a Status whose text is that of Python's: "TypeError: ...". With the interpreter
// lock.
Status status_of(const std::exception& raised);

inline void check(const Status& status) {
  if (!status.ok()) throw Failure(status);
}
template <class T>
T take(Result<T> result) {
  if (!result.ok()) throw Failure(result.status());
  return std::move(*result);
}

// In a handler of what ends a collective call on this rank: says it to the other ranks, who wait,
// by report(status), called without the interpreter lock; then raises, of the library's failures
// what report has of all ranks, else what came.
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

}  // namespace nvfp4_moe::internal::python
