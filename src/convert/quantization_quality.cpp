// Loss of a quantization: sums over matrices and layers, and their ratios.
#include <cmath>
#include <limits>

#include "convert/quantize_checkpoint.h"

namespace nvfp4_moe::internal {

double QuantizationQuality::sqnr_db() const {
  if (sum_sq_error == 0) return std::numeric_limits<double>::infinity();
  return 10.0 * std::log10(sum_sq / sum_sq_error);
}

double QuantizationQuality::relative_error() const {
  return sum_sq == 0 ? 0 : std::sqrt(sum_sq_error / sum_sq);
}

QuantizationQuality& QuantizationQuality::operator+=(const QuantizationQuality& other) {
  sum_sq += other.sum_sq;
  sum_sq_error += other.sum_sq_error;
  counts += other.counts;
  return *this;
}

QuantizationQuality QuantizedLayer::total() const {
  QuantizationQuality sum = gate;
  sum += up;
  sum += down;
  return sum;
}

double QuantizeResult::mean_sqnr_db() const {
  double sum = 0;
  for (const QuantizedLayer& layer : layers) sum += layer.total().sqnr_db();
  return layers.empty() ? 0 : sum / static_cast<double>(layers.size());
}

}  // namespace nvfp4_moe::internal
