#include "verify/moments.h"

#include <fmt/format.h>

#include <atomic>
#include <cmath>

#include "core/float_formats.h"
#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

// Adds squares of (count) bf16 values.
void add_squares(const uint16_t* x, std::vector<double>& sums) {
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto value = static_cast<double>(bf16_to_float(x[i]));
    sums[i] += value * value;
  }
}

// Means as floats; false if one is beyond fp32.
bool write_means(const std::vector<double>& sums, int64_t rows, float* means) {
  bool finite = true;
  for (size_t i = 0; i < sums.size(); ++i) {
    means[i] = rows == 0 ? 0.0f : static_cast<float>(sums[i] / static_cast<double>(rows));
    finite = finite && std::isfinite(means[i]);
  }
  return finite;
}

TensorInfo info_of(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  TensorInfo info;
  info.name = name;
  info.dtype = dtype;
  info.shape = std::move(shape);
  return info;
}

}  // namespace

Result<LayerMoments> measure_moments(const PartBuffers& part, int64_t top_k, int64_t hidden_size,
                                     Executor& executor) {
  const int64_t experts = part.experts, inner = part.intermediate_size;
  LayerMoments moments;
  moments.rows.resize(static_cast<size_t>(experts));
  moments.hidden.resize(static_cast<size_t>(experts * hidden_size));
  moments.intermediate.resize(static_cast<size_t>(experts * inner));
  std::atomic<bool> finite{true};
  executor.parallel_for(experts, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> hidden(static_cast<size_t>(hidden_size)),
        intermediate(static_cast<size_t>(inner));
    for (int64_t e = begin; e < end; ++e) {
      std::fill(hidden.begin(), hidden.end(), 0.0);
      std::fill(intermediate.begin(), intermediate.end(), 0.0);
      for (int64_t row = part.row_offsets[e]; row < part.row_offsets[e + 1]; ++row) {
        add_squares(part.hidden.bf16 + token_of_row(part, row, top_k) * hidden_size, hidden);
        add_squares(part.intermediate.bf16 + row * inner, intermediate);
      }
      const int64_t rows = part.row_offsets[e + 1] - part.row_offsets[e];
      moments.rows[static_cast<size_t>(e)] = rows;
      if (!write_means(hidden, rows, moments.hidden.data() + e * hidden_size) ||
          !write_means(intermediate, rows, moments.intermediate.data() + e * inner))
        finite = false;
    }
  });
  if (!finite)
    return bad_input("moments: expected squares of activations within fp32, got larger ones");
  return moments;
}

Result<MomentsWriter> MomentsWriter::create(
    const std::string& path, const std::vector<std::pair<int64_t, MoeOptions>>& layers) {
  NVFP4_MOE_ASSIGN(const bool taken, has_entry(path));
  if (taken)
    return invalid_argument(fmt::format(
        "{}: expected a new file, got one that exists; choose another name, or remove it",
        printable(path, 4096)));
  std::vector<TensorInfo> infos;
  for (const auto& [layer, o] : layers) {
    const std::string prefix = fmt::format("layers.{}.", layer);
    infos.push_back(info_of(prefix + "rows", DType::kI64, {o.num_experts}));
    infos.push_back(
        info_of(prefix + "hidden_moments", DType::kF32, {o.num_experts, o.hidden_size}));
    infos.push_back(info_of(prefix + "intermediate_moments", DType::kF32,
                            {o.num_experts, o.intermediate_size}));
  }
  NVFP4_MOE_ASSIGN(SafetensorsWriter writer, SafetensorsWriter::create(path, std::move(infos), {}));
  return MomentsWriter(std::move(writer));
}

Status MomentsWriter::write(const LayerMoments& moments) {
  NVFP4_MOE_TRY(writer_.write(std::as_bytes(std::span(moments.rows))));
  NVFP4_MOE_TRY(writer_.write(std::as_bytes(std::span(moments.hidden))));
  return writer_.write(std::as_bytes(std::span(moments.intermediate)));
}

}  // namespace nvfp4_moe::internal
