// 8-bit activations on AVX-512 with vpdpbusd.
//
// Included in the unnamed namespace of nvfp4_moe::internal::cpu, inside a target region.
// kPermuteBytes: the host has vpermb (VBMI), which reads just four bits of an index if the table is
// repeated; vpshufb needs the upper bits cleared. kPrefetchInto: of prefetch.h. A lane is a row
// of the panel.
//
// Weights become u8 = 2w + 12 by a byte shuffle, activations are s8, broadcast four at a time. A
// block of 16 is four vpdpbusd that start at the row's bias, which gives D exactly; three more
// instructions scale and add it. Two panels x two blocks of weights stay decoded in registers while
// all rows of activations pass, so a strip is decoded once for any number of rows. The accumulators
// of a small batch stay in registers, those of a large one are in L1.

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i broadcast4(const void* p) {
  int32_t four = 0;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}

// One block of a panel: u8 weights of k 0-3, 4-7, 8-11, 12-15 of each row, and the rows' block
// scales times 2^-8.
struct Block {
  __m512i weights[4];
  __m512 scale;
};

// 2w + 12 for the low four bits of each byte.
inline __m512i doubled(__m512i codes, __m512i table) {
  if constexpr (kPermuteBytes) return permute_bytes(codes, table);
  return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
}

// 16 block scales times 2^-8: an E4M3 byte shifted by 7 is an fp16 number that much smaller,
// including subnormals.
inline __m512 small_scales(const uint8_t* bytes) {
  const __m256i halves =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  return _mm512_cvtph_ps(_mm256_slli_epi16(halves, 7));
}

inline Block decode(const uint8_t* chunk, int64_t b, __m512i table) {
  const __m512i v0 = load512(chunk + b * kBlockCodesBytes),
                v1 = load512(chunk + b * kBlockCodesBytes + 64);
  Block block;
  block.weights[0] = doubled(v0, table);
  block.weights[1] = doubled(_mm512_srli_epi16(v0, 4), table);
  block.weights[2] = doubled(v1, table);
  block.weights[3] = doubled(_mm512_srli_epi16(v1, 4), table);
  block.scale = small_scales(chunk + kChunkScalesOffset + b * kPanelRows);
  return block;
}

// acc + the activation row's block times kPanels panels' blocks.
template <int kPanels>
inline void add_block(const Block (&blocks)[kPanels], const Int8Block& row,
                      __m512 (&acc)[kPanels]) {
  __m512i sum[kPanels];
  for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_set1_epi32(row.bias);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i four = broadcast4(row.values + 4 * j);
    for (int p = 0; p < kPanels; ++p)
      sum[p] = _mm512_dpbusd_epi32(sum[p], blocks[p].weights[j], four);
  }
  const __m512 scale = _mm512_set1_ps(row.scale);
  for (int p = 0; p < kPanels; ++p)
    acc[p] =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p]), _mm512_mul_ps(blocks[p].scale, scale), acc[p]);
}

inline __m512i doubled_table() {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// Blocks 2 pair and 2 pair + 1 of chunk c, of every panel.
template <int kPanels>
struct BlockPair {
  Block even[kPanels], odd[kPanels];

  BlockPair(const Strip& strip, int64_t c, int pair, __m512i table) {
    for (int p = 0; p < kPanels; ++p) {
      const uint8_t* chunk = strip.bytes + (p * strip.chunks + c) * kChunkBytes;
      even[p] = decode(chunk, 2 * pair, table);
      odd[p] = decode(chunk, 2 * pair + 1, table);
    }
  }
  void add(const Int8Block* row, __m512 (&sum)[kPanels]) const {
    add_block(even, row[0], sum);
    add_block(odd, row[1], sum);
  }
};

template <int kPanels, int kCount>
void multiply_int8_small_batch(const Strip& strip, const std::byte* const* rows, float* acc) {
  const __m512i table = doubled_table();
  __m512 sum[kCount][kPanels];
  for (auto& row : sum)
    for (__m512& panel : row) panel = _mm512_setzero_ps();
  for (int64_t c = 0; c < strip.chunks; ++c) {
    const Chunks<kPanels, kPrefetchInto> chunks(strip, c);
#pragma GCC unroll 1
    for (int b = 0; b < kBlocksPerChunk; ++b) {
      Block blocks[kPanels];
      for (int p = 0; p < kPanels; ++p) blocks[p] = decode(chunks.bytes[p], b, table);
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i)
        add_block(blocks, int8_blocks(rows[i])[c * kBlocksPerChunk + b], sum[i]);
    }
  }
  for (int i = 0; i < kCount; ++i)
    for (int p = 0; p < kPanels; ++p)
      _mm512_storeu_ps(acc + (i * kPanels + p) * kPanelRows, sum[i][p]);
}

// How far ahead a row's operands are prefetched, two or three passes over all rows. There are more
// rows than a core's prefetchers can follow, and they are in L3 if an expert has more rows than L2
// holds.
constexpr int64_t kRowAheadBytes = 128;

template <int kPanels>
void multiply_int8_large_batch(const Strip& strip, const std::byte* const* rows, int64_t count,
                               float* acc) {
  const __m512i table = doubled_table();
  std::fill(acc, acc + count * kPanels * kPanelRows, 0.0f);
  for (int64_t c = 0; c < strip.chunks; ++c) {
    for (int p = 0; p < kPanels; ++p) prefetch_ahead<kPrefetchInto>(strip, p, c);
    for (int pair = 0; pair < 2; ++pair) {
      const BlockPair<kPanels> blocks(strip, c, pair, table);
      for (int64_t i = 0; i < count; ++i) {
        float* out = acc + i * kPanels * kPanelRows;
        __m512 sum[kPanels];
        for (int p = 0; p < kPanels; ++p) sum[p] = _mm512_loadu_ps(out + p * kPanelRows);
        const Int8Block* row = int8_blocks(rows[i]) + c * kBlocksPerChunk + 2 * pair;
        _mm_prefetch(reinterpret_cast<const char*>(row) + kRowAheadBytes, _MM_HINT_T0);
        blocks.add(row, sum);
        for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(out + p * kPanelRows, sum[p]);
      }
    }
  }
}

template <int kPanels>
void multiply_int8_panels(const Strip& strip, const OperandRows& all, float* acc) {
  const std::byte* const* rows = all.rows;
  switch (all.count) {
    case 1: return multiply_int8_small_batch<kPanels, 1>(strip, rows, acc);
    case 2: return multiply_int8_small_batch<kPanels, 2>(strip, rows, acc);
    case 3: return multiply_int8_small_batch<kPanels, 3>(strip, rows, acc);
    case 4: return multiply_int8_small_batch<kPanels, 4>(strip, rows, acc);
    case 5: return multiply_int8_small_batch<kPanels, 5>(strip, rows, acc);
    case 6: return multiply_int8_small_batch<kPanels, 6>(strip, rows, acc);
    case 7: return multiply_int8_small_batch<kPanels, 7>(strip, rows, acc);
    case 8: return multiply_int8_small_batch<kPanels, 8>(strip, rows, acc);
    default: return multiply_int8_large_batch<kPanels>(strip, rows, all.count, acc);
  }
}

void multiply_int8(const Strip& strip, const OperandRows& rows, float* acc) {
  if (strip.panels == 1) return multiply_int8_panels<1>(strip, rows, acc);
  multiply_int8_panels<2>(strip, rows, acc);
}
