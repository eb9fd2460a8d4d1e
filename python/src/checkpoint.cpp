// Checkpoints from Python: what inspect tells, the arrays of one expert; and explain.
#include "checkpoint/checkpoint.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "arrays.h"
#include "moe/config_json.h"
#include "moe/layer.h"

namespace nvfp4_moe::python {

namespace {

nb::dict to_dict(const Finding& finding) {
  nb::dict d;
  d["severity"] = to_string(finding.severity);
  d["id"] = finding.id;
  d["layer"] = finding.layer < 0 ? nb::none() : nb::cast(finding.layer);
  d["expert"] = finding.expert < 0 ? nb::none() : nb::cast(finding.expert);
  d["tensor"] = finding.tensor;
  d["expected"] = finding.expected;
  d["actual"] = finding.actual;
  d["count"] = finding.count;
  d["text"] = to_string(finding);
  return d;
}

nb::dict to_dict(const LayerStatistics& s) {
  nb::dict d;
  d["codes_bytes"] = s.codes_bytes;
  d["scales_bytes"] = s.scales_bytes;
  d["tensor_scale_min"] = s.tensor_scale_min;
  d["tensor_scale_max"] = s.tensor_scale_max;
  d["block_scale_min"] = s.block_scale_min;
  d["block_scale_max"] = s.block_scale_max;
  d["saturated_block_share"] = s.saturated_block_share;
  d["gate_up_mismatches"] = s.gate_up_mismatches;
  d["input_scale_min"] = nb::cast(s.input_scale_min);
  d["input_scale_max"] = nb::cast(s.input_scale_max);
  return d;
}

// Copies the view's rows, which may lie apart, into arrays of their own.
nb::dict to_dict(const Nvfp4View& view) {
  const size_t rows = static_cast<size_t>(view.rows);
  const size_t code_cols = static_cast<size_t>(view.cols / 2);
  const size_t scale_cols = static_cast<size_t>(view.cols / kBlockElems);
  Output<uint8_t> codes({rows, code_cols});
  Output<uint8_t> scales({rows, scale_cols});
  {
    nb::gil_scoped_release release;
    for (size_t r = 0; r < rows; ++r) {
      std::memcpy(codes.data + r * code_cols, view.row_codes(static_cast<int64_t>(r)), code_cols);
      std::memcpy(scales.data + r * scale_cols, view.row_scales(static_cast<int64_t>(r)), scale_cols);
    }
  }
  nb::dict d;
  d["codes"] = codes.array();
  d["scales"] = scales.array();
  d["tensor_scale"] = static_cast<double>(view.tensor_scale);
  return d;
}

nb::dict to_dict(const LayerScales& scales) {
  nb::dict d;
  d["hidden"] = nb::cast(scales.hidden);
  d["intermediate"] = nb::cast(scales.intermediate);
  return d;
}

// A Checkpoint behind a plain constructor that throws.
class PyCheckpoint {
 public:
  explicit PyCheckpoint(const std::string& path)
      : checkpoint_([&] {
          nb::gil_scoped_release release;
          return take(Checkpoint::open(path));
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
    std::set<std::string> told;  // opening and validating may find the same thing
    const auto add = [&](const std::vector<Finding>& found) {
      for (const Finding& finding : found) {
        if (told.insert(to_string(finding)).second) findings.append(to_dict(finding));
      }
    };
    add(checkpoint_.findings());
    nb::dict statistics;
    for (int64_t layer : layers ? *layers : checkpoint_.model().layers) {
      const ExpertRange range = all_experts(layer);
      std::vector<Finding> found;
      LayerStatistics layer_statistics;
      LayerScales scales;
      {
        nb::gil_scoped_release release;
        found = take(checkpoint_.validate(layer, range));
        layer_statistics = take(checkpoint_.statistics(layer, range));
        scales = take(checkpoint_.layer_scales(layer, &found));
      }
      add(found);
      nb::dict of_layer = to_dict(layer_statistics);
      of_layer["experts"] = range.count;
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
      nb::gil_scoped_release release;
      loaded = take(checkpoint_.expert(layer, expert_id, slice));
      scales = take(checkpoint_.layer_scales(layer));
    }
    nb::dict d = to_dict(loaded.source);
    d["input_scale"] = to_dict(scales);
    nb::dict names;
    for (const char* projection : {"gate", "up", "down"}) {
      names[projection] = checkpoint_.tensor_name(layer, expert_id, projection);
    }
    d["names"] = names;
    return d;
  }

  Dict shared_expert(int64_t layer, int64_t first, int64_t count) const {
    LoadedExpert loaded;
    {
      nb::gil_scoped_release release;
      loaded = take(checkpoint_.shared_expert(layer, IntermediateSlice{first, count}));
    }
    return to_dict(loaded.source);
  }

 private:
  static nb::dict to_dict(const ExpertSource& source) {
    nb::dict d;
    d["gate"] = python::to_dict(source.gate);
    d["up"] = python::to_dict(source.up);
    d["down"] = python::to_dict(source.down);
    return d;
  }
  template <class T>
  static nb::dict to_dict(const T& value) {
    return python::to_dict(value);
  }
  ExpertRange all_experts(int64_t layer) const { return {0, take(checkpoint_.layer_options(layer)).num_experts}; }
  Checkpoint checkpoint_;
};

nb::typed<nb::list, Dict> explain_json(const std::string& options_json, const std::string& backend) {
  const MoeConfig config = take(MoeConfig::make(take(moe_options_from_json(options_json))));
  nb::list choices;
  for (const Choice& choice : explain(config, host_facts(), backend)) {
    nb::dict d;
    d["backend"] = choice.backend;
    d["chosen"] = choice.chosen;
    d["reason"] = choice.reason;
    choices.append(d);
  }
  return choices;
}

}  // namespace

void bind_checkpoint(nb::module_& m) {
  nb::class_<PyCheckpoint>(m, "Checkpoint",
                           "A model directory, opened: headers and config are read, weights only as asked for.")
      .def(nb::init<const std::string&>(), nb::arg("path"))
      .def("model", &PyCheckpoint::model,
           "What headers and config tell: family, format, options and layers. Reads no weights.")
      .def("inspect", &PyCheckpoint::inspect, nb::arg("layers") = nb::none(),
           "model(), \"statistics\" by layer and \"findings\"; None: every MoE layer. As nvfp4_moe.inspect.")
      .def("expert", &PyCheckpoint::expert, nb::arg("layer"), nb::arg("expert"), nb::arg("first") = 0,
           nb::arg("count") = 0,
           "\"gate\", \"up\", \"down\", \"input_scale\" and \"names\" of one expert. As nvfp4_moe.load_expert.")
      .def("shared_expert", &PyCheckpoint::shared_expert, nb::arg("layer"), nb::arg("first") = 0, nb::arg("count") = 0,
           "\"gate\", \"up\" and \"down\" of the layer's shared expert, as expert() gives them.");
  m.def(
      "default_options", [] { return to_json(MoeOptions{}); }, "JSON of a layer's options as they are by default.");
  m.def("explain", &explain_json, nb::arg("options"), nb::arg("backend"));
}

}  // namespace nvfp4_moe::python
