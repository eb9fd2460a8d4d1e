// W4A16 and fp8 with fp32 multiply-adds: a slice of a panel, decoded to floats with the block
// scales folded in, times tiles of rows.
//
// Included like rows.h, after it and float_small_batch.h. e2m1 * e4m3 * bf16 has 14 significant
// bits: the products are exact, and only the additions round. Within a slice of float_slice(K)
// elements the 8-halves of the blocks are added in two chains, then the chains, then the slices. So
// |err| <= (slice/2 + K/slice + 1) 2^-24 sum|p| <= (K/4 + 3) 2^-24 sum|p|, inside the contract's
// bound for every K, and independent of other rows. A small batch uses another order
// (float_small_batch.h) unless OperandRows::same_bits. fp8: weights are rounded to E4M3 with their
// scale when they are decoded, a product has 8 significant bits, and any number of rows uses this
// order.

constexpr int64_t kFloatChunkBytes = kChunkK * static_cast<int64_t>(sizeof(float));

// Converts a row to its operands: fp32 elements in order.
void fp32_operands(const uint16_t* bf16, int64_t k, std::byte* out) {
  float* values = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < k; i += kLanes) store(values + i, load_bf16(bf16 + i));
  std::fill(values + k, values + chunks_of(k) * kChunkK, 0.0f);
}

// The same for E4M3 bytes.
void fp32_operands_of_fp8(const uint8_t* codes, int64_t k, std::byte* out) {
  float* values = reinterpret_cast<float*>(out);
  for (int64_t i = 0; i < k; i += kLanes) store(values + i, fp8_values(codes + i));
  std::fill(values + k, values + chunks_of(k) * kChunkK, 0.0f);
}

// 16 rows x slice floats, in L1 together with the rows' operands.
struct alignas(64) FloatSlice {
  float weights[kMostSlice][kPanelRows];
};

// Decodes blocks [first, end) of a panel. fp8_shift: of its matrix, only under fp8.
template <bool kFp8>
void decode_slice(const uint8_t* panel, int64_t first, int64_t end, int fp8_shift,
                  FloatSlice& slice) {
  const I least = least_normal(fp8_shift);
  float* out = slice.weights[0];
  for (int64_t b = first; b < end; ++b, out += kBlockElems * kPanelRows) {
    const uint8_t* chunk = panel + b / kBlocksPerChunk * kChunkBytes;
    decode_block(
        chunk + b % kBlocksPerChunk * kBlockCodesBytes,
        chunk + kChunkScalesOffset + b % kBlocksPerChunk * kPanelRows,
        [&](F exact) { return kFp8 ? round_to_e4m3(exact, least) : exact; }, out);
  }
}

// acc[i][0..15] += slice x rows[i][begin, begin + elems) for kCount rows.
template <int kCount>
void float_tile(const FloatSlice& slice, const std::byte* const* rows, int64_t begin, int64_t elems,
                float* acc, int64_t acc_stride) {
  const float* x[kCount];
  F chain[2][kCount];
  for (int i = 0; i < kCount; ++i) {
    x[i] = reinterpret_cast<const float*>(rows[i]) + begin;
    chain[0][i] = splat(0.0f);
    chain[1][i] = splat(0.0f);
  }
  for (int64_t k = 0; k < elems; k += 16) {
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) {
      const int j = kAlternateHalves ? n / 2 + n % 2 * 8 : n;
      const F w = load(slice.weights[k + j]);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i)
        chain[j / 8][i] = multiply_add(w, splat(x[i][k + j]), chain[j / 8][i]);
    }
  }
  for (int i = 0; i < kCount; ++i)
    store(acc + i * acc_stride, load(acc + i * acc_stride) + (chain[0][i] + chain[1][i]));
}

// Tiles of kMost rows, then one of the rows that are left.
template <int kMost = kFloatTileRows>
void float_tiles(const FloatSlice& slice, const std::byte* const* rows, int64_t count,
                 int64_t begin, int64_t elems, float* acc, int64_t acc_stride) {
  int64_t i = 0;
  for (; i + kMost <= count; i += kMost)
    float_tile<kMost>(slice, rows + i, begin, elems, acc + i * acc_stride, acc_stride);
  if constexpr (kMost > 1)
    if (i < count)
      float_tiles<kMost - 1>(slice, rows + i, count - i, begin, elems, acc + i * acc_stride,
                             acc_stride);
}

template <bool kFp8>
void multiply_floats(const Strip& strip, const OperandRows& all, float* acc) {
  const std::byte* const* rows = all.rows;
  if (!kFp8 && all.count <= kFloatSmallBatchRows && !all.same_bits && all.k >= kChunkK) {
    const float* x[kFloatSmallBatchRows];
    for (int64_t i = 0; i < all.count; ++i) x[i] = reinterpret_cast<const float*>(rows[i]);
    return multiply_floats_small_batch(strip, 0, strip.chunks, x, all.count, acc);
  }
  const int64_t acc_stride = strip.panels * kPanelRows, count = all.count;
  const int64_t blocks = all.k / kBlockElems, step = float_slice(all.k) / kBlockElems;
  std::fill(acc, acc + count * acc_stride, 0.0f);
  FloatSlice slice;
  for (int64_t p = 0; p < strip.panels; ++p) {
    for (int64_t first = 0; first < blocks; first += step) {
      const int64_t end = std::min(first + step, blocks), begin = first * kBlockElems,
                    elems = (end - first) * kBlockElems;
      decode_slice<kFp8>(strip.bytes + p * strip.chunks * kChunkBytes, first, end,
                         strip.fp8_shift[static_cast<size_t>(p)], slice);
      float_tiles(slice, rows, count, begin, elems, acc + p * kPanelRows, acc_stride);
    }
  }
}

void multiply_fp32(const Strip& strip, const OperandRows& rows, float* acc) {
  multiply_floats<false>(strip, rows, acc);
}
void multiply_fp8(const Strip& strip, const OperandRows& rows, float* acc) {
  multiply_floats<true>(strip, rows, acc);
}
