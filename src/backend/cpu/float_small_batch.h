// W4A16 for a small batch of rows, with fp32 multiply-adds. Memory is the limit, and there is no
// time to fold scales into weights.
//
// Included like rows.h, after it and float_block.h, which defines the order of additions within a
// block. Its sum is scaled into the accumulator: |err| <= (K/16 + 16) 2^-24 sum|p|, inside the
// contract's bound from K = 64 on. Larger batches add in another order.

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
        add_block(chunk + b * kBlockCodesBytes, chunk + kChunkScalesOffset + b * kPanelRows, x, k,
                  sum[p]);
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
