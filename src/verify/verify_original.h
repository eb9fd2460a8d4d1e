// Compares decoded weights with the originals that they were quantized from: the half-step
// criterion, and the likely fault of a broken tensor.
//
// Notation: w an original weight, c its code, g(c) the E2M1 value, v the block scale's value, s the
// tensor scale, u = v s, q = w / u, A the block's largest |w|. Every correctly rounded quantizer
// guarantees the following for every scale:
//
//   1  |q| is in the rounding interval of |g(c)| - between the midpoints to its neighbours, ends
//      included, since ties may go either way - and has c's sign unless g(c) = 0: the decoded
//      weight is within half a step of the block's grid.
//   2  Codes +-6 have no upper neighbour: |q| > 6 is a saturation. It is explained
//      a) by the scale's rounding: v is A/(6s) rounded to E4M3, up or down to a neighbour, so
//         A/(6s) < up(v), the next E4M3 value, hence |w| <= 6 s up(v). Holds for `max` (nearest)
//         and for a search among both neighbours of A/6. At the top (v = 448, no next value)
//         |w| <= 2688 s, which s >= amax/2688 guarantees.
//      b) or by a search that accepts clipping (mse, 4/6 and wider sweeps choose the scale by the
//         block's squared error): then the block's squared error is not above that under the scale
//         of `max`, v' = E4M3(A/(6s)) with nearest codes.
//      Otherwise the scale is wrong. (A scale that is too large saturates nothing, but then the
//      codes break 1.)
//   3  v = 0 is correct only if A/(6s) rounds to 0: A <= 6 s 2^-10. Producers that clamp v upwards
//      (ModelOpt 2^-9, torchao 2^-6) or write a filler (compressed-tensors 0.125) satisfy 1.
//
// Slack: producers compute q in fp32 with at most six roundings of 2^-24 each (scale/G, 1/G, the
// product or quotient, and the tensor scale's own rounding or reciprocal), so the ends of 1 to 3
// move outwards by a factor of 1 + 2^-21.
//
// Producers that divide in bf16 (scale and quotient rounded to 8 bits, together 2^-8 of q) put
// weights that close to a midpoint on the wrong side of it. Such near ties (within 1 + 2^-7) are
// counted separately. They are accepted only in large numbers, more than 1 in 4096 of a tensor's
// weights: bf16 division leaves hundreds, a damaged code leaves one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/executor.h"
#include "core/nvfp4_view.h"

namespace nvfp4_moe::internal {

// Reads row r of the original, (cols) floats. Called from several threads.
using OriginalRows = std::function<void(int64_t row, float* out)>;

struct WeightPlace {
  int64_t row = -1;
  int64_t col = -1;
  std::string expected;  // "|w/u| in [1.25, 1.75]"
  std::string actual;
  bool found() const { return row >= 0; }
};

struct OriginalComparison {
  uint64_t weights = 0;
  double sum_sq = 0;  // of originals
  double sum_sq_decoded = 0;
  double sum_dot = 0;
  double sum_sq_error = 0;
  double max_abs = 0;  // largest |decoded - original|
  int64_t max_row = -1, max_col = -1;
  uint64_t saturated = 0;
  uint64_t clipped_blocks = 0;
  uint64_t zeroed_blocks = 0;
  uint64_t broken = 0;  // outside their interval by more than a near tie, or under a wrong scale
  uint64_t near_ties = 0;
  WeightPlace first_broken;  // in row-major order
  WeightPlace first_near_tie;

  bool near_ties_accepted() const { return near_ties * 4096 > weights; }
  // Weights that fail the criterion, and the first of them.
  uint64_t failures() const { return broken + (near_ties_accepted() ? 0 : near_ties); }
  WeightPlace first_failure() const;

  double sqnr_db() const;      // +inf if nothing was lost
  double relative_l2() const;  // sqrt(sum_sq_error / sum_sq)
  double cosine() const;
  // Adds sums and counts. Places and maxima do not change.
  void add_sums(const OriginalComparison& other);
};
OriginalComparison compare_with_original(const Nvfp4View& decoded, const OriginalRows& original,
                                         Executor& executor);

// cos between decoded and original over the first rows (64 at most). Hints are based on it.
struct Likeness {
  double cosine = 0;
  double norm_ratio = 0;  // ||decoded|| / ||original||
};
Likeness likeness(const Nvfp4View& decoded, const OriginalRows& original);
// The same with the block scales read as if they were transposed: (cols/16, rows) over the same
// bytes. decoded.scales must be contiguous.
Likeness likeness_transposed_scales(const Nvfp4View& decoded, const OriginalRows& original);

}  // namespace nvfp4_moe::internal
