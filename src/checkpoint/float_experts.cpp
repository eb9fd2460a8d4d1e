#include "checkpoint/float_experts.h"

#include <cstring>

#include "checkpoint/checkpoint_impl.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

int64_t elem_bytes(DType dtype) { return bits(dtype) / 8; }

// Reads element i of an array whose address may be odd, since safetensors does not align data.
template <class T>
T load(const std::byte* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

FloatWeights weights_of(const MatrixSource& matrix, bool stacked) {
  const int64_t elem = elem_bytes(matrix.dtype);
  FloatWeights m;
  m.tensor = matrix.codes_name;
  m.file = matrix.codes_place.file;
  m.offset = matrix.codes_place.offset;
  m.dtype = matrix.dtype;
  m.rows = matrix.rows;
  m.cols = matrix.cols;
  m.row_stride = matrix.codes_place.row_stride / elem;
  m.col_stride = matrix.codes_place.col_stride / elem;
  m.stacked = stacked;
  return m;
}

}  // namespace

uint64_t FloatWeights::size_bytes() const {
  return static_cast<uint64_t>(rows * cols * elem_bytes(dtype));
}

void FloatWeights::read_row(int64_t row, float* out) const {
  const std::byte* from = bytes.data() + row * row_stride * elem_bytes(dtype);
  switch (dtype) {
    case DType::kBf16:
      for (int64_t c = 0; c < cols; ++c)
        out[c] = bf16_to_float(load<uint16_t>(from, c * col_stride));
      break;
    case DType::kF16:
      for (int64_t c = 0; c < cols; ++c)
        out[c] = fp16_to_float(load<uint16_t>(from, c * col_stride));
      break;
    default:
      for (int64_t c = 0; c < cols; ++c) out[c] = load<float>(from, c * col_stride);
  }
}

Status FloatWeights::fetch() {
  if (rows == 0 || cols == 0) return {};
  const int64_t elems = (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  bytes.resize(static_cast<size_t>(elems * elem_bytes(dtype)));
  NVFP4_MOE_TRY(file->read(offset, bytes.data(), bytes.size()));
  return file->check_unchanged();
}

Result<FloatExpert> float_expert(const Checkpoint& checkpoint, int64_t layer, int64_t expert) {
  if (checkpoint.model().format != SourceFormat::kFloat)
    return unsupported("expected a checkpoint with BF16, F16 or F32 experts, got " +
                       std::string(to_string(checkpoint.model().format)));
  const Checkpoint::Impl& impl = *checkpoint.impl_;
  NVFP4_MOE_ASSIGN(const LayerEntry* entry, impl.expert_entry(layer, expert));
  NVFP4_MOE_TRY(entry->refusal);
  FloatExpert out;
  const std::pair<Projection, FloatWeights*> targets[] = {
      {Projection::kGate, &out.gate}, {Projection::kUp, &out.up}, {Projection::kDown, &out.down}};
  for (const auto& [projection, weights] : targets) {
    if (projection == Projection::kGate && !entry->routed.gated) continue;
    MatrixSource matrix;
    FindingList found;
    if (!impl.locate(entry->routed, layer, expert, projection, matrix, found))
      return found.first_error();
    *weights = weights_of(matrix, entry->routed.role == TensorRole::kStacked);
  }
  return out;
}

}  // namespace nvfp4_moe::internal
