// Checkpoint: opening, views of one expert, and a layer's activation scales.
#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "checkpoint/checkpoint_impl.h"
#include "checkpoint/float_source.h"
#include "checkpoint/mxfp4.h"
#include "checkpoint/open_model.h"

namespace nvfp4_moe::internal {
namespace {

struct Dims {
  int64_t rows = 0;
  int64_t cols = 0;
};

Dims dims_of(Projection projection, int64_t hidden, int64_t intermediate) {
  if (projection == Projection::kDown) return {hidden, intermediate};
  return {intermediate, hidden};
}

Status check_slice(const IntermediateSlice& slice, int64_t intermediate) {
  if (slice.count == 0 && slice.first == 0) return {};
  const bool aligned = slice.first % 16 == 0 && slice.count % 16 == 0;
  if (!aligned || slice.first < 0 || slice.count <= 0 || slice.first > intermediate - slice.count) {
    return invalid_argument(
        fmt::format("intermediate slice: expected multiples of 16 within {}, got first {} count {}",
                    intermediate, slice.first, slice.count));
  }
  return {};
}

// Sets the codes of blocks whose scale is 0 to 0. Such a block decodes to 0 anyway, and every
// backend may rely on zero codes.
void zero_codes_under_zero_scales(const uint8_t* scales, int64_t blocks, uint8_t* codes) {
  for (int64_t b = 0; b < blocks; ++b) {
    if (scales[b] == 0) std::memset(codes + b * 8, 0, 8);
  }
}

std::vector<uint8_t>& new_storage(LoadedExpert& out, int64_t bytes) {
  return out.storage.emplace_back(static_cast<size_t>(bytes));
}

FloatMatrix floats_of(const MatrixSource& matrix) {
  return {matrix.codes.data,       matrix.dtype,           matrix.rows, matrix.cols,
          matrix.codes.row_stride, matrix.codes.col_stride};
}

// The matrix as a view. If the bytes are stored as (rows, cols) and need no correction, the view
// points to them as they were read.
Status to_view(const MatrixSource& matrix, int64_t zero_blocks, LoadedExpert& out,
               Nvfp4View& view) {
  const int64_t rows = matrix.rows;
  const int64_t cols = matrix.cols;
  const bool nvfp4 = is_nvfp4(matrix.format);
  if (matrix.zeros) {
    uint8_t* const zero_codes = new_storage(out, rows * cols / 2).data();
    view = Nvfp4View::contiguous(zero_codes, new_storage(out, rows * cols / 16).data(), 1.0f, rows,
                                 cols);
    return {};
  }
  if (nvfp4 && matrix.codes.col_stride == 1 && zero_blocks == 0) {
    view = {matrix.codes.data,       matrix.scales.data,      matrix.tensor_scale, rows, cols,
            matrix.codes.row_stride, matrix.scales.row_stride};
    return {};
  }
  // The vectors move with LoadedExpert; their bytes do not move.
  uint8_t* codes = new_storage(out, rows * cols / 2).data();
  uint8_t* scales = new_storage(out, rows * cols / 16).data();
  float tensor_scale = matrix.tensor_scale;
  if (nvfp4) {
    copy_matrix(matrix.codes, codes);
    copy_matrix(matrix.scales, scales);
    if (zero_blocks > 0) zero_codes_under_zero_scales(scales, rows * cols / 16, codes);
  } else if (matrix.format == SourceFormat::kMxfp4) {
    ByteMatrix from_codes = matrix.codes;
    ByteMatrix from_scales = matrix.scales;
    std::vector<uint8_t> straight_codes;
    std::vector<uint8_t> straight_scales;
    if (from_codes.col_stride != 1) {
      straight_codes.resize(static_cast<size_t>(rows * from_codes.cols));
      copy_matrix(matrix.codes, straight_codes.data());
      from_codes = {straight_codes.data(), rows, from_codes.cols, from_codes.cols, 1};
      straight_scales.resize(static_cast<size_t>(rows * from_scales.cols));
      copy_matrix(matrix.scales, straight_scales.data());
      from_scales = {straight_scales.data(), rows, from_scales.cols, from_scales.cols, 1};
    }
    Result<Mxfp4Cast> cast =
        cast_mxfp4(from_codes.data, from_codes.row_stride, from_scales.data, from_scales.row_stride,
                   matrix.phase, rows, cols, codes, scales);
    if (!cast.ok()) return cast.status().in(matrix.scales_name);
    tensor_scale = cast->tensor_scale;
    if (cast->rounded_blocks > 0) {
      out.findings.push_back({Severity::kWarning, "mxfp4_block_rounded", matrix.layer,
                              matrix.expert, matrix.scales_name,
                              "block scales within 2^17 of the largest",
                              "blocks below that, whose codes were rounded once",
                              static_cast<int64_t>(cast->rounded_blocks)});
    }
  } else {
    QuantizeCounts counts;
    const Status quantized =
        quantize_float_matrix(floats_of(matrix), tensor_scale, codes, scales, counts);
    if (!quantized.ok()) return quantized.in(matrix.codes_name);
  }
  view = Nvfp4View::contiguous(codes, scales, tensor_scale, rows, cols);
  return {};
}

std::string place_of(int64_t layer, int64_t expert) {
  return expert < 0 ? fmt::format("layer {} shared expert", layer)
                    : fmt::format("layer {} expert {}", layer, expert);
}

}  // namespace

// ---- opening

Result<Checkpoint> Checkpoint::open(const std::string& path, const CheckpointOptions& options) {
  NVFP4_MOE_ASSIGN(OpenedModel opened, open_model(path, options.family));
  auto impl = std::make_unique<Impl>();
  impl->index = std::move(opened.index);
  impl->model = std::move(opened.model);
  impl->options = options;
  FindingList findings;
  for (const Finding& finding : impl->model.findings) findings.add(finding);
  report_left_out(impl->index.left_out(), findings);
  NVFP4_MOE_ASSIGN(impl->layers,
                   LayerIndex::build(impl->index, impl->options, impl->model, findings));
  if (impl->model.gguf) {
    impl->model.quant_algo = is_nvfp4(impl->model.format)                 ? "NVFP4"
                             : impl->model.format == SourceFormat::kMxfp4 ? "MXFP4"
                                                                          : "";
  }
  impl->findings = findings.take();
  impl->shared_intermediate = impl->model.options.shared_intermediate_size;
  // A layer can run only what is stored. The caller adds a shared expert that is kept in FP8.
  if (!impl->layers.find(impl->model.layers.front())->shared)
    impl->model.options.shared_intermediate_size = 0;
  return Checkpoint(std::move(impl));
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const ModelInfo& Checkpoint::model() const { return impl_->model; }
const TensorIndex& Checkpoint::index() const { return impl_->index; }
const CheckpointOptions& Checkpoint::options() const { return impl_->options; }
const std::vector<Finding>& Checkpoint::findings() const { return impl_->findings; }

// ---- places

Result<const LayerEntry*> Checkpoint::Impl::layer_entry(int64_t layer) const {
  const LayerEntry* entry = layers.find(layer);
  if (entry == nullptr) {
    NVFP4_MOE_TRY(layers.refusal(layer));
    return invalid_argument(
        fmt::format("layer {}: not an MoE layer of this checkpoint, which has {} from {} to {}",
                    layer, model.layers.size(), model.layers.front(), model.layers.back()));
  }
  return entry;
}

Result<const LayerEntry*> Checkpoint::Impl::expert_entry(int64_t layer, int64_t expert) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, layer_entry(layer));
  if (expert < 0 || expert >= model.options.num_experts) {
    return invalid_argument(fmt::format("layer {} expert {}: expected 0 to {}", layer, expert,
                                        model.options.num_experts - 1));
  }
  return entry;
}

Result<ExpertRange> Checkpoint::Impl::checked_range(const ExpertRange& range) const {
  const int64_t experts = model.options.num_experts;
  if (range.count == 0 && range.first == 0) return ExpertRange{0, experts};
  if (range.first < 0 || range.count < 0 || range.first > experts - range.count) {
    return invalid_argument(
        fmt::format("expert range: expected within {} experts, got first {} count {}", experts,
                    range.first, range.count));
  }
  return range;
}

bool Checkpoint::Impl::locate(const ExpertNames& names, int64_t layer, int64_t expert,
                              Projection projection, MatrixSource& out, FindingList& found) const {
  const int64_t intermediate = expert < 0 ? shared_intermediate : model.options.intermediate_size;
  const Dims dims = dims_of(projection, model.options.hidden_size, intermediate);
  return MatrixResolver(index, model.options.num_experts)
      .locate(names, layer, expert, projection, dims.rows, dims.cols, out, found);
}

bool Checkpoint::Impl::resolve(const ExpertNames& names, int64_t layer, int64_t expert,
                               Projection projection, MatrixSource& out, FindingList& found) const {
  const int64_t intermediate = expert < 0 ? shared_intermediate : model.options.intermediate_size;
  const Dims dims = dims_of(projection, model.options.hidden_size, intermediate);
  return MatrixResolver(index, model.options.num_experts)
      .resolve(names, layer, expert, projection, dims.rows, dims.cols, out, found);
}

std::string Checkpoint::tensor_name(int64_t layer, int64_t global_expert,
                                    const std::string& projection) const {
  const LayerEntry* entry = impl_->layers.find(layer);
  if (entry == nullptr)
    return fmt::format("layer {} expert {} {}", layer, global_expert, projection);
  const Projection which = projection == "down" ? Projection::kDown
                           : projection == "up" ? Projection::kUp
                                                : Projection::kGate;
  const ExpertNames& names = global_expert < 0 && entry->shared ? *entry->shared : entry->routed;
  return names.name(global_expert, which, names.parts.codes);
}

Result<MoeOptions> Checkpoint::layer_options(int64_t layer) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  MoeOptions options = impl_->model.options;
  options.shared_intermediate_size = entry->shared ? impl_->shared_intermediate : 0;
  options.activation_format = entry->activations.format;
  if (const auto limit = impl_->model.swiglu_limits.find(layer);
      limit != impl_->model.swiglu_limits.end()) {
    options.activation = Activation::kSwigluStep;
    options.swiglu_limit = limit->second;
  }
  return options;
}

Result<DeclaredActivations> Checkpoint::declared_activations(int64_t layer) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  return entry->activations;
}

uint64_t Checkpoint::expert_bytes() const { return impl_->layers.size_bytes(); }

// ---- experts

Result<LoadedExpert> Checkpoint::Impl::load(const ExpertNames& names, int64_t layer, int64_t expert,
                                            const IntermediateSlice& slice) const {
  const int64_t intermediate = expert < 0 ? shared_intermediate : model.options.intermediate_size;
  if (Status status = check_slice(slice, intermediate); !status.ok())
    return status.in(place_of(layer, expert));
  LoadedExpert out;
  out.memory = memory;
  FindingList found;
  ExpertBiases& biases = out.source.biases;
  const std::tuple<Projection, Nvfp4View*, const float**> targets[] = {
      {Projection::kGate, &out.source.gate, &biases.gate},
      {Projection::kUp, &out.source.up, &biases.up},
      {Projection::kDown, &out.source.down, &biases.down}};
  for (const auto& [projection, view, bias] : targets) {
    if (projection == Projection::kGate && !names.gated) continue;
    MatrixSource matrix;
    if (!resolve(names, layer, expert, projection, matrix, found)) return found.first_error();
    matrix.memory = memory.get();
    if (matrix.format == SourceFormat::kFloat) {  // the scale of the whole matrix, for any slice
      NVFP4_MOE_TRY(matrix.read_codes(out.storage));
      Result<float> scale = float_matrix_scale(floats_of(matrix));
      if (!scale.ok()) return scale.status().in(matrix.codes_name).in(place_of(layer, expert));
      matrix.tensor_scale = *scale;
    }
    NVFP4_MOE_ASSIGN(const bool usable, check_zeros(matrix, out.storage, found));
    if (!usable) {
      NVFP4_MOE_TRY(matrix.check_unchanged());
      return found.first_error();
    }
    if (slice.count > 0) {
      matrix = projection == Projection::kDown ? matrix.col_slice(slice.first, slice.count)
                                               : matrix.row_slice(slice.first, slice.count);
    }
    ScaleScan scan;
    int64_t zero_blocks = 0;
    NVFP4_MOE_TRY(matrix.read_codes(out.storage));
    NVFP4_MOE_ASSIGN(const bool sound, check_scales(matrix, out.storage, found, scan, zero_blocks));
    auto bias_values = matrix.read_bias();
    NVFP4_MOE_TRY(
        matrix.check_unchanged());  // before the checks: half of another file must give no finding
    if (!sound) return found.first_error();
    if (!bias_values.ok()) return bias_values.status().in(place_of(layer, expert));
    *bias = out.keep(*bias_values);
    if (Status status = to_view(matrix, zero_blocks, out, *view); !status.ok()) {
      return status.in(place_of(layer, expert));
    }
  }
  for (Finding& finding : found.take()) out.findings.push_back(std::move(finding));
  return out;
}

Result<LoadedExpert> Checkpoint::expert(int64_t layer, int64_t global_expert,
                                        const IntermediateSlice& slice) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->expert_entry(layer, global_expert));
  NVFP4_MOE_TRY(entry->refusal);
  return impl_->load(entry->routed, layer, global_expert, slice);
}

Result<LoadedExpert> Checkpoint::shared_expert(int64_t layer,
                                               const IntermediateSlice& slice) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  if (!entry->shared) {
    return unsupported(
        fmt::format("layer {} shared expert: none is stored as NVFP4, MXFP4 or floats", layer));
  }
  return impl_->load(*entry->shared, layer, -1, slice);
}

// ---- activation scales

Status Checkpoint::Impl::check_unchanged() const {
  for (const auto& file : index.files()) NVFP4_MOE_TRY(file->check_unchanged());
  return {};
}

Result<LayerScales> Checkpoint::layer_scales(int64_t layer, std::vector<Finding>* findings) const {
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl_->layer_entry(layer));
  LayerScales out;
  FindingList found;
  impl_->add_input_scales(*entry, layer, {0, impl_->model.options.num_experts}, found, &out);
  NVFP4_MOE_TRY(impl_->check_unchanged());
  if (found.has_error()) return found.first_error();
  if (findings != nullptr) {
    for (Finding& finding : found.take()) findings->push_back(std::move(finding));
  }
  return out;
}

void Checkpoint::Impl::add_input_scales(const LayerEntry& entry, int64_t layer,
                                        const ExpertRange& range, FindingList& found,
                                        LayerScales* scales) const {
  if (entry.routed.parts.input_scale.empty()) return;
  const bool used = entry.activations.format == ActivationFormat::kNvfp4;
  // For FP8 activations the files have amax/448.
  const float unit = entry.activations.format == ActivationFormat::kFp8 ? 448.0f / 2688.0f : 1.0f;
  const MatrixResolver resolver(index, model.options.num_experts);
  for (const int64_t e : entry.stored_in(range)) {
    for (const Projection projection : entry.routed.projections()) {
      const InputScale scale = resolver.input_scale(entry.routed, e, projection);
      if (scales != nullptr && scale.usable) {
        std::optional<float>& target =
            projection == Projection::kDown ? scales->intermediate : scales->hidden;
        target = std::max(target.value_or(0.0f), scale.value * unit);
      }
      const bool unreadable = std::string_view(scale.finding) == "unreadable";
      if ((!used && !unreadable) || scale.finding[0] == '\0') continue;
      // If the whole expert is missing, that is reported instead.
      if (index.find(entry.routed.name(e, projection, entry.routed.parts.codes)).info == nullptr)
        continue;
      if (unreadable) {
        found.add({Severity::kError, scale.finding, layer, e, scale.name, "a scalar",
                   "a file that cannot be read"});
        continue;
      }
      const bool one = scale.usable;
      found.add({one ? Severity::kNote : Severity::kWarning, scale.finding, layer, e, scale.name,
                 one ? "a calibrated scale"
                     : "a finite normal number > 0 (the layer's largest is used instead)",
                 std::string_view(scale.finding) == "input_scale_missing"
                     ? "no such scalar"
                     : float_string(scale.stored)});
    }
  }
  if (scales == nullptr || !used) return;
  for (const bool down : {false, true}) {
    if ((down ? scales->intermediate : scales->hidden).has_value()) continue;
    found.add({Severity::kWarning, "input_scale_unusable", layer, -1,
               entry.routed.name(0, down ? Projection::kDown : entry.routed.projections().front(),
                                 entry.routed.parts.input_scale),
               "one usable input scale in the layer, for activation_scale static or vllm_order",
               "none"});
  }
}

}  // namespace nvfp4_moe::internal
