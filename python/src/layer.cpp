// nvfp4_moe.MoeLayer: everything but how it is opened and its run.
#include "layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "dicts.h"
#include "layer_source.h"
#include "moe/batch_check.h"
#include "options.h"
#include "parallel/rank_combine.h"
#include "progress.h"
#include "py_layer.h"
#include "router.h"
#include "verify/calibrate.h"

namespace nvfp4_moe::internal::python {

namespace {

RankCombine& ranks_in(const PyLayer& self, const char* what) {
  return *take(ranks_of(self.layer(), what));
}

void rearrange(const PyLayer& self, std::vector<int64_t> placement, nb::handle checkpoint_object,
               int64_t layer) {
  RankCombine& ranks = ranks_in(self, "rearrange");
  const Checkpoint& checkpoint = checkpoint_of(checkpoint_object);
  const WithoutLock unlocked;
  check(ranks.rearrange_checkpoint(std::move(placement), checkpoint, layer));
}

std::vector<uint64_t> expert_load(const PyLayer& self) {
  RankCombine& ranks = ranks_in(self, "expert_load");
  Result<std::vector<uint64_t>> load = [&] {
    const WithoutLock unlocked;
    return ranks.expert_load();
  }();
  return take(std::move(load));
}

nb::object run(const PyLayer& self, nb::handle hidden, nb::handle topk_ids, nb::handle topk_weights,
               nb::handle out, nb::handle stream, nb::handle shared_weights, nb::handle workspace) {
  return run_layer(self.open(),
                   {hidden, topk_ids, topk_weights, shared_weights, out, stream, workspace});
}

nb::object run_logits(const PyLayer& self, nb::handle hidden, nb::handle logits,
                      nb::handle correction_bias, nb::handle expert_scale, nb::handle token_ids,
                      nb::handle hash_table, nb::handle topk, nb::handle out, nb::handle stream,
                      nb::handle shared_weights, nb::handle workspace, const RouterFields& router) {
  const nb::object none = nb::none();
  std::optional<Selection> selection;
  try {
    selection.emplace(
        router_config(router),
        SelectionArrays{logits, correction_bias, expert_scale, token_ids, hash_table, topk, none},
        DType::kI32);
  } catch (const std::exception& raised) {
    decline_run(self.open(), raised);
  }
  return run_layer(self.open(), {hidden, selection->ids().object(), selection->weights().object(),
                                 shared_weights, out, stream, workspace, &selection->call()});
}

Dict status(const PyLayer& self) {
  OpenLayer& open = self.open();
  if (!open.device.is_host()) {
    RunStatus reported;
    check(open.layer->check_process("status"));
    {
      const WithoutLock unlocked;
      const DeviceMemory& memory = *open.layer->backend().memory;
      check(memory.synchronize(open.device.index));
      check(open.layer->failure());
      check(memory.to_host(open.device.index, &reported, open.device_status.data(),
                           sizeof(reported), nullptr));
    }
    return to_dict(reported);
  }
  return to_dict([&] {  // making Python objects may run any code, so the mutex is released first
    const std::lock_guard lock(open.status_mutex);
    return open.status;
  }());
}

Dict calibrate(const PyLayer& self, nb::handle hidden_object, nb::handle ids_object,
               nb::handle weights_object) {
  if (!self.open().device.is_host())
    throw Failure(unsupported("calibrate: expected a layer on cpu, got one on " +
                              to_string(self.open().device)));
  check(self.layer().check_one_rank("calibrate"));
  const Tensor hidden(hidden_object, "hidden"), ids(ids_object, "topk_ids"),
      weights(weights_object, "topk_weights");
  const Batch batch = batch_of(self.open(), hidden, ids, weights);
  const MoeLayer& layer = self.layer();
  std::optional<Result<LayerCalibration>> result;
  PyProgress signals;
  {
    const WithoutLock unlocked;
    // Needs no out and no workspace: it opens its own layer with the reference backend.
    const LayerSource source = unpacked_source(layer);
    result.emplace(calibrate_layer(source, layer.config().options(), layer.weights().range, batch,
                                   self.open().host->executor(), "hidden", signals.function()));
  }
  signals.rethrow();
  const LayerCalibration measured = take(std::move(*result));
  Dict d = to_dict(measured.scales());
  d["hidden_amax"] = measured.hidden_amax;
  d["intermediate_amax"] = measured.intermediate_amax;
  d["tokens"] = measured.tokens;
  d["experts_seen"] = measured.experts_seen;
  return d;
}

void warmup(const PyLayer& self, std::optional<ProgressCallback> progress) {
  PyProgress callback(std::move(progress));
  const ProgressFn function = callback.function();
  Status status;
  {
    const WithoutLock unlocked;
    const MoeLayer& layer = self.layer();
    if (layer.backend().memory == nullptr) {  // kept for later runs, with its pages mapped
      const auto workspace =
          take(self.open().workspaces->own.lease(layer.plan().workspace.total_bytes));
      status = layer.warmup(workspace.data(), workspace.size_bytes(), nullptr, function);
    } else {
      const Buffer workspace = take(layer.backend().allocate(layer.plan().workspace.total_bytes,
                                                             layer.weights().device, "workspace"));
      status = layer.warmup(workspace.data(), workspace.size_bytes(), nullptr, function);
    }
  }
  callback.rethrow();
  check(status);
}

// The intermediate size of an expert in this process. Over ranks, another process may hold the
// shared expert.
int64_t inner_size(const MoeLayer& layer, int64_t local_expert) {
  const MoeConfig& config = layer.weights().config;
  return local_expert == kSharedExpert ? config->shared_intermediate_size
                                       : config->intermediate_size;
}

void replace_expert(const PyLayer& self, int64_t local_expert, nb::handle gate, nb::handle up,
                    nb::handle down, nb::handle biases, nb::handle stream) {
  const MoeLayer& layer = *self.open().layer;
  std::optional<void*> queue;
  if (!stream.is_none()) {
    if (self.open().device.is_host())
      fail("stream: expected None for a layer on cpu, got a stream");
    queue = stream_address(stream);
  }
  const ExpertSource source = read_expert(gate, up, down, biases, layer.config(),
                                          inner_size(layer, local_expert), self.open().device);
  const WithoutLock unlocked;
  check(self.open().replace_expert(local_expert, source, queue));
}

Dict expert(const PyLayer& self, int64_t local_expert) {
  const MoeLayer& layer = self.layer();
  ExpertBuffers buffers;
  {
    const WithoutLock unlocked;
    check(layer.unpack_expert(local_expert, buffers));
  }
  return to_dict(source_of(layer.config(), buffers));
}

constexpr const char* kRunDoc =
    R"(Runs the layer on T tokens (0 to max_tokens).

All arrays are contiguous and on the layer's device. May be called from several threads. No gradient
flows.

Args:
    hidden: (T, hidden_size) of bfloat16, float16 or float32.
    topk_ids: int32 or int64 (T, top_k), global expert ids. -1, or an expert of another rank, adds
        nothing.
    topk_weights: float32 (T, top_k).
    out: (T, hidden_size) of bfloat16, float16 or float32; must not overlap the inputs. None makes
        one of hidden's framework, dtype and device.
    stream: For arrays on a GPU, an integer or a stream object. None is torch's current stream for
        torch tensors, else the default stream.
    shared_weights: float32 (T,), factors of the shared expert's output. None is 1.
    workspace: uint8 (bytes,), at least workspace_bytes(T), at an address that is a multiple of 256.
        Only this run may use it until the run has ended in its stream. None takes a workspace of
        the library (docs/how-to/python.md, Memory).

Returns:
    out.

Raises:
    ValueError: Names the array, what was expected and what it got.
    OutOfMemory: There is no memory for a workspace.
    Busy: replace_expert is running.)";

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<PyLayer>(m, "Layer", nb::is_weak_referenceable(),
                      "An open layer: the base class of nvfp4_moe.MoeLayer.")
      .def(nb::init<const PyLayer&>(), nb::arg("opened"))
      .def("run", &run, nb::arg("hidden").none(), nb::arg("topk_ids").none(),
           nb::arg("topk_weights").none(), nb::arg("out") = nb::none(),
           nb::arg("stream") = nb::none(), nb::kw_only(), nb::arg("shared_weights") = nb::none(),
           nb::arg("workspace") = nb::none(),
           nb::sig("def run(self, hidden: Any, topk_ids: Any, topk_weights: Any, out: Any = None, "
                   "stream: Any = None, *, "
                   "shared_weights: Any = None, workspace: Any = None) -> Any"),
           kRunDoc)
      .def(
          "describe_json", [](const PyLayer& self) { return self.layer().describe_json(); },
          "describe() as JSON.")
      .def(
          "describe_run_json",
          [](const PyLayer& self, int64_t tokens) {
            return take(self.layer().describe_run_json(tokens));
          },
          nb::arg("tokens"), "describe_run(tokens) as JSON.")
      .def(
          "config_json",
          [](const PyLayer& self) { return to_json(self.layer().config().options()); },
          "config as JSON.")
      .def_prop_ro(
          "device", [](const PyLayer& self) { return to_string(self.open().device); },
          "\"cpu\" or \"cuda:N\".")
      .def_prop_ro(
          "handle", [](const PyLayer& self) { return self.open().handle; },
          "The integer that torch ops take for this layer. It does not keep the layer alive.")
      .def(
          "workspace_bytes",
          [](const PyLayer& self, std::optional<int64_t> tokens) {
            const int64_t most = self.layer().max_tokens();
            check(check_tokens(tokens.value_or(most), most));
            return self.layer().workspace_bytes(tokens.value_or(most));
          },
          nb::arg("tokens") = nb::none(),
          "Returns the minimum workspace size in bytes of a run of `tokens` tokens; it grows with "
          "them. None: max_tokens.")
      .def_prop_ro(
          "max_tokens", [](const PyLayer& self) { return self.layer().max_tokens(); },
          "The most tokens a run may have.")
      .def_prop_ro(
          "first_expert", [](const PyLayer& self) { return self.layer().weights().range.first; },
          "Global id of the first local expert; over an exchange, the number of the first local "
          "slot.")
      .def_prop_ro(
          "expert_count", [](const PyLayer& self) { return self.layer().weights().range.count; },
          "How many experts this layer holds.")
      .def("status", &status,
           R"(Returns counts from the layer's last run.

bad_expert_ids: ids that were skipped.
nonfinite_tokens: tokens whose hidden holds NaN or Inf. Their output rows are NaN.
nonfinite_rows: rows whose intermediate holds NaN or Inf.
hidden_blocks, hidden_saturated, hidden_zeroed: blocks quantized, and how many of them saturated at
    448 or were rounded to zero; the same for intermediate.
nonfinite_weights: NaN or Inf in topk_weights of local rows and in shared_weights, also those that
    combine does not multiply by.
nonfinite_outputs: elements of out that are NaN or Inf as stored. If nonfinite_tokens and
    nonfinite_weights are 0, the cause is an overflow.

On a GPU it waits for all work of the device. Under NVFP4_MOE_CHECK it then waits for the check of
those runs and raises CheckFailed, once, if that found a wrong token. Over an exchange it raises the error that ended the
exchange during earlier runs, including replayed graphs. With a capacity it raises ValueError, once,
if a run since the last call had more tokens than the capacity.)")
      .def("calibrate", &calibrate, nb::arg("hidden"), nb::arg("topk_ids"), nb::arg("topk_weights"),
           R"(Measures static activation scales on sample inputs.

The inputs are those of run. It computes with the exact reference and bf16 activations.

Returns:
    A dict with hidden and intermediate (amax/2688, for input_scale), hidden_amax,
    intermediate_amax, tokens and experts_seen. Over several batches or ranks take the maximum.

Raises:
    BadInput: hidden holds NaN or Inf.)")
      .def("warmup", &warmup, nb::arg("progress") = nb::none(),
           "Runs the layer at token counts that touch every kernel, all weights and the workspace."
           "\n\n"
           "progress is called with a dict (what, item, done, total, elapsed_s). Return False to "
           "cancel,\nwhich raises Cancelled.")
      .def("expert_load", &expert_load,
           "Returns how many assignments each expert got on all ranks since open or "
           "reset_expert_load().\n\n"
           "Collective. Requires an exchange.")
      .def(
          "reset_expert_load",
          [](const PyLayer& self) {
            check(ranks_in(self, "reset_expert_load").reset_expert_load());
          },
          "Resets this rank's expert-load counters.")
      .def("rearrange", &rearrange, nb::arg("placement"), nb::arg("checkpoint"), nb::arg("layer"),
           R"(Assigns other experts to the ranks' slots, in place. Collective; requires an exchange.

The packed weights equal those of a layer newly opened with this placement. If one rank fails, the
call fails on all ranks with its message. If experts have been replaced by then, the exchange ends.

Args:
    placement: The expert of each slot, for example from propose_placement.
    checkpoint: A Checkpoint with the same weights.
    layer: The layer's number in the checkpoint.)")
      .def("expert", &expert, nb::arg("local_expert"),
           R"(Returns copies of one expert's weights, bit for bit as they were given.

local_expert -1 is the shared expert. The result has "gate" (None in a layer without one), "up" and
"down". Each is a dict of "codes", "scales", "tensor_scale" and, with expert_biases, "bias".)");
  m.def("replace_expert", &replace_expert, nb::arg("layer"), nb::arg("local_expert"),
        nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::arg("biases").none(),
        nb::arg("stream").none());

  m.def(
      "check_config", [](const std::string& json) { (void)config_of(json); }, nb::arg("config"));

  // MoeLayer.run_logits. The router is passed as its fields.
  m.def("run_logits", &run_logits, nb::arg("layer"), nb::arg("hidden").none(),
        nb::arg("logits").none(), nb::arg("correction_bias").none(), nb::arg("expert_scale").none(),
        nb::arg("token_ids").none(), nb::arg("hash_table").none(), nb::arg("topk").none(),
        nb::arg("out").none(), nb::arg("stream").none(), nb::arg("shared_weights").none(),
        nb::arg("workspace").none(), nb::arg("router"));

  // The bodies of the torch ops, which take a layer's handle.
  m.def(
      "moe_layer",
      [](nb::handle hidden, nb::handle topk_ids, nb::handle topk_weights, int64_t handle,
         nb::handle out) {
        const auto open = layer_handles().find(handle);
        const nb::object none = nb::none();
        return run_layer(*open, {hidden, topk_ids, topk_weights, none, out, none, none});
      },
      nb::arg("hidden"), nb::arg("topk_ids"), nb::arg("topk_weights"), nb::arg("handle"),
      nb::arg("out") = nb::none());

  m.def(
      "release_workspaces",
      [](const std::optional<std::string>& device_name) -> size_t {
        std::optional<Device> device;
        if (device_name) device = device_named(*device_name);
        const WithoutLock unlocked;
        const auto host = living_host();
        return host == nullptr ? 0 : host->release_workspaces(device ? &*device : nullptr);
      },
      nb::arg("device") = nb::none());
}

}  // namespace nvfp4_moe::internal::python
