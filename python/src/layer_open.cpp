// Opens an nvfp4_moe.MoeLayer from NVFP4 arrays, floats or a checkpoint, with or without an
// exchange.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "exchange.h"
#include "float_stack.h"
#include "layer_source.h"
#include "moe/activation_choice.h"
#include "moe/packed_cache.h"
#include "options.h"
#include "py_layer.h"

namespace nvfp4_moe::internal::python {

namespace {

// Options shared by the three ways of opening.
struct OpenOptions {
  Device device;
  LayerOptions layer;
  std::shared_ptr<Host> host;
  const ParallelFields& fields;
  std::optional<Parallel> parallel;

  OpenOptions(const std::string& device_name, const std::string& backend, int64_t first_expert,
              int64_t expert_count, int64_t max_tokens, const ParallelFields& parallel_fields,
              int64_t num_experts)
      : device(device_named(device_name)),
        host(shared_host()),
        fields(parallel_fields),
        parallel(parallel_of(fields, num_experts)) {
    layer.device = device_name;
    layer.backend = backend;
    layer.range = {first_expert, expert_count};
    layer.limits.max_tokens = max_tokens;
    layer.executor = &host->executor();
  }

  // The order of arrays with `experts` experts. Over an exchange they hold all experts by global
  // id, or those of this rank's slots in slot order. Only their number decides: num_experts of them
  // are all, even if a rank has the same number of slots.
  ArrayOrder order_of(int64_t experts, int64_t num_experts) const {
    if (!parallel) return ArrayOrder(layer.range.first);
    if (experts == num_experts) return ArrayOrder();
    const Exchange& exchange = *parallel->exchange;
    const Placement placement = parallel->options.placement
                                    ? *parallel->options.placement
                                    : take(Placement::contiguous(num_experts, exchange.world()));
    const int64_t first = placement.first_slot(exchange.rank()),
                  slots = placement.slots_of_rank(exchange.rank());
    if (experts != slots)
      fail("up, down: expected all " + std::to_string(num_experts) +
           " experts beside an exchange, of which each rank reads its own, or the " +
           std::to_string(slots) + " of this rank, got " + std::to_string(experts));
    const auto begin = placement.expert_of_slot().begin() + first;
    return ArrayOrder(num_experts, {begin, begin + slots});
  }

  Status open(OpenLayer& state, const MoeConfig& config, const LayerSource& source,
              const ProgressFn& report) const {
    fields.reported = true;
    NVFP4_MOE_ASSIGN(state.layer, open_layer(config, source, layer, parallel, report));
    return {};
  }
};

using ScalePair = std::pair<std::optional<double>, std::optional<double>>;  // hidden, intermediate

LayerScales scales_of(const std::optional<ScalePair>& pair) {
  const auto checked = [](const char* name,
                          const std::optional<double>& scale) -> std::optional<float> {
    if (!scale) return std::nullopt;
    const auto narrow = static_cast<float>(*scale);
    if (!std::isfinite(narrow) || narrow <= 0)
      fail(std::string("input_scale ") + name + ": expected a positive float32, got " +
           std::to_string(*scale));
    return narrow;
  };
  if (!pair) return {};
  return {checked("hidden", pair->first), checked("intermediate", pair->second)};
}

// Reads gate (if the layer has one), up and down as Stacks of the config's shapes.
template <class Stack>
struct ExpertArrays {
  std::optional<Stack> gate;
  std::optional<Stack> up, down;

  ExpertArrays(const MoeConfig& config, nb::handle gates, nb::handle ups, nb::handle downs) {
    if (wants_gate(config, gates))
      gate.emplace(gates, "gate", config->intermediate_size, config->hidden_size);
    up.emplace(ups, "up", config->intermediate_size, config->hidden_size);
    down.emplace(downs, "down", config->hidden_size, config->intermediate_size);
    const int64_t of_gate = gate ? gate->experts() : experts();
    if (of_gate != experts() || down->experts() != experts())
      fail(std::string(gate ? "gate, " : "") + "up, down: expected as many experts in each, got " +
           (gate ? std::to_string(of_gate) + ", " : "") + std::to_string(experts()) + ", " +
           std::to_string(down->experts()));
  }
  int64_t experts() const { return up->experts(); }
  const Stack* gate_or_null() const { return gate ? &*gate : nullptr; }
  void expect_all_of(const MoeConfig& config) const {
    if (experts() != config->num_experts)
      fail("up, down: expected all " + std::to_string(config->num_experts) +
           " experts beside an exchange, of which each rank reads its own, got " +
           std::to_string(experts()));
  }
};

// Reads gate (null if the layer has none), up and down as Stacks of the config's shapes.
// expert_of(gate, up, down, order, options) returns LayerSource::expert.
template <class Stack, class ExpertOf>
PyLayer open_arrays(const std::string& config_json, nb::handle gate, nb::handle up, nb::handle down,
                    nb::handle biases, const std::optional<ScalePair>& input_scale,
                    int64_t first_expert, int64_t max_tokens, const std::string& device,
                    const std::string& backend, const ParallelFields& parallel,
                    std::optional<ProgressCallback> progress, ExpertOf&& expert_of) {
  const MoeConfig config = config_of(config_json);
  const ExpertArrays<Stack> arrays(config, gate, up, down);
  const int64_t experts = arrays.experts();
  const OpenOptions options(device, backend, first_expert,
                            parallel.exchange.is_none() ? experts : 0, max_tokens, parallel,
                            config->num_experts);
  const ArrayOrder order = options.order_of(experts, config->num_experts);
  LayerSource source;
  source.scales = scales_of(input_scale);
  const BiasStack bias_stack(biases, experts, config, config->intermediate_size);
  source.expert = [&, expert = expert_of(arrays.gate_or_null(), *arrays.up, *arrays.down, order,
                                         options)](int64_t global_expert) -> Result<LoadedExpert> {
    NVFP4_MOE_ASSIGN(LoadedExpert loaded, expert(global_expert));
    loaded.source.biases = bias_stack.of(order(global_expert));
    return loaded;
  };
  return PyLayer::make(options.device, options.host, std::move(progress),
                       [&](OpenLayer& state, const ProgressFn& report) {
                         return options.open(state, config, source, report);
                       });
}

PyLayer open_tensors(const std::string& config, nb::handle gate, nb::handle up, nb::handle down,
                     nb::handle biases, const std::optional<ScalePair>& input_scale,
                     int64_t first_expert, int64_t max_tokens, const std::string& device,
                     const std::string& backend, nb::handle parallel,
                     std::optional<ProgressCallback> progress) {
  const ParallelFields fields(parallel);
  const auto expert_of = [](const MatrixStack* gates, const MatrixStack& ups,
                            const MatrixStack& downs, const ArrayOrder& order,
                            const OpenOptions& options) {
    return nvfp4_source(gates, ups, downs, order, options.device);
  };
  return or_report(fields, [&] {
    return open_arrays<MatrixStack>(config, gate, up, down, biases, input_scale, first_expert,
                                    max_tokens, device, backend, fields, std::move(progress),
                                    expert_of);
  });
}

PyLayer open_floats(const std::string& config, nb::handle gate, nb::handle up, nb::handle down,
                    nb::handle biases, const std::optional<ScalePair>& input_scale,
                    int64_t first_expert, int64_t max_tokens, const std::string& device,
                    const std::string& backend, nb::handle parallel,
                    std::optional<ProgressCallback> progress) {
  const ParallelFields fields(parallel);
  const auto expert_of = [](const FloatStack* gates, const FloatStack& ups, const FloatStack& downs,
                            const ArrayOrder& order, const OpenOptions& options) {
    return quantizing_source(gates, ups, downs, order, options.device, options.host->executor());
  };
  return or_report(fields, [&] {
    return open_arrays<FloatStack>(config, gate, up, down, biases, input_scale, first_expert,
                                   max_tokens, device, backend, fields, std::move(progress),
                                   expert_of);
  });
}

// Collective: an error in this rank's arguments is sent to all ranks, which wait for this one.
template <class Stack, class ExpertOf>
void rearrange_arrays(const PyLayer& self, std::vector<int64_t> placement, nb::handle gate,
                      nb::handle up, nb::handle down, nb::handle biases,
                      const ExpertOf& expert_of) {
  OpenLayer& open = self.open();
  RankCombine& ranks = *take(ranks_of(*open.layer, "rearrange"));
  Exchange& exchange = ranks.exchange();
  bool reported = false;
  try {
    const MoeConfig& config = ranks.config();
    const ExpertArrays<Stack> arrays(config, gate, up, down);
    arrays.expect_all_of(config);
    // Checked before any expert is replaced; a later failure would end the exchange.
    if (config->expert_biases == biases.is_none())
      fail(config->expert_biases ? "biases: expected (gate, up, down) with expert_biases, got None"
                                 : "biases: expected None without expert_biases, got arrays");
    const BiasStack bias_stack(biases, arrays.experts(), config, config->intermediate_size);
    const Placement wanted =
        take(Placement::of_map(config->num_experts, exchange.world(), std::move(placement)));
    LayerSource source;
    source.expert = [&bias_stack,
                     expert = expert_of(arrays.gate_or_null(), *arrays.up, *arrays.down, open)](
                        int64_t global_expert) -> Result<LoadedExpert> {
      NVFP4_MOE_ASSIGN(LoadedExpert loaded, expert(global_expert));
      loaded.source.biases = bias_stack.of(global_expert);
      return loaded;
    };
    const WithoutLock unlocked;
    reported = true;
    check(exchange.agree({}));
    check(ranks.rearrange(wanted, source));
  } catch (const std::exception& raised) {
    if (reported) throw;
    raise_on_all_ranks(raised, [&](const Status& failure) { return exchange.agree(failure); });
  }
}

void rearrange_tensors(const PyLayer& self, std::vector<int64_t> placement, nb::handle gate,
                       nb::handle up, nb::handle down, nb::handle biases) {
  rearrange_arrays<MatrixStack>(self, std::move(placement), gate, up, down, biases,
                                [](const MatrixStack* gates, const MatrixStack& ups,
                                   const MatrixStack& downs, const OpenLayer& open) {
                                  return nvfp4_source(gates, ups, downs, ArrayOrder(), open.device);
                                });
}

void rearrange_floats(const PyLayer& self, std::vector<int64_t> placement, nb::handle gate,
                      nb::handle up, nb::handle down, nb::handle biases) {
  rearrange_arrays<FloatStack>(self, std::move(placement), gate, up, down, biases,
                               [](const FloatStack* gates, const FloatStack& ups,
                                  const FloatStack& downs, const OpenLayer& open) {
                                 return quantizing_source(gates, ups, downs, ArrayOrder(),
                                                          open.device, open.host->executor());
                               });
}

IntermediateSlice slice_of(const std::optional<std::pair<int64_t, int64_t>>& slice) {
  return slice ? IntermediateSlice{slice->first, slice->second} : IntermediateSlice{};
}

PyLayer open_checkpoint(nb::handle checkpoint_object, int64_t layer, const std::string& config_json,
                        int64_t first_expert, int64_t expert_count,
                        const std::optional<std::pair<int64_t, int64_t>>& slice, int64_t max_tokens,
                        const std::string& device, const std::string& backend,
                        const std::string& cache_directory, bool cache_checksum, bool cache_trusted,
                        nb::handle parallel, std::optional<ProgressCallback> progress) {
  const ParallelFields fields(parallel);
  return or_report(fields, [&] {
    const Checkpoint& checkpoint = checkpoint_of(checkpoint_object);
    const MoeConfig config = config_of(config_json);
    const OpenOptions options(device, backend, first_expert, expert_count, max_tokens, fields,
                              config->num_experts);
    if (options.parallel && (slice || !cache_directory.empty()))
      fail("intermediate_slice, cache_directory: expected neither beside an exchange, got one");
    return PyLayer::make(
        options.device, options.host, std::move(progress),
        [&](OpenLayer& state, const ProgressFn& report) -> Status {
          fields.reported = true;
          NVFP4_MOE_ASSIGN(state.layer, open_layer(checkpoint, layer, config.options(),
                                                   slice_of(slice), options.layer,
                                                   {cache_directory, cache_checksum, cache_trusted},
                                                   options.parallel, report));
          return {};
        });
  });
}

// Replaces the declared activation_format by the one that the rule of "auto" gives on this device.
std::string with_chosen_format(const std::string& options_json, const std::string& device,
                               const std::string& backend) {
  LayerOptions layer;
  layer.device = device;
  layer.backend = backend;
  return to_json(take(
      nvfp4_moe::internal::with_chosen_format(take(moe_options_from_json(options_json)), layer)));
}

std::string checkpoint_options(nb::handle checkpoint, int64_t layer,
                               const std::optional<std::pair<int64_t, int64_t>>& slice) {
  return to_json(take(sliced_options(checkpoint_of(checkpoint), layer, slice_of(slice))));
}

}  // namespace

void bind_layer_open(nb::module_& m) {
  m.def("open_tensors", &open_tensors, nb::arg("config"), nb::arg("gate").none(),
        nb::arg("up").none(), nb::arg("down").none(), nb::arg("biases").none(),
        nb::arg("input_scale").none(), nb::arg("first_expert"), nb::arg("max_tokens"),
        nb::arg("device"), nb::arg("backend"), nb::arg("parallel"), nb::arg("progress").none());
  m.def("open_floats", &open_floats, nb::arg("config"), nb::arg("gate").none(),
        nb::arg("up").none(), nb::arg("down").none(), nb::arg("biases").none(),
        nb::arg("input_scale").none(), nb::arg("first_expert"), nb::arg("max_tokens"),
        nb::arg("device"), nb::arg("backend"), nb::arg("parallel"), nb::arg("progress").none());
  m.def("open_checkpoint", &open_checkpoint, nb::arg("checkpoint"), nb::arg("layer"),
        nb::arg("config"), nb::arg("first_expert"), nb::arg("expert_count"),
        nb::arg("intermediate_slice").none(), nb::arg("max_tokens"), nb::arg("device"),
        nb::arg("backend"), nb::arg("cache_directory"), nb::arg("cache_checksum"),
        nb::arg("cache_trusted"), nb::arg("parallel"), nb::arg("progress").none());
  for (const auto& [name, function] : {std::pair("rearrange_tensors", &rearrange_tensors),
                                       std::pair("rearrange_floats", &rearrange_floats)})
    m.def(name, function, nb::arg("layer"), nb::arg("placement"), nb::arg("gate").none(),
          nb::arg("up").none(), nb::arg("down").none(), nb::arg("biases").none());
  m.def("with_chosen_format", &with_chosen_format, nb::arg("options"), nb::arg("device"),
        nb::arg("backend"));
  m.def("checkpoint_options", &checkpoint_options, nb::arg("checkpoint"), nb::arg("layer"),
        nb::arg("intermediate_slice").none());
}

}  // namespace nvfp4_moe::internal::python
