// Failures of the library as Python exceptions that carry its text, its code and, where a finding of a checkpoint is
// behind one, the finding's id.
//
// Every class derives from nvfp4_moe.Error and from the built-in exception that a caller catches anyway: ValueError for
// an argument and for bad input, OSError, MemoryError, NotImplementedError, else RuntimeError.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>

#include "core/status.h"

namespace nvfp4_moe::python {

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

[[noreturn]] inline void fail(std::string message) { throw Failure(invalid_argument(std::move(message))); }

inline void check(const Status& status) {
  if (!status.ok()) throw Failure(status);
}
template <class T>
T take(Result<T> result) {
  if (!result.ok()) throw Failure(result.status());
  return std::move(*result);
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

}  // namespace nvfp4_moe::python
