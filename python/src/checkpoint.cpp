// Checkpoints from Python: inspect, and the arrays of one expert; also explain and readiness.
#include "checkpoint/checkpoint.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dicts.h"
#include "layer.h"
#include "moe/activation_choice.h"
#include "moe/config_json.h"
#include "moe/kept_checks.h"
#include "moe/layer.h"
#include "moe/readiness.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal::python {

namespace {

// A Checkpoint with a constructor that throws.
class PyCheckpoint {
 public:
  PyCheckpoint(const std::string& path, const std::optional<std::string>& gate_up_order,
               std::vector<std::string> accept_tensors, const std::string& family)
      : checkpoint_([&] {
          const CheckpointOptions options =
              reading_options(gate_up_order, std::move(accept_tensors), family);
          WithoutLock unlocked;
          return take(Checkpoint::open(path, options));
        }()) {}

  Dict model() const {
    const ModelInfo& info = checkpoint_.model();
    nb::dict d;
    d["architecture"] = info.architecture;
    d["model_type"] = info.model_type;
    d["family"] = info.family;
    d["format"] = to_string(info.format);
    d["quant_method"] = info.quant_method;
    d["quant_algo"] = info.quant_algo;
    d["producer"] = info.producer;
    d["options"] = parse_json(to_json(info.options));
    d["layers"] = nb::cast(info.layers);
    d["shared_experts"] = info.shared_experts;
    return d;
  }

  Dict inspect(std::optional<std::vector<int64_t>> layers) const {
    Dict d = model();
    d["files"] = checkpoint_.index().files().size();
    d["tensors"] = checkpoint_.index().tensors().size();
    d["bytes"] = checkpoint_.index().size_bytes();
    nb::list findings;
    const auto add = [&](const std::vector<Finding>& found) {
      for (const Finding& finding : found) findings.append(to_dict(finding));
    };
    const std::vector<int64_t>& read = layers ? *layers : checkpoint_.model().layers;
    // Opening has already found some findings of these layers; reading them finds those again.
    std::vector<Finding> of_opening = checkpoint_.findings();
    const std::set<int64_t> again(read.begin(), read.end());
    std::erase_if(of_opening,
                  [&](const Finding& finding) { return again.contains(finding.layer); });
    add(of_opening);
    nb::dict statistics;
    for (const int64_t layer : read) {
      if (in_python([] { return PyErr_CheckSignals(); }) != 0) nb::raise_python_error();
      const ExpertRange range = all_experts(layer);
      std::vector<Finding> found;
      LayerStatistics layer_statistics;
      LayerScales scales;
      {
        WithoutLock unlocked;
        found = take(checkpoint_.validate(layer, range));
        layer_statistics = take(checkpoint_.statistics(layer, range));
        std::vector<Finding> of_scales;
        scales = take(checkpoint_.layer_scales(layer, &of_scales));
        for (Finding& finding : of_scales) {  // validate checks input scales too
          const bool known = std::any_of(found.begin(), found.end(),
                                         [&](const Finding& f) { return f.id == finding.id; });
          if (!known) found.push_back(std::move(finding));
        }
      }
      add(found);
      nb::dict of_layer = to_dict(layer_statistics);
      of_layer["experts"] = range.count;
      const DeclaredActivations declared = take(checkpoint_.declared_activations(layer));
      nb::dict activations;
      activations["declared"] = to_string(declared.format);
      activations["why"] = declared.why;
      of_layer["activations"] = activations;
      of_layer["input_scale"] = to_dict(scales);
      statistics[nb::cast(layer)] = of_layer;
    }
    d["statistics"] = statistics;
    d["findings"] = findings;
    return d;
  }

  Dict expert(int64_t layer, int64_t expert_id, int64_t first, int64_t count) const {
    const IntermediateSlice slice{first, count};
    LoadedExpert loaded;
    LayerScales scales;
    {
      WithoutLock unlocked;
      loaded = take(checkpoint_.expert(layer, expert_id, slice));
      scales = take(checkpoint_.layer_scales(layer));
    }
    nb::dict d = to_dict(loaded.source);
    d["input_scale"] = to_dict(scales);
    nb::dict names;
    for (const char* projection : {"gate", "up", "down"}) {
      if (d[projection].is_none()) continue;  // experts without a gate
      names[projection] = checkpoint_.tensor_name(layer, expert_id, projection);
    }
    d["names"] = names;
    return d;
  }

  Dict shared_expert(int64_t layer, int64_t first, int64_t count) const {
    LoadedExpert loaded;
    {
      WithoutLock unlocked;
      loaded = take(checkpoint_.shared_expert(layer, IntermediateSlice{first, count}));
    }
    return to_dict(loaded.source);
  }

  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  ExpertRange all_experts(int64_t layer) const {
    return {0, take(checkpoint_.layer_options(layer)).num_experts};
  }
  Checkpoint checkpoint_;
};

nb::typed<nb::list, Dict> explain_json(const std::string& options_json, const std::string& backend,
                                       const std::string& device) {
  const MoeConfig config = take(MoeConfig::make(take(moe_options_from_json(options_json))));
  const DeviceFacts facts = take(device_facts(device));
  nb::list reports;
  for (const BackendReport& report : explain(config, facts, backend)) {
    nb::dict d;
    d["backend"] = report.backend;
    d["chosen"] = report.chosen;
    d["supported"] = report.supported;
    d["reason"] = report.reason;
    reports.append(d);
  }
  return reports;
}

// The part of `python -m nvfp4_moe` that does not depend on engines.
Dict readiness_texts() {
  const std::string forced = take(forced_backend("auto", take(read_env())));
  const Readiness readiness = take(read_readiness(forced));
  nb::dict d;
  d["build"] = build_text(readiness);
  d["backends"] = backends_text(readiness);
  d["missing"] = nb::cast(missing_for_gpus(readiness));
  return d;
}

// Runs the self-checks of a device's backends and keeps the results.
nb::typed<nb::list, Dict> self_checks(const std::string& device) {
  std::vector<DeviceCheck> checks;
  Status status;
  {
    const WithoutLock unlocked;
    status = run_self_checks(device, [&](const DeviceCheck& one) { checks.push_back(one); });
  }
  check(status);
  nb::list list;
  for (const DeviceCheck& one : checks) {
    nb::dict d;
    d["device"] = one.device;
    d["scope"] = one.scope;
    d["verdict"] = name_of(one.outcome.verdict);
    d["text"] = KeptCheck{one.outcome, true}.text();
    d["milliseconds"] = one.outcome.milliseconds;
    list.append(d);
  }
  return list;
}

std::pair<std::string, std::string> choose_activation_format(const std::string& declared,
                                                             const std::string& backend) {
  const auto format = take(parse<ActivationFormat>(declared, "declared"));
  const ChosenFormat chosen = take(nvfp4_moe::internal::choose_activation_format(format, backend));
  return {to_string(chosen.format), chosen.because};
}

}  // namespace

CheckpointOptions reading_options(const std::optional<std::string>& gate_up_order,
                                  std::vector<std::string> accept_tensors,
                                  const std::string& family) {
  CheckpointOptions options;
  options.family = family;
  if (gate_up_order) options.gate_up_order = take(parse<GateUpOrder>(*gate_up_order));
  options.accept_tensors = std::move(accept_tensors);
  return options;
}

const Checkpoint& checkpoint_of(nb::handle object) {
  return nb::cast<const PyCheckpoint&>(object).checkpoint();
}

void bind_checkpoint(nb::module_& m) {
  nb::class_<PyCheckpoint>(
      m, "Checkpoint",
      "An open checkpoint. Opening reads headers and config; weights are read on request.")
      .def(nb::init<const std::string&, const std::optional<std::string>&, std::vector<std::string>,
                    const std::string&>(),
           nb::arg("path"), nb::arg("gate_up_order") = nb::none(),
           nb::arg("accept_tensors") = std::vector<std::string>(), nb::arg("family") = "",
           R"(Opens a model directory, or one safetensors or GGUF file.

Args:
    path: The directory or file.
    gate_up_order: The order of the rows in tensors that hold both gate and up: "gate_first",
        "up_first" or "interleaved". None takes it from the model family and the names.
    accept_tensors: Names of experts' tensors to ignore instead of failing. '*' matches any
        characters.
    family: A known model type whose rules read a config.json with an unknown model_type. The
        error without it says which fit.)")
      .def("model", &PyCheckpoint::model,
           "Returns the family, format, options and layers, from headers and config only.")
      .def("inspect", &PyCheckpoint::inspect, nb::arg("layers") = nb::none(),
           "Returns model() with \"statistics\" by layer and \"findings\", as nvfp4_moe.inspect. "
           "layers None: every MoE layer.")
      .def("expert", &PyCheckpoint::expert, nb::arg("layer"), nb::arg("expert"),
           nb::arg("first") = 0, nb::arg("count") = 0,
           "Returns \"gate\", \"up\", \"down\", \"input_scale\" and \"names\" of one expert, as "
           "nvfp4_moe.load_expert.")
      .def("shared_expert", &PyCheckpoint::shared_expert, nb::arg("layer"), nb::arg("first") = 0,
           nb::arg("count") = 0,
           "Returns \"gate\", \"up\" and \"down\" of the layer's shared expert, as expert() does.");
  m.def(
      "default_options", [] { return every_field_json(MoeOptions{}); },
      "Returns the default options of a layer as JSON.");
  m.def("explain", &explain_json, nb::arg("options"), nb::arg("backend"), nb::arg("device"));
  m.def("readiness", &readiness_texts);
  m.def("self_checks", &self_checks, nb::arg("device"));
  m.def("choose_activation_format", &choose_activation_format, nb::arg("declared"),
        nb::arg("backend"));
}

}  // namespace nvfp4_moe::internal::python
