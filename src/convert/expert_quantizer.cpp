#include "convert/expert_quantizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/float_experts.h"
#include "core/csf.h"
#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

// Rows per range of a thread. Fixed, so that sums do not depend on the number of threads.
constexpr int64_t kRowsAtOnce = 32;

// max |w|. kBadInput with the place if an element is NaN or Inf.
Result<double> matrix_amax(const FloatWeights& source, Executor& executor) {
  const int64_t ranges = (source.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  std::vector<float> amax(static_cast<size_t>(ranges));
  executor.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(source.cols));
    for (int64_t range = begin; range < end; ++range) {
      float most = 0;
      const int64_t last = std::min(source.rows, (range + 1) * kRowsAtOnce);
      for (int64_t r = range * kRowsAtOnce; r < last; ++r) {
        source.read_row(r, row.data());
        const float of_row = row_amax(row);
        if (!std::isfinite(of_row)) {
          most = of_row;
          break;
        }
        most = std::max(most, of_row);
      }
      amax[static_cast<size_t>(range)] = most;
    }
  });
  double most = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    const float of_range = amax[static_cast<size_t>(range)];
    if (std::isfinite(of_range)) {
      most = std::max(most, static_cast<double>(of_range));
      continue;
    }
    std::vector<float> row(static_cast<size_t>(source.cols));
    for (int64_t r = range * kRowsAtOnce; r < source.rows; ++r) {
      source.read_row(r, row.data());
      for (int64_t c = 0; c < source.cols; ++c) {
        if (!std::isfinite(row[static_cast<size_t>(c)]))
          return bad_input(fmt::format("{} ({}, {}): expected a finite weight, got {}",
                                       source.tensor, r, c, row[static_cast<size_t>(c)]));
      }
    }
  }
  return most;
}

Status quantize_matrix(const FloatWeights& source, float tensor_scale, ScaleSearch search,
                       const std::vector<float>& channel_weights, Executor& executor,
                       QuantizedMatrix& out) {
  const int64_t rows = source.rows, cols = source.cols;
  const int64_t ranges = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  out.codes.resize(static_cast<size_t>(rows * cols / 2));
  out.block_scales.resize(static_cast<size_t>(rows * cols / kBlockElems));
  std::vector<QuantizationQuality> quality(static_cast<size_t>(ranges));
  std::vector<Status> status(static_cast<size_t>(ranges));
  executor.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(kRowsAtOnce * cols));
    for (int64_t range = begin; range < end; ++range) {
      const int64_t first = range * kRowsAtOnce;
      const int64_t count = std::min(kRowsAtOnce, rows - first);
      for (int64_t r = 0; r < count; ++r) source.read_row(first + r, x.data() + r * cols);
      QuantizationQuality& q = quality[static_cast<size_t>(range)];
      status[static_cast<size_t>(range)] = quantize_weights(
          {x.data(), static_cast<size_t>(count * cols)}, count, cols, tensor_scale, search,
          out.codes.data() + first * cols / 2, out.block_scales.data() + first * cols / kBlockElems,
          q.counts, &q.sum_sq, &q.sum_sq_error, channel_weights);
    }
  });
  out.quality = {};
  for (int64_t range = 0; range < ranges; ++range) {
    NVFP4_MOE_TRY(status[static_cast<size_t>(range)].in(source.tensor));
    out.quality += quality[static_cast<size_t>(range)];
  }
  return {};
}

// Below the smallest normal, 1/s would not be finite, and compressed-tensors stores 1/s.
float tensor_scale_of(double amax) { return std::max(tensor_scale_from_amax(amax), 0x1p-126f); }

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}

}  // namespace

Status ExpertQuantizer::quantize(const OutputItem& item,
                                 const std::function<Status(int matrix, float)>& take) {
  NVFP4_MOE_ASSIGN(FloatExpert source,
                   float_expert(checkpoint_, item.expert.layer, item.expert.expert));
  FloatWeights* matrices[] = {&source.gate, &source.up, &source.down};
  const int first = item.modules[0].empty() ? 1 : 0;  // experts without a gate
  double amax[3] = {};
  for (int p = first; p < 3; ++p) NVFP4_MOE_TRY(matrices[p]->fetch());
  for (int p = first; p < 3; ++p) {
    NVFP4_MOE_ASSIGN(amax[p], matrix_amax(*matrices[p], executor_));
  }
  ExpertMoments moments;
  if (moments_ != nullptr) {
    NVFP4_MOE_ASSIGN(moments, moments_->expert(item.expert.layer, item.expert.expert));
  }
  if (options_.share_gate_up_scale) amax[0] = amax[1] = std::max(amax[0], amax[1]);
  for (int p = first; p < 3; ++p) {
    const float scale = tensor_scale_of(amax[p]);
    NVFP4_MOE_TRY(quantize_matrix(*matrices[p], scale, options_.search,
                                  p == 2 ? moments.intermediate : moments.hidden, executor_,
                                  matrix_));
    matrices[p]->release();
    matrix_.rows = matrices[p]->rows;
    NVFP4_MOE_TRY(take(p, scale));
  }
  return {};
}

Status ExpertQuantizer::run(const OutputItem& item,
                            const std::function<void(const ExpertQuality&)>& measured) {
  ExpertQuality quality;
  return quantize(item, [&](int p, float scale) {
    quality[static_cast<size_t>(p)] = matrix_.quality;
    if (p == 2) measured(quality);
    return write(item.modules[p] + ".", scale, input_scale(item.expert.layer, p == 2));
  });
}

Result<ExceptionCounts> ExpertQuantizer::count_exceptions(const OutputItem& item) {
  ExceptionCounts counts{};
  NVFP4_MOE_TRY(quantize(item, [&](int p, float) {
    counts[static_cast<size_t>(p)] = static_cast<int64_t>(matrix_.coded_scales().exceptions.size());
    return Status();
  }));
  return counts;
}

CsfStreams QuantizedMatrix::coded_scales() const {
  return encode_csf(CsfCodec::kNvfp4, block_scales, rows,
                    static_cast<int64_t>(block_scales.size()) / rows);
}

float ExpertQuantizer::input_scale(int64_t layer, bool down) const {
  const auto found = options_.input_scales.find(layer);
  if (found == options_.input_scales.end()) return 1.0f;
  return (down ? found->second.intermediate : found->second.hidden).value_or(1.0f);
}

Status ExpertQuantizer::write(const std::string& base, float tensor_scale, float input_scale) {
  const std::vector<std::string> names = part_names(options_.format, options_.scale_coding);
  size_t next = 0;
  const auto put = [&](std::span<const std::byte> bytes) {
    return writer_->write(base + names[next++], bytes);
  };
  const auto scalar = [&](float value) {
    // compressed-tensors stores the divisor, ModelOpt the factor.
    return options_.format == OutputFormat::kCompressedTensors
               ? static_cast<float>(1.0 / static_cast<double>(value))
               : value;
  };
  const float scales[] = {scalar(tensor_scale), scalar(input_scale)};
  NVFP4_MOE_TRY(put(bytes_of(matrix_.codes)));
  if (options_.scale_coding == ScaleCoding::kCsf) {
    const CsfStreams streams = matrix_.coded_scales();
    NVFP4_MOE_TRY(put(bytes_of(streams.fixed)));
    NVFP4_MOE_TRY(put(bytes_of(streams.exceptions)));
  } else {
    NVFP4_MOE_TRY(put(bytes_of(matrix_.block_scales)));
  }
  NVFP4_MOE_TRY(put(std::as_bytes(std::span(scales, 1))));
  return put(std::as_bytes(std::span(scales + 1, 1)));
}

}  // namespace nvfp4_moe::internal
