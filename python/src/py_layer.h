// The layer inside a Python Layer object.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "layer.h"
#include "progress.h"

namespace nvfp4_moe::internal::python {

class PyLayer {
 public:
  // open(state, progress) makes the state's layer. It is called without the interpreter lock.
  template <class Open>
  static PyLayer make(const Device& device, const std::shared_ptr<Host>& host,
                      std::optional<ProgressCallback> progress, Open&& open);

  OpenLayer& open() const { return *open_; }
  const MoeLayer& layer() const { return *open_->layer; }

 private:
  explicit PyLayer(std::shared_ptr<OpenLayer> open) : open_(std::move(open)) {}
  std::shared_ptr<OpenLayer> open_;
};

template <class Open>
PyLayer PyLayer::make(const Device& device, const std::shared_ptr<Host>& host,
                      std::optional<ProgressCallback> progress, Open&& open) {
  PyProgress callback(std::move(progress));
  const ProgressFn function = callback.function();
  const std::shared_ptr<OpenLayer> state(new OpenLayer, DeleteWithoutLock());
  state->device = device;
  state->host = host;
  Status status;
  {
    const WithoutLock unlocked;
    status = open(*state, function);
    if (status.ok()) {
      state->workspaces =
          &host->workspaces_of(state->layer->backend(), state->layer->weights().device);
      status = state->prepare();
    }
  }
  callback.rethrow();
  check(status);
  // Python shows it once for each place that opens layers, or raises it if its filters say so.
  if (const std::string warning = state->layer->self_check_warning(); !warning.empty())
    if (PyErr_WarnEx(PyExc_RuntimeWarning, ("nvfp4_moe: " + warning).c_str(), 2) != 0)
      throw nb::python_error();
  state->handle = layer_handles().add(state);
  return PyLayer(state);
}

}  // namespace nvfp4_moe::internal::python
