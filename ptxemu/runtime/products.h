// Sums of a matrix product: a value of A times a vector of values of B, one of each column.
//
// E2M1 values are integers in halves, so a block's sum is an integer in quarters. Other values, and
// all sums over blocks, are doubles, added in the order of k. The result is the same as without
// vectors, bit for bit: E2M1 times UE4M3 is exact in double, and so is every product.
#pragma once

#include <cstdint>

namespace ptxemu {

// The values of E2M1 codes, in halves. A block has at most 32 products of at most 12 * 12 quarters,
// which 16 bits hold.
inline constexpr int16_t kE2m1Halves[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr double kQuarter = 0.25;  // the product of two halves

// One value of each of kColumns columns of B.
template <class V, int kColumns>
struct Columns {
  typedef V Type __attribute__((vector_size(sizeof(V) * kColumns)));
};

// A row of D: for each column the sum over kBlocks blocks of kK / kBlocks products, a block's sum
// times its scales. `unit` is what a product of 1 stands for.
template <int kK, int kBlocks, class V, int kColumns>
inline void row_of_product(const V* a, const double* a_scales,
                           const typename Columns<V, kColumns>::Type* b,
                           const double (*b_scales)[kColumns], double unit, double* sums) {
  for (int column = 0; column < kColumns; ++column) sums[column] = 0;
  for (int block = 0; block < kBlocks; ++block) {
    typename Columns<V, kColumns>::Type part = {};
    for (int k = kK / kBlocks * block; k < kK / kBlocks * (block + 1); ++k) part += a[k] * b[k];
    const double a_scale = unit * a_scales[block];
    for (int column = 0; column < kColumns; ++column)
      sums[column] += static_cast<double>(part[column]) * a_scale * b_scales[block][column];
  }
}

}  // namespace ptxemu
