#include "verify/verify_original.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float_formats.h"

namespace nvfp4_moe::internal {
namespace {

constexpr double kSlack = 1.0 + 0x1p-21;
constexpr double kNearTie = 1.0 + 0x1p-7;
constexpr int64_t kRowsAtOnce = 32;

constexpr double kGrid[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
// Rounding interval of magnitude m: [kLow[m], kHigh[m]]. The top one ends at the top value itself.
constexpr double kLow[8] = {0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5};
constexpr double kHigh[8] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6};

enum class Verdict : uint8_t { kSaturated, kNearTie, kBroken };

// Classifies a weight whose q = w/u is outside its code's interval.
Verdict judge(double q, uint8_t code) {
  const int m = code & 7;
  const double a = m == 0 ? std::fabs(q) : (code & 8) != 0 ? -q : q;
  if (m == 7 && a > 6) return Verdict::kSaturated;
  if (a >= kLow[m] / kNearTie && a <= kHigh[m] * kNearTie) return Verdict::kNearTie;
  return Verdict::kBroken;
}

int nearest_magnitude(double a) {
  int m = 0;
  while (m < 7 && (a > kHigh[m] || (a == kHigh[m] && (m & 1) != 0))) ++m;
  return m;
}

// The squared error of the block under the scale that `max` gives it.
double max_scale_error(const float* w, double amax, double s) {
  const double u = static_cast<double>(e4m3_to_float(e4m3_from_double(amax / (6.0 * s)))) * s;
  double sum = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const double a = std::fabs(static_cast<double>(w[i]));
    const double error = a - (u == 0 ? 0.0 : kGrid[nearest_magnitude(a / u)] * u);
    sum += error * error;
  }
  return sum;
}

void note(WeightPlace& place, int64_t row, int64_t col, std::string expected, std::string actual) {
  if (!place.found()) place = {row, col, std::move(expected), std::move(actual)};
}

struct Block {
  const float* w;        // (16) originals
  const uint8_t* codes;  // (8) bytes
  uint8_t scale;
  double s;
  int64_t row, col;  // of its first element
  uint8_t code(int i) const {
    return i % 2 == 0 ? low_code(codes[i / 2]) : high_code(codes[i / 2]);
  }
};

void note_scale(const Block& b, int i, double amax, OriginalComparison& out) {
  ++out.broken;
  note(out.first_broken, b.row, b.col + i,
       fmt::format("a block scale near {:.6g} (amax {:.6g}, tensor scale {:.6g})", amax / (6 * b.s),
                   amax, b.s),
       fmt::format("{:.6g} (0x{:02X})", e4m3_to_float(b.scale), b.scale));
}

// Criterion 1 as an interval of q for each of the 16 codes, slack included. kSaturated needs the
// slow path too.
struct Intervals {
  double low[16], high[16], value[16];
  constexpr Intervals() : low(), high(), value() {
    for (int c = 0; c < 16; ++c) {
      const int m = c & 7;
      const double lo = m == 0 ? -kHigh[0] * kSlack : kLow[m] / kSlack, hi = kHigh[m] * kSlack;
      value[c] = c < 8 ? kGrid[m] : -kGrid[m];
      low[c] = c < 8 ? lo : -hi;
      high[c] = c < 8 ? hi : -lo;
    }
  }
};
constexpr Intervals kIntervals;

// Handles one weight outside its interval. Returns true for a saturation, which the block as a
// whole must explain.
bool judge_stray(const Block& b, int i, double q, double u, OriginalComparison& out) {
  const Verdict verdict = judge(q, b.code(i));
  if (verdict == Verdict::kSaturated) return true;
  const bool broken = verdict != Verdict::kNearTie;
  ++(broken ? out.broken : out.near_ties);
  WeightPlace& place = broken ? out.first_broken : out.first_near_tie;
  if (place.found()) return false;
  const int m = nearest_magnitude(std::fabs(q));
  note(place, b.row, b.col + i,
       fmt::format("{:.6g} to decode to about {:.6g} (code {:.1f}, half a step {:.3g})", b.w[i],
                   std::copysign(kGrid[m] * u, q), std::copysign(kGrid[m], q),
                   (kHigh[m] - kGrid[m]) * u),
       fmt::format("{:.6g} (code {:.1f}, block scale {:.6g}, tensor scale {:.6g})",
                   kIntervals.value[b.code(i)] * u, kIntervals.value[b.code(i)],
                   e4m3_to_float(b.scale), b.s));
  return false;
}

void judge_block(const Block& b, OriginalComparison& out) {
  const double v = static_cast<double>(e4m3_to_float(b.scale));
  const double u = v * b.s;
  const bool usable = is_valid_block_scale(b.scale) && std::isfinite(u) && b.s > 0;
  const double inverse = 1.0 / u;  // the error is 2^-52, compared with a slack of 2^-21
  double sum_sq = 0, sum_sq_decoded = 0, sum_dot = 0, error_sum = 0, worst = 0;
  double w[kBlockElems], strays = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const uint8_t code = b.code(i);
    w[i] = static_cast<double>(b.w[i]);
    const double decoded = kIntervals.value[code] * u;
    const double error = decoded - w[i];
    const double q = w[i] * inverse;
    sum_sq += w[i] * w[i];
    sum_sq_decoded += decoded * decoded;
    sum_dot += w[i] * decoded;
    error_sum += error * error;
    worst = std::max(worst, std::fabs(error));
    strays += static_cast<double>(!(q >= kIntervals.low[code] && q <= kIntervals.high[code]));
  }
  out.weights += kBlockElems;
  double amax = 0;
  int largest = 0;
  if (!usable || v == 0 || strays > 0 || !std::isfinite(sum_sq)) {
    for (int i = 0; i < kBlockElems; ++i) {
      if (!std::isfinite(w[i])) {
        ++out.broken;
        note(out.first_broken, b.row, b.col + i, "a finite original weight",
             fmt::format("{}", w[i]));
        return;
      }
      if (std::fabs(w[i]) > amax) {
        amax = std::fabs(w[i]);
        largest = i;
      }
    }
  }
  out.sum_sq += sum_sq;
  out.sum_sq_decoded += sum_sq_decoded;
  out.sum_dot += sum_dot;
  out.sum_sq_error += error_sum;
  out.zeroed_blocks += sum_sq_decoded == 0 && sum_sq > 0;
  if (worst > out.max_abs) {
    out.max_abs = worst;
    out.max_row = b.row;
    for (int i = 0; i < kBlockElems; ++i) {
      if (std::fabs(kIntervals.value[b.code(i)] * u - w[i]) == worst) out.max_col = b.col + i;
    }
  }
  if (!usable) {
    note_scale(b, largest, amax, out);
    return;
  }
  if (v == 0) {
    if (amax > 6 * b.s * 0x1p-10 * kSlack) note_scale(b, largest, amax, out);
    return;
  }
  if (strays == 0) return;
  uint64_t saturated = 0;
  for (int i = 0; i < kBlockElems; ++i) {
    const double q = w[i] * inverse;
    const uint8_t code = b.code(i);
    if (q >= kIntervals.low[code] && q <= kIntervals.high[code]) continue;
    saturated += judge_stray(b, i, q, u, out);
  }
  if (saturated == 0) return;
  const double top = b.scale == 0x7E
                         ? 448.0
                         : static_cast<double>(e4m3_to_float(static_cast<uint8_t>(b.scale + 1)));
  if (amax <= 6 * b.s * top * kSlack) {
    out.saturated += saturated;
  } else if (error_sum <= max_scale_error(b.w, amax, b.s) * kSlack) {
    out.saturated += saturated;
    ++out.clipped_blocks;
  } else {
    note_scale(b, largest, amax, out);
  }
}

Likeness likeness_of(const Nvfp4View& view, const OriginalRows& original, bool transposed) {
  const int64_t rows = std::min<int64_t>(view.rows, 64), blocks = view.cols / kBlockElems;
  std::vector<float> w(static_cast<size_t>(view.cols));
  double dot = 0, sq = 0, sq_decoded = 0;
  for (int64_t r = 0; r < rows; ++r) {
    original(r, w.data());
    for (int64_t c = 0; c < view.cols; ++c) {
      const uint8_t byte = view.row_codes(r)[c / 2];
      const int64_t b = c / kBlockElems;
      const uint8_t scale =
          transposed ? view.block_scales[b * view.rows + r] : view.block_scales[r * blocks + b];
      const uint8_t used = view.scales_stride == blocks ? scale : view.row_scales(r)[b];
      const double d =
          static_cast<double>(e2m1_to_float(c % 2 == 0 ? low_code(byte) : high_code(byte))) *
          static_cast<double>(e4m3_to_float(used)) * static_cast<double>(view.tensor_scale);
      const double x = static_cast<double>(w[static_cast<size_t>(c)]);
      if (!std::isfinite(d) || !std::isfinite(x)) continue;
      dot += d * x;
      sq += x * x;
      sq_decoded += d * d;
    }
  }
  if (sq == 0 || sq_decoded == 0) return {};
  return {dot / std::sqrt(sq * sq_decoded), std::sqrt(sq_decoded / sq)};
}

}  // namespace

WeightPlace OriginalComparison::first_failure() const {
  if (near_ties_accepted() || !first_near_tie.found()) return first_broken;
  if (!first_broken.found()) return first_near_tie;
  const bool broken_first =
      first_broken.row < first_near_tie.row ||
      (first_broken.row == first_near_tie.row && first_broken.col <= first_near_tie.col);
  return broken_first ? first_broken : first_near_tie;
}

double OriginalComparison::sqnr_db() const {
  if (sum_sq_error == 0) return std::numeric_limits<double>::infinity();
  return 10.0 * std::log10(sum_sq / sum_sq_error);
}

double OriginalComparison::relative_l2() const {
  return sum_sq_error == 0 ? 0 : std::sqrt(sum_sq_error / sum_sq);
}

double OriginalComparison::cosine() const {
  if (sum_sq == 0 && sum_sq_decoded == 0) return 1;
  return sum_dot / std::sqrt(sum_sq * sum_sq_decoded);
}

void OriginalComparison::add_sums(const OriginalComparison& other) {
  weights += other.weights;
  sum_sq += other.sum_sq;
  sum_sq_decoded += other.sum_sq_decoded;
  sum_dot += other.sum_dot;
  sum_sq_error += other.sum_sq_error;
  saturated += other.saturated;
  clipped_blocks += other.clipped_blocks;
  zeroed_blocks += other.zeroed_blocks;
  broken += other.broken;
  near_ties += other.near_ties;
}

OriginalComparison compare_with_original(const Nvfp4View& view, const OriginalRows& original,
                                         Executor& executor) {
  const int64_t ranges = (view.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  std::vector<OriginalComparison> parts(static_cast<size_t>(ranges));
  executor.parallel_for(ranges, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> w(static_cast<size_t>(view.cols));
    for (int64_t range = begin; range < end; ++range) {
      OriginalComparison& part = parts[static_cast<size_t>(range)];
      for (int64_t r = range * kRowsAtOnce; r < std::min(view.rows, (range + 1) * kRowsAtOnce);
           ++r) {
        original(r, w.data());
        for (int64_t b = 0; b < view.cols / kBlockElems; ++b) {
          judge_block(
              {w.data() + b * kBlockElems, view.row_codes(r) + b * kBlockElems / 2,
               view.row_scales(r)[b], static_cast<double>(view.tensor_scale), r, b * kBlockElems},
              part);
        }
      }
    }
  });
  OriginalComparison all;
  for (const OriginalComparison& part : parts) {
    all.add_sums(part);
    if (part.max_abs > all.max_abs) {
      all.max_abs = part.max_abs;
      all.max_row = part.max_row;
      all.max_col = part.max_col;
    }
    if (!all.first_broken.found()) all.first_broken = part.first_broken;
    if (!all.first_near_tie.found()) all.first_near_tie = part.first_near_tie;
  }
  return all;
}

Likeness likeness(const Nvfp4View& decoded, const OriginalRows& original) {
  return likeness_of(decoded, original, false);
}

Likeness likeness_transposed_scales(const Nvfp4View& decoded, const OriginalRows& original) {
  return likeness_of(decoded, original, true);
}

}  // namespace nvfp4_moe::internal
