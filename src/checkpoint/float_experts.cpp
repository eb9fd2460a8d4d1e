#include "checkpoint/float_experts.h"

#include <cstring>

#include "checkpoint/names.h"
#include "core/float_formats.h"

namespace nvfp4_moe {
namespace {

int64_t elem_bytes(DType dtype) { return bits(dtype) / 8; }

// Reads element i of an array whose address may be odd (safetensors aligns nothing by itself).
template <class T>
T load(const std::byte* data, int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

struct Place {
  std::string name;
  TensorIndex::Ref ref;
};

Result<Place> find(const Checkpoint& checkpoint, int64_t layer, int64_t expert, const char* projection) {
  std::string name = checkpoint.tensor_name(layer, expert, projection);
  TensorIndex::Ref ref = checkpoint.index().find(name);
  if (ref.info == nullptr)
    return bad_input("layer " + std::to_string(layer) + " expert " + std::to_string(expert) + " " + projection +
                     ": tensor " + name + " is missing");
  if (!is_activation(ref.info->dtype))
    return bad_input(name + ": expected BF16, F16 or F32, got " + describe(*ref.info));
  return Place{std::move(name), ref};
}

Status misshapen(const Place& place, const std::string& expected) {
  return bad_input(place.name + ": expected " + expected + ", got " + describe(*place.ref.info));
}

// The matrix (rows, cols) at `place`; in a stacked tensor the expert's, `first_row` rows into its (total_rows, cols).
Result<FloatWeights> matrix(const Place& place, int64_t expert, int64_t num_experts, int64_t rows, int64_t cols,
                            int64_t first_row, int64_t total_rows, bool k_first) {
  const TensorInfo& info = *place.ref.info;
  FloatWeights m;
  m.tensor = place.name;
  m.file = place.ref.file;
  m.data = place.ref.data();
  m.dtype = info.dtype;
  m.rows = rows;
  m.cols = cols;
  if (info.shape.size() == 2) {
    const int64_t shape[] = {rows, cols};
    if (info.shape[0] != rows || info.shape[1] != cols) return misshapen(place, shape_string(shape));
    m.row_stride = cols;
    return m;
  }
  const int64_t plain[] = {num_experts, total_rows, cols};
  const int64_t turned[] = {num_experts, cols, total_rows};
  const auto is = [&info](const int64_t* shape) {
    return info.shape.size() == 3 && info.shape[0] == shape[0] && info.shape[1] == shape[1] &&
           info.shape[2] == shape[2];
  };
  m.stacked = true;
  // Where both orders fit the shape, the family decides.
  const bool k_is_axis_1 = is(turned) && (k_first || !is(plain));
  if (k_is_axis_1) {
    m.row_stride = 1;
    m.col_stride = total_rows;
    m.data += (expert * cols * total_rows + first_row) * elem_bytes(m.dtype);
  } else if (is(plain)) {
    m.row_stride = cols;
    m.data += (expert * total_rows + first_row) * cols * elem_bytes(m.dtype);
  } else {
    return misshapen(place, shape_string(k_first ? turned : plain));
  }
  return m;
}

}  // namespace

uint64_t FloatWeights::size_bytes() const { return static_cast<uint64_t>(rows * cols * elem_bytes(dtype)); }

void FloatWeights::read_row(int64_t row, float* out) const {
  const std::byte* from = data + row * row_stride * elem_bytes(dtype);
  switch (dtype) {
    case DType::kBf16:
      for (int64_t c = 0; c < cols; ++c) out[c] = bf16_to_float(load<uint16_t>(from, c * col_stride));
      break;
    case DType::kF16:
      for (int64_t c = 0; c < cols; ++c) out[c] = fp16_to_float(load<uint16_t>(from, c * col_stride));
      break;
    default:
      for (int64_t c = 0; c < cols; ++c) out[c] = load<float>(from, c * col_stride);
  }
}

void FloatWeights::prefetch() const {
  if (col_stride == 1) file->prefetch(data, size_bytes());
}

void FloatWeights::release() const {
  if (col_stride == 1) file->release(data, size_bytes());
}

Result<FloatExpert> float_expert(const Checkpoint& checkpoint, int64_t layer, int64_t expert) {
  if (checkpoint.model().format != SourceFormat::kFloat)
    return unsupported("expected a checkpoint with BF16, F16 or F32 experts, got " +
                       std::string(to_string(checkpoint.model().format)));
  NVFP4_MOE_ASSIGN(const MoeOptions options, checkpoint.layer_options(layer));
  const int64_t experts = options.num_experts, hidden = options.hidden_size, inter = options.intermediate_size;
  NVFP4_MOE_ASSIGN(const Place gate, find(checkpoint, layer, expert, "gate"));
  NVFP4_MOE_ASSIGN(const Place up, find(checkpoint, layer, expert, "up"));
  NVFP4_MOE_ASSIGN(const Place down, find(checkpoint, layer, expert, "down"));
  const FamilyNames* family = family_names(checkpoint.model().family);
  const bool k_first = family != nullptr && family->stacked_k_first;
  const bool fused = gate.name == up.name;
  const int64_t total = fused ? 2 * inter : inter;
  FloatExpert out;
  NVFP4_MOE_ASSIGN(out.gate, matrix(gate, expert, experts, inter, hidden, 0, total, k_first));
  NVFP4_MOE_ASSIGN(out.up, matrix(up, expert, experts, inter, hidden, fused ? inter : 0, total, k_first));
  NVFP4_MOE_ASSIGN(out.down, matrix(down, expert, experts, hidden, inter, 0, hidden, k_first));
  return out;
}

}  // namespace nvfp4_moe
