// nvfp4_moe.Nvfp4Linear: a dense NVFP4 linear y = x W^T.
#include "moe/linear.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "handles.h"
#include "host.h"
#include "layer_source.h"
#include "moe/batch_check.h"
#include "tensor.h"
#include "torch_memory.h"

namespace nvfp4_moe::internal::python {

namespace {

struct OpenLinear {
  Device device;
  std::shared_ptr<Host> host;
  std::unique_ptr<NvfpLinear> linear;
  Workspaces* workspaces = nullptr;  // host's, of the device
  int64_t handle = 0;
  ~OpenLinear();
};

HandleTable<OpenLinear>& linear_handles() {
  // outlives every linear
  static HandleTable<OpenLinear>& table = *new HandleTable<OpenLinear>("linear");
  return table;
}

OpenLinear::~OpenLinear() { linear_handles().remove(handle); }

struct PyLinear {
  std::shared_ptr<OpenLinear> open;
};

PyLinear open_linear(nb::handle weight, int64_t out_features, int64_t in_features,
                     const std::string& activation_format, const std::string& activation_scale,
                     std::optional<double> input_scale, double static_headroom, int64_t max_tokens,
                     const std::string& device, const std::string& backend) {
  const std::shared_ptr<OpenLinear> state(new OpenLinear, DeleteWithoutLock());
  state->device = device_named(device);
  state->host = shared_host();
  LinearOptions options;
  options.backend = backend;
  options.device = device;
  options.activation_format = take(parse<ActivationFormat>(activation_format));
  options.activation_scale = take(parse<ActivationScale>(activation_scale));
  options.input_scale = static_cast<float>(input_scale.value_or(0.0));
  options.static_headroom = static_cast<float>(static_headroom);
  options.max_tokens = max_tokens;
  options.executor = &state->host->executor();
  const Nvfp4View view = read_matrix(weight, "weight", out_features, in_features);
  {
    const WithoutLock unlocked;
    state->linear = take(NvfpLinear::open(view, options));
    state->workspaces =
        &state->host->workspaces_of(state->linear->backend(), state->linear->weights().device);
  }
  state->handle = linear_handles().add(state);
  return PyLinear{std::move(state)};
}

void lease(RunWorkspace& workspace, const OpenLinear& open, const Tensor& x, int64_t tokens,
           void* stream) {
  const Status status =
      workspace.lease(*open.workspaces, open.linear->workspace_bytes(tokens), x, stream);
  if (status.ok()) return;
  const LinearWeights& weights = open.linear->weights();
  throw Failure(status.in("workspace for " + std::to_string(tokens) + " tokens of a linear of (" +
                          std::to_string(weights.rows) + ", " + std::to_string(weights.cols) +
                          ")"));
}

nb::object run_linear(OpenLinear& open, nb::handle x_object, nb::handle out_given,
                      nb::handle stream, nb::handle workspace_given) {
  if (!open.device.is_host()) check(open.linear->check_process("run"));
  const LinearWeights& weights = open.linear->weights();
  const Tensor x = Tensor::of_run(x_object, "x");
  Tensor::refuse_gradients({&x});
  const auto check_shape = [&](const Tensor& array, int64_t tokens, int64_t last) {
    if (array.is_floating() && array.ndim() == 2 && array.shape(1) == last &&
        (tokens < 0 || array.shape(0) == tokens) && array.device() == open.device &&
        array.is_contiguous())
      return;
    array.fail_expected("(" + (tokens < 0 ? std::string("tokens") : std::to_string(tokens)) + ", " +
                        std::to_string(last) + ") bfloat16, float16 or float32 on " +
                        to_string(open.device) + ", contiguous");
  };
  check_shape(x, -1, weights.cols);
  const int64_t tokens = x.shape(0);
  check(check_tokens(tokens, open.linear->max_tokens()));
  void* const queue = x.stream_or(stream);
  const nb::object out_object = out_given.is_none()
                                    ? new_like_in(x, {tokens, weights.rows}, stream, queue)
                                    : nb::borrow(out_given);
  const Tensor out = Tensor::of_run(out_object, "out");
  check_shape(out, tokens, weights.rows);
  if (!out_given.is_none()) out.check_writable();
  const LinearBatch batch{tokens, x.data(), x.dtype(), out.data(), out.dtype()};
  RunWorkspace workspace;
  const bool given = !workspace_given.is_none();
  if (given) workspace.use(Tensor(workspace_given, "workspace"), open.device);
  {
    const WithoutLock unlocked;
    if (!given) lease(workspace, open, x, tokens, queue);
    check(open.linear->run(batch, workspace.data(), workspace.size_bytes(), queue));
  }
  return out_given.is_none() ? x.in_framework(out_object) : out_object;
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PyLinear>(m, "Linear", nb::is_weak_referenceable(),
                       "An open linear layer: the base class of nvfp4_moe.Nvfp4Linear.")
      .def(nb::init<const PyLinear&>(), nb::arg("opened"))
      .def(
          "run",
          [](const PyLinear& self, nb::handle x, nb::handle out, nb::handle stream,
             nb::handle workspace) { return run_linear(*self.open, x, out, stream, workspace); },
          nb::arg("x"), nb::arg("out") = nb::none(), nb::arg("stream") = nb::none(), nb::kw_only(),
          nb::arg("workspace") = nb::none(),
          nb::sig("def run(self, x: Any, out: Any = None, stream: Any = None, *, workspace: Any = "
                  "None) -> Any"),
          R"(Computes y = x W^T for T tokens (0 to max_tokens).

May be called from several threads. No gradient flows.

Args:
    x: (T, in_features) of bfloat16, float16 or float32, contiguous, on the linear's device.
    out: (T, out_features) of bfloat16, float16 or float32, contiguous. None makes one like x.
    stream, workspace: As in MoeLayer.run.

Returns:
    out.

Raises:
    ValueError: Names the array, what was expected and what it got.
    OutOfMemory: There is no memory for a workspace.)")
      .def(
          "describe_json", [](const PyLinear& self) { return self.open->linear->describe_json(); },
          "describe() as JSON.")
      .def_prop_ro(
          "device", [](const PyLinear& self) { return to_string(self.open->device); },
          "\"cpu\" or \"cuda:N\".")
      .def_prop_ro(
          "handle", [](const PyLinear& self) { return self.open->handle; },
          "The integer that torch ops take for this linear. It does not keep the linear alive.")
      .def_prop_ro(
          "out_features", [](const PyLinear& self) { return self.open->linear->weights().rows; },
          "Rows of the weight.")
      .def_prop_ro(
          "in_features", [](const PyLinear& self) { return self.open->linear->weights().cols; },
          "Columns of the weight.")
      .def_prop_ro(
          "max_tokens", [](const PyLinear& self) { return self.open->linear->max_tokens(); },
          "The most tokens a run may have.")
      .def(
          "workspace_bytes",
          [](const PyLinear& self, std::optional<int64_t> tokens) {
            const int64_t most = self.open->linear->max_tokens();
            check(check_tokens(tokens.value_or(most), most));
            return self.open->linear->workspace_bytes(tokens.value_or(most));
          },
          nb::arg("tokens") = nb::none(),
          "Returns the minimum workspace size in bytes of a run of `tokens` tokens; it grows with "
          "them. None: max_tokens.");
  m.def("open_linear", &open_linear, nb::arg("weight"), nb::arg("out_features"),
        nb::arg("in_features"), nb::arg("activation_format"), nb::arg("activation_scale"),
        nb::arg("input_scale").none(), nb::arg("static_headroom"), nb::arg("max_tokens"),
        nb::arg("device"), nb::arg("backend"));
  m.def(
      "linear",
      [](nb::handle x, int64_t handle, int64_t out_features, nb::handle out) {
        const auto open = linear_handles().find(handle);
        if (out_features != open->linear->weights().rows)
          fail("out_features: expected " + std::to_string(open->linear->weights().rows) +
               ", the linear's, got " + std::to_string(out_features));
        return run_linear(*open, x, out, nb::none(), nb::none());
      },
      nb::arg("x"), nb::arg("handle"), nb::arg("out_features"), nb::arg("out") = nb::none());
}

}  // namespace nvfp4_moe::internal::python
