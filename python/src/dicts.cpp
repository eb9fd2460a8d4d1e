#include "dicts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "core/float_formats.h"
#include "tensor.h"

namespace nvfp4_moe::internal::python {

Dict to_dict(const Finding& finding) {
  Dict d;
  d["severity"] = to_string(finding.severity);
  d["id"] = finding.id;
  d["layer"] = finding.layer < 0 ? nb::none() : nb::cast(finding.layer);
  d["expert"] = finding.expert < 0 ? nb::none() : nb::cast(finding.expert);
  d["tensor"] = finding.tensor;
  d["expected"] = finding.expected;
  d["actual"] = finding.actual;
  d["count"] = finding.count;
  d["examples"] = finding.examples;
  d["text"] = to_string(finding);
  return d;
}

Dict to_dict(const LayerStatistics& s) {
  Dict d;
  d["codes_bytes"] = s.codes_bytes;
  d["scales_bytes"] = s.scales_bytes;
  d["decoded_scales_bytes"] = s.decoded_scales_bytes;
  d["csf"] = s.csf;
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

Dict to_dict(const Nvfp4View& view) {
  const int64_t code_cols = view.cols / 2, scale_cols = view.cols / kBlockElems;
  const Tensor codes = Tensor::numpy({view.rows, code_cols}, DType::kU8);
  const Tensor scales = Tensor::numpy({view.rows, scale_cols}, DType::kU8);
  {
    const WithoutLock unlocked;
    for (int64_t r = 0; r < view.rows; ++r) {
      std::memcpy(codes.data() + r * code_cols, view.row_codes(r), static_cast<size_t>(code_cols));
      std::memcpy(scales.data() + r * scale_cols, view.row_scales(r),
                  static_cast<size_t>(scale_cols));
    }
  }
  Dict d;
  d["codes"] = codes.object();
  d["scales"] = scales.object();
  d["tensor_scale"] = static_cast<double>(view.tensor_scale);
  return d;
}

Dict to_dict(const LayerScales& scales) {
  Dict d;
  d["hidden"] = nb::cast(scales.hidden);
  d["intermediate"] = nb::cast(scales.intermediate);
  return d;
}

Dict to_dict(const ExpertSource& source) {
  Dict d;
  const auto matrix = [](const Nvfp4View& view, const float* bias) {
    Dict one = to_dict(view);
    if (bias == nullptr) return one;
    const Tensor array = Tensor::numpy({view.rows}, DType::kF32);
    std::memcpy(array.data(), bias, static_cast<size_t>(view.rows) * sizeof(float));
    one["bias"] = array.object();
    return one;
  };
  if (source.gate.rows > 0)
    d["gate"] = matrix(source.gate, source.biases.gate);
  else
    d["gate"] = nb::none();
  d["up"] = matrix(source.up, source.biases.up);
  d["down"] = matrix(source.down, source.biases.down);
  return d;
}

Dict to_dict(const RunStatus& status) {
  Dict d;
  d["bad_expert_ids"] = status.bad_expert_ids;
  d["nonfinite_tokens"] = status.nonfinite_tokens;
  d["nonfinite_rows"] = status.nonfinite_rows;
  d["hidden_blocks"] = status.hidden_blocks;
  d["hidden_saturated"] = status.hidden_saturated;
  d["hidden_zeroed"] = status.hidden_zeroed;
  d["intermediate_blocks"] = status.intermediate_blocks;
  d["intermediate_saturated"] = status.intermediate_saturated;
  d["intermediate_zeroed"] = status.intermediate_zeroed;
  d["nonfinite_weights"] = status.nonfinite_weights;
  d["nonfinite_outputs"] = status.nonfinite_outputs;
  return d;
}

Dict to_dict(const Progress& p) {
  Dict d;
  d["what"] = nb::str(p.what.data(), p.what.size());
  d["item"] = nb::str(p.item.data(), p.item.size());
  d["done"] = p.done;
  d["total"] = p.total;
  d["done_bytes"] = p.done_bytes;
  d["total_bytes"] = p.total_bytes;
  d["elapsed_s"] = p.elapsed_s;
  return d;
}

}  // namespace nvfp4_moe::internal::python
