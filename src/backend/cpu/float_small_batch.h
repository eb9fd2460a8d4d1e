// W4A16 for a small batch of rows, with fp32 multiply-adds. Memory is the limit, and there is no
// time to fold scales into weights.
//
// Included like rows.h, after it. The 8-halves of a block are added in two chains that start from
// 0, in the order k = 0 4 1 5 2 6 3 7; the chains are added, and their sum is scaled into the
// accumulator: |err| <= (K/16 + 16) 2^-24 sum|p|, inside the contract's bound from K = 64 on.
// Larger batches add in another order.

// acc (kCount, kPanels * 16) = or += the chunks [first, end) of the strip times x[i][0 .. 64 (end -
// first)).
template <int kPanels, int kCount>
void float_small_batch(const Strip& strip, int64_t first, int64_t end, const float* const* x,
                       float* acc) {
  F sum[kPanels][kCount];
  for (int p = 0; p < kPanels; ++p)
    for (int i = 0; i < kCount; ++i)
      sum[p][i] = first == 0 ? splat(0.0f) : load(acc + (i * kPanels + p) * kPanelRows);
  for (int64_t c = first; c < end; ++c) {
    for (int p = 0; p < kPanels; ++p) prefetch_ahead(strip, p, c);
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const int64_t k = (c - first) * kChunkK + b * kBlockElems;
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const uint8_t* chunk = strip.bytes + (p * strip.chunks + c) * kChunkBytes;
        F chain[2][kCount];
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          for (int i = 0; i < kCount; ++i) chain[half][i] = splat(0.0f);
#pragma GCC unroll 4
          for (int j = 0; j < 4;
               ++j) {  // byte j of a lane holds k = j and 4 + j; loading from there puts it first
            const I codes = load_lanes(chunk + b * kBlockCodesBytes + half * 64 + j);
            const F low = e2m1(codes), high = e2m1(shift_right<4>(codes));
#pragma GCC unroll 4
            for (int i = 0; i < kCount; ++i) {
              chain[half][i] = multiply_add(low, splat(x[i][k + half * 8 + j]), chain[half][i]);
              chain[half][i] =
                  multiply_add(high, splat(x[i][k + half * 8 + 4 + j]), chain[half][i]);
            }
          }
        }
        const F scale = e4m3_values(load_bytes(chunk + kChunkScalesOffset + b * kPanelRows));
        for (int i = 0; i < kCount; ++i)
          sum[p][i] = fma(chain[0][i] + chain[1][i], scale, sum[p][i]);
      }
    }
  }
  for (int p = 0; p < kPanels; ++p)
    for (int i = 0; i < kCount; ++i) store(acc + (i * kPanels + p) * kPanelRows, sum[p][i]);
}

inline constexpr int64_t kFloatSmallBatchRows = 4;

// count <= kFloatSmallBatchRows.
inline void multiply_floats_small_batch(const Strip& strip, int64_t first, int64_t end,
                                        const float* const* x, int64_t count, float* acc) {
  switch (count + (strip.panels - 1) * kFloatSmallBatchRows) {
    case 1: return float_small_batch<1, 1>(strip, first, end, x, acc);
    case 2: return float_small_batch<1, 2>(strip, first, end, x, acc);
    case 3: return float_small_batch<1, 3>(strip, first, end, x, acc);
    case 4: return float_small_batch<1, 4>(strip, first, end, x, acc);
    case 5: return float_small_batch<2, 1>(strip, first, end, x, acc);
    case 6: return float_small_batch<2, 2>(strip, first, end, x, acc);
    case 7: return float_small_batch<2, 3>(strip, first, end, x, acc);
    default: return float_small_batch<2, 4>(strip, first, end, x, acc);
  }
}
