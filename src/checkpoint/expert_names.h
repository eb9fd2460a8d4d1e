// How a layer's experts are stored: the words of their names, and the format given by names and
// dtypes. Private to src/checkpoint. Reads headers only.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_options.h"
#include "checkpoint/names.h"
#include "core/csf.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

// The parts of one matrix's name in one format. A part is empty if the format or the layer has no
// such tensor.
struct FormatParts {
  SourceFormat format = SourceFormat::kFloat;
  std::string_view codes;
  std::string_view scales;
  std::string_view tensor_scale;
  std::string_view input_scale;
  const BlockType* blocks = nullptr;  // set if `codes` holds the block scales too, in ggml's blocks
  std::string_view bias = {};         // for families whose experts have biases

  CsfCodec csf_codec() const {
    return format == SourceFormat::kMxfp4 ? CsfCodec::kMxfp4 : CsfCodec::kNvfp4;
  }
  bool has(std::string_view part) const {
    return part == codes || part == scales || part == tensor_scale || part == input_scale ||
           part == bias || is_csf_of(scales, part);
  }
  // Whether the part is a stream of these scales, coded as CSF (core/csf.h).
  bool is_csf_of(std::string_view of, std::string_view part) const {
    if (of.empty() || !part.starts_with(of)) return false;
    const std::string_view suffix = part.substr(of.size());
    return suffix == csf_fixed_suffix(csf_codec()) || suffix == csf_exceptions_suffix(csf_codec());
  }
};

// gate, up and down; up and down if experts have no gate.
inline std::span<const Projection> projections_of(bool gated) {
  static constexpr Projection kAll[] = {Projection::kGate, Projection::kUp, Projection::kDown};
  return std::span<const Projection>(kAll).subspan(gated ? 0 : 1);
}

// How a layer's routed experts, or its shared expert, are stored.
struct ExpertNames {
  std::string stem;
  TensorRole role = TensorRole::kExpert;
  Words words = Words::kProj;
  // "experts.gate_proj.7.weight" instead of "experts.7.gate_proj.weight"
  bool projection_first = false;
  bool dotted = false;  // a stack's name has a dot before its part
  // gate and up are one tensor: nearly every stack, some shared experts
  bool gate_up_fused = false;
  bool stacked_k_first = false;                 // the family's order, if role is kStacked
  GateUpOrder order = GateUpOrder::kGateFirst;  // order of the rows, if gate_up_fused
  bool gguf = false;                            // names as in gguf_names.h
  bool gated = true;                            // experts have gates
  FormatParts parts;

  std::span<const Projection> projections() const { return projections_of(gated); }
  bool in_fused(Projection projection) const {
    return gate_up_fused && projection != Projection::kDown;
  }
  // Whether the projection is the second of the two in one tensor.
  bool is_second(Projection projection) const {
    return in_fused(projection) &&
           (projection == Projection::kUp) != (order == GateUpOrder::kUpFirst);
  }
  // Positions of the projection's `rows` rows in its tensor: the first one, and the distance
  // between rows.
  struct Rows {
    int64_t first = 0;
    int64_t step = 1;
  };
  Rows rows_of(Projection projection, int64_t rows) const {
    const bool alternate = in_fused(projection) && order == GateUpOrder::kInterleaved;
    return {!is_second(projection) ? 0 : alternate ? 1 : rows, alternate ? 2 : 1};
  }
  // The name of `part` of the tensor that holds the projection (gate_up_proj if gate and up are one
  // tensor).
  std::string name(int64_t expert, Projection projection, std::string_view part) const;
};

// Detects the format of the tensors under one name: first by the parts that exist, then by their
// dtypes. kUnsupported for a format that this library does not decode (FP8).
Result<FormatParts> detect_format(const TensorIndex& index, const ExpertNames& names,
                                  int64_t expert, Projection projection);

// Why the projection's codes were not found: "no such tensor", or the tensor of another format that
// is stored instead.
std::string stored_instead(const TensorIndex& index, const ExpertNames& names, int64_t expert,
                           Projection projection);
// Whether any format has this part. biased: the family's experts have biases.
bool is_format_part(std::string_view part, bool biased);
// Whether the projection's scales are stored as streams of CSF, by the name of one of them.
bool is_csf(const TensorIndex& index, const ExpertNames& names, int64_t expert,
            Projection projection);

}  // namespace nvfp4_moe::internal
