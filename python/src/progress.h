// Adapts a Python callable to a ProgressFn.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>

#include "core/progress.h"
#include "dicts.h"
#include "interpreter.h"

namespace nvfp4_moe::internal::python {

using ProgressCallback = nanobind::typed<nanobind::callable, std::optional<bool>(Dict)>;

// Calls the callable with a dict, from a thread that may not hold the interpreter lock. The
// operation is cancelled if the callable returns False or raises, and also, even without a
// callable, if a signal handler raises (Ctrl-C's KeyboardInterrupt). rethrow() raises the exception
// again after the library has returned.
class PyProgress {
 public:
  explicit PyProgress(std::optional<ProgressCallback> callback = std::nullopt)
      : callback_(std::move(callback)) {}
  ProgressFn function() {
    return [this](const Progress& progress) {
      if (signals_.pending(raised_)) return false;
      if (!callback_) return true;
      const WithLock lock;
      try {
        return in_python([&] {
          const nanobind::object answer = (*callback_)(to_dict(progress));
          return !(nanobind::isinstance<nanobind::bool_>(answer) && !nanobind::cast<bool>(answer));
        });
      } catch (nanobind::python_error& error) {
        raised_ = std::make_unique<nanobind::python_error>(error);
        return false;
      }
    };
  }
  void rethrow() const {
    if (raised_) throw nanobind::python_error(*raised_);
  }

 private:
  std::optional<ProgressCallback> callback_;
  Signals signals_;
  std::unique_ptr<nanobind::python_error> raised_;
};

}  // namespace nvfp4_moe::internal::python
