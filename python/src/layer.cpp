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
                      nb::handle correction_bias, nb::handle token_ids, nb::handle hash_table,
                      nb::handle topk, nb::handle out, nb::handle stream, nb::handle shared_weights,
                      nb::handle workspace, const RouterFields& router) {
  const nb::object none = nb::none();
  std::optional<Selection> selection;
  try {
    selection.emplace(router_config(router),
                      SelectionArrays{logits, correction_bias, token_ids, hash_table, topk, none},
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
  return to_dict([&] {  // what makes Python objects may run anything, and holds no lock
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
    // Needs no out and no workspace: its own layer, of the reference, has them.
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
    if (layer.backend().memory == nullptr) {  // kept, with its pages there
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

// Of an expert that this process has: over ranks the shared expert may be another one's.
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
  const int64_t hidden = layer.config()->hidden_size, inner = inner_size(layer, local_expert);
  ExpertBuffers buffers;
  {
    const WithoutLock unlocked;
    check(layer.unpack_expert(local_expert, buffers));
  }
  const auto view = [](const Nvfp4Buffers& b, float scale, int64_t rows, int64_t cols) {
    return Nvfp4View::contiguous(b.codes.data(), b.block_scales.data(), scale, rows, cols);
  };
  ExpertSource source{
      view(buffers.gate, buffers.scales.gate, gate_rows(layer.config()->activation, inner), hidden),
      view(buffers.up, buffers.scales.up, inner, hidden),
      view(buffers.down, buffers.scales.down, hidden, inner)};
  const auto bias = [](const std::vector<float>& b) { return b.empty() ? nullptr : b.data(); };
  source.biases = {bias(buffers.gate_bias), bias(buffers.up_bias), bias(buffers.down_bias)};
  return to_dict(source);
}

constexpr const char* kRunDoc =
    "The layer on T tokens; returns out.\n\n"
    "hidden: (T, hidden_size) bfloat16, float16 or float32. topk_ids: (T, top_k) int32 or int64, "
    "global expert ids;\n"
    "-1, or an expert of another rank, adds nothing. topk_weights: (T, top_k) float32. out: (T, "
    "hidden_size) of the\n"
    "three dtypes, memory of its own; None makes one of hidden's framework, dtype and device. "
    "stream: for arrays on\n"
    "a GPU, an integer or a stream object; None is torch's current stream for torch tensors, else "
    "the default one.\n"
    "shared_weights: (T,) float32 factors of the shared expert's output, None for 1. workspace: "
    "(bytes,) uint8 at a\n"
    "multiple of 256, at least workspace_bytes(T), for this run alone until it has ended in its "
    "stream; None takes\n"
    "one of the library's (docs/how-to/python.md, Memory). All on the layer's device, contiguous. "
    "T is at "
    "most max_tokens; 0\n"
    "is legal.\n\n"
    "Raises ValueError, naming the array, what was expected and what came; OutOfMemory where there "
    "is no memory for a\n"
    "workspace; Busy while replace_expert runs. May be called from several threads. No gradient "
    "flows.";

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<PyLayer>(m, "Layer", nb::is_weak_referenceable(),
                      "What nvfp4_moe.MoeLayer is built on: an open layer.")
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
          "The integer that stands for this layer in torch ops. It does not keep the layer alive.")
      .def(
          "workspace_bytes",
          [](const PyLayer& self, std::optional<int64_t> tokens) {
            const int64_t most = self.layer().max_tokens();
            check(check_tokens(tokens.value_or(most), most));
            return self.layer().workspace_bytes(tokens.value_or(most));
          },
          nb::arg("tokens") = nb::none(),
          "Bytes of workspace that a run of so many tokens takes at least; grows with them. None: "
          "max_tokens.")
      .def_prop_ro(
          "max_tokens", [](const PyLayer& self) { return self.layer().max_tokens(); },
          "The most tokens a run may have.")
      .def_prop_ro(
          "first_expert", [](const PyLayer& self) { return self.layer().weights().range.first; },
          "Global id of the first local expert; over an exchange, of the first local slot.")
      .def_prop_ro(
          "expert_count", [](const PyLayer& self) { return self.layer().weights().range.count; },
          "How many experts this layer holds.")
      .def("status", &status,
           "What the layer's last run reported, as counts: bad_expert_ids (skipped), "
           "nonfinite_tokens (NaN rows),\n"
           "nonfinite_rows, for hidden and intermediate the blocks quantized, saturated at 448 and "
           "zeroed,\n"
           "nonfinite_weights (topk_weights of rows here, and shared_weights, that are NaN or Inf, "
           "also where combine\n"
           "does not multiply by them) and nonfinite_outputs (elements of out that are NaN or Inf "
           "as stored: by\n"
           "overflow, where nonfinite_tokens and nonfinite_weights are 0). On a GPU it waits for "
           "all work of the\n"
           "device, and over an exchange raises what ended that while runs, those of graphs among "
           "them, were under "
           "way;\n"
           "and with a capacity ValueError, once, where runs since it was last asked for had more "
           "tokens than that.")
      .def("calibrate", &calibrate, nb::arg("hidden"), nb::arg("topk_ids"), nb::arg("topk_weights"),
           "Measures static activation scales on sample inputs, shaped as for run, with the exact "
           "reference and bf16\n"
           "activations: {\"hidden\", \"intermediate\"}: amax/2688, what input_scale takes; and "
           "hidden_amax,\n"
           "intermediate_amax, tokens, experts_seen. Of several batches or ranks the maximum "
           "counts. Raises BadInput\n"
           "on NaN or Inf.")
      .def("warmup", &warmup, nb::arg("progress") = nb::none(),
           "Runs the layer once at the token counts that touch every kernel, all weights and the "
           "workspace. progress\n"
           "gets a dict (what, item, done, total, elapsed_s); returning False cancels (Cancelled).")
      .def("expert_load", &expert_load,
           "Over an exchange, collective: how many assignments each expert got on all ranks since "
           "open or "
           "reset_expert_load().")
      .def(
          "reset_expert_load",
          [](const PyLayer& self) {
            check(ranks_in(self, "reset_expert_load").reset_expert_load());
          },
          "Begins to count this rank's assignments anew.")
      .def("rearrange", &rearrange, nb::arg("placement"), nb::arg("checkpoint"), nb::arg("layer"),
           "Over an exchange, collective: gives the ranks' slots other experts, in place, of a "
           "Checkpoint's layer with\n"
           "the same weights. placement: the expert of each slot, as many as there are "
           "(propose_placement). The "
           "weights\n"
           "are what a fresh open with it packs. A rank that cannot go on ends it on all with its "
           "message; once "
           "experts\n"
           "have been replaced, that ends the exchange.")
      .def("expert", &expert, nb::arg("local_expert"),
           "One expert's weights as they were given, bit for bit: {\"gate\", \"up\", \"down\"} of "
           "{\"codes\",\n"
           "\"scales\", \"tensor_scale\" and, with expert_biases, \"bias\"}, copies; \"gate\" is "
           "None in a layer\n"
           "without one. -1 is the shared expert.");
  m.def("replace_expert", &replace_expert, nb::arg("layer"), nb::arg("local_expert"),
        nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::arg("biases").none(),
        nb::arg("stream").none());

  m.def(
      "check_config", [](const std::string& json) { (void)config_of(json); }, nb::arg("config"));

  // MoeLayer.run_logits, whose router comes as its fields.
  m.def("run_logits", &run_logits, nb::arg("layer"), nb::arg("hidden").none(),
        nb::arg("logits").none(), nb::arg("correction_bias").none(), nb::arg("token_ids").none(),
        nb::arg("hash_table").none(), nb::arg("topk").none(), nb::arg("out").none(),
        nb::arg("stream").none(), nb::arg("shared_weights").none(), nb::arg("workspace").none(),
        nb::arg("router"));

  // The torch ops' bodies: a layer by its handle.
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
