// Validation and statistics: reads every block scale and scalar of a layer's experts once. Reads
// codes only if a block scale is 0.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/mxfp4.h"
#include "core/quantize.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint8_t kScale256 = 0x78;  // largest block scale of 4/6 if the block uses 6
constexpr uint8_t kScale384 = 0x7C;  // and if it uses 4

// Traits that the layer has as a whole, or does not have.
struct LayerTraits {
  bool powers_of_two = true;
  bool four_over_six = true;
  int64_t experts = 0;

  // Gate and up may share one tensor scale, so only the larger of the two reaches the top of its
  // range.
  void add(std::span<const MatrixSource> matrices, std::span<const ScaleScan> scans) {
    ++experts;
    for (const MatrixSource& matrix : matrices) {
      const ByteMatrix scales = matrix.scales_as_stored();
      powers_of_two = powers_of_two && is_power_of_two(matrix.tensor_scale) &&
                      all_powers_of_two(scales.data, scales.rows, scales.cols, scales.row_stride);
    }
    for (const uint8_t top :
         {std::max(scans.front().max, scans[scans.size() - 2].max), scans.back().max}) {
      four_over_six = four_over_six && top >= kScale256 && top <= kScale384;
    }
  }
};

// The number of 16-blocks that casting this matrix would round. 0 without reading the codes if the
// scales are close together.
Result<uint64_t> rounded_blocks(MatrixSource& matrix, Storage& storage, const ScaleScan& scan) {
  if (scan.max - scan.min <= 17 || matrix.codes_place.col_stride != 1) return uint64_t{0};
  NVFP4_MOE_TRY(matrix.read_codes(storage));
  std::vector<uint8_t> codes(static_cast<size_t>(matrix.rows * matrix.cols / 2));
  std::vector<uint8_t> scales(static_cast<size_t>(matrix.rows * matrix.cols / 16));
  const Result<Mxfp4Cast> cast = cast_mxfp4(
      matrix.codes.data, matrix.codes.row_stride, matrix.scales.data, matrix.scales.row_stride,
      matrix.phase, matrix.rows, matrix.cols, codes.data(), scales.data());
  return cast.ok() ? static_cast<uint64_t>(cast->rounded_blocks) : uint64_t{0};
}

}  // namespace

Status Checkpoint::check_layout(int64_t layer, const ExpertRange& range_in, bool shared) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  NVFP4_MOE_TRY(entry->refusal);
  NVFP4_MOE_ASSIGN(const ExpertRange range, impl_->checked_range(range_in));
  FindingList found;
  entry->add_missing(layer, range, found);
  for (const int64_t expert : entry->stored_in(range)) {
    if (found.has_error()) break;
    MatrixSource unused;
    for (const Projection projection : entry->routed.projections())
      impl_->locate(entry->routed, layer, expert, projection, unused, found);
    if (entry->routed.role == TensorRole::kStacked) break;  // one tensor holds all experts
  }
  if (shared && entry->shared && !found.has_error()) {
    MatrixSource unused;
    for (const Projection projection : entry->shared->projections())
      impl_->locate(*entry->shared, layer, -1, projection, unused, found);
  }
  return found.first_error();
}

Result<std::vector<Finding>> Checkpoint::validate(int64_t layer,
                                                  const ExpertRange& range_in) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  NVFP4_MOE_ASSIGN(const ExpertRange range, impl_->checked_range(range_in));
  FindingList found;
  for (const Finding& finding : impl_->findings) {
    // Errors of single experts are found again below; errors of names are not.
    const bool again = finding.severity == Severity::kError && finding.id != "unexpected_expert" &&
                       finding.id != "unknown_expert_tensor" &&
                       finding.id != "gate_up_order_unknown";
    if (finding.layer == layer && !again) found.add(finding);
  }
  entry->add_missing(layer, range, found);
  const SourceFormat format = entry->routed.parts.format;
  const bool nvfp4 = is_nvfp4(format);
  LayerTraits traits;
  for (const int64_t e : entry->stored_in(range)) {
    Storage storage;
    const std::span<const Projection> projections = entry->routed.projections();
    std::vector<MatrixSource> matrices(projections.size());
    std::vector<ScaleScan> scans(projections.size());
    bool resolved = true;
    bool valid = true;
    bool whole = true;  // every matrix has a usable tensor scale
    for (size_t p = 0; p < projections.size(); ++p) {
      if (!impl_->resolve(entry->routed, layer, e, projections[p], matrices[p], found)) {
        resolved = false;
        continue;
      }
      int64_t zero_blocks = 0;
      if (const auto bias = matrices[p].read_bias(); !bias.ok()) {
        if (bias.status().code() != Code::kBadInput) return bias.status();
        found.add({Severity::kError, "bias_nonfinite", layer, e, matrices[p].bias_name,
                   "finite biases", bias.status().message()});
      }
      NVFP4_MOE_ASSIGN(bool sound, check_zeros(matrices[p], storage, found));
      if (sound) {
        NVFP4_MOE_ASSIGN(sound, check_scales(matrices[p], storage, found, scans[p], zero_blocks));
      }
      whole = whole && matrices[p].unusable_scale.empty();
      if (!sound) {
        valid = false;
        continue;
      }
      if (format != SourceFormat::kMxfp4) continue;
      NVFP4_MOE_ASSIGN(const uint64_t rounded, rounded_blocks(matrices[p], storage, scans[p]));
      if (rounded > 0) {
        found.add({Severity::kWarning, "mxfp4_block_rounded", layer, e, matrices[p].scales_name,
                   "block scales within 2^17 of the largest",
                   "blocks below that, whose codes loading rounds once",
                   static_cast<int64_t>(rounded)});
      }
    }
    if (resolved && valid && whole && nvfp4) traits.add(matrices, scans);
    if (resolved && whole && nvfp4 && entry->routed.gated &&
        matrices[0].tensor_scale != matrices[1].tensor_scale) {
      found.add({Severity::kNote, "gate_up_scale_mismatch", layer, e, matrices[1].tensor_scale_name,
                 fmt::format("gate's {} or another: legal, each keeps its own",
                             float_string(matrices[0].tensor_scale)),
                 float_string(matrices[1].tensor_scale)});
    }
  }
  impl_->add_input_scales(*entry, layer, range, found, nullptr);
  NVFP4_MOE_TRY(impl_->check_unchanged());
  if (traits.experts > 0 && traits.powers_of_two) {
    found.add({Severity::kNote, "power_of_two_scales", layer, -1, entry->routed.stem, "",
               "every scale is a power of two: a lossless cast from MXFP4"});
  } else if (traits.experts > 0 && traits.four_over_six) {
    found.add({Severity::kNote, "four_over_six_scales", layer, -1, entry->routed.stem, "",
               "block scales end at 256 or 384: quantized with 4 or 6 as a block's largest code, "
               "whichever fits better"});
  }
  return found.take();
}

Result<LayerStatistics> Checkpoint::statistics(int64_t layer, const ExpertRange& range_in) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  NVFP4_MOE_ASSIGN(const ExpertRange range, impl_->checked_range(range_in));
  LayerStatistics out;
  out.layer = layer;
  ScaleScan all;
  bool first = true;
  const MatrixResolver resolver(impl_->index, impl_->model.options.num_experts);
  for (const int64_t e : entry->stored_in(range)) {
    const std::span<const Projection> projections = entry->routed.projections();
    float scales[3] = {};
    bool whole = entry->routed.gated;
    for (size_t p = 0; p < projections.size(); ++p) {
      FindingList found;
      MatrixSource matrix;
      if (!impl_->resolve(entry->routed, layer, e, projections[p], matrix, found)) {
        whole = false;
        continue;
      }
      const bool floats = matrix.format == SourceFormat::kFloat;
      out.codes_bytes += matrix.codes_bytes();
      const InputScale input = resolver.input_scale(entry->routed, e, projections[p]);
      if (input.usable) {
        out.input_scale_min = std::min(out.input_scale_min.value_or(input.value), input.value);
        out.input_scale_max = std::max(out.input_scale_max.value_or(input.value), input.value);
      }
      if (floats) continue;
      out.scales_bytes += matrix.stored_scales_bytes();
      out.decoded_scales_bytes += matrix.scales_bytes();
      if (matrix.csf) out.csf_exceptions += matrix.csf->exceptions;
      out.csf = out.csf || matrix.csf.has_value();
      if (!matrix.unusable_scale.empty()) {
        whole = false;
        continue;
      }
      Storage storage;
      if (const Status read = matrix.read_scales(storage); read.code() == Code::kBadInput) {
        whole = false;
        continue;
      } else if (!read.ok()) {
        return read;
      }
      const ByteMatrix stored = matrix.scales_as_stored();
      scan_scales(stored.data, stored.rows, stored.cols, stored.row_stride, all);
      if (matrix.format == SourceFormat::kMxfp4) continue;
      scales[p] = matrix.tensor_scale;
      out.tensor_scale_min = first ? scales[p] : std::min(out.tensor_scale_min, scales[p]);
      out.tensor_scale_max = first ? scales[p] : std::max(out.tensor_scale_max, scales[p]);
      first = false;
    }
    out.gate_up_mismatches += whole && scales[0] != scales[1] ? 1 : 0;
  }
  NVFP4_MOE_TRY(impl_->check_unchanged());
  if (all.count > 0) {
    out.block_scale_min = all.min;
    out.block_scale_max = all.max;
    const bool e4m3 = entry->routed.parts.format != SourceFormat::kMxfp4;
    if (e4m3)
      out.saturated_block_share =
          static_cast<double>(all.saturated) / static_cast<double>(all.count);
  }
  return out;
}

}  // namespace nvfp4_moe::internal
