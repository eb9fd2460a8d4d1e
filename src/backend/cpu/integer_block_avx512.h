// W4A16 of few rows by vpdpbusd, for "avx512vnni" and "amx": nearly every block is multiplied as
// integers, with the bits of fp32.
//
// Included in the unnamed namespace of nvfp4_moe::internal::cpu, inside a target region, after
// int8_avx512.h, whose functions it uses, and after float_small_batch.h. Blocks that are not
// integers (integer_block.h) are multiplied in fp32.

inline int32_t sum_of(I a) { return _mm512_reduce_add_epi32(a.v); }
inline uint32_t or_of(I a) { return static_cast<uint32_t>(_mm512_reduce_or_epi32(a.v)); }
inline I magnitudes(I a) { return {_mm512_abs_epi32(a.v)}; }
inline I shift_right_signed(I a, int count) {
  return {_mm512_sra_epi32(a.v, _mm_cvtsi32_si128(count))};
}
// The lower or the upper eight lanes added up, whichever is more.
inline int32_t larger_half(I a) {
  const int32_t upper = _mm512_mask_reduce_add_epi32(static_cast<__mmask16>(0xFF00), a.v);
  return std::max(upper, sum_of(a) - upper);
}

#include "backend/cpu/integer_block.h"

// sum[p] + panel p's block times the activations' block, of which it multiplies kBytes bytes.
template <int kBytes, int kPanels>
inline void add_integer_block(const Block (&blocks)[kPanels], const IntegerBlock& x,
                              __m512 (&sum)[kPanels]) {
  __m512i parts[kBytes][kPanels];
#pragma GCC unroll 3
  for (int n = 0; n < kBytes; ++n) {
    for (int p = 0; p < kPanels; ++p)
      parts[n][p] = n == 0 ? _mm512_set1_epi32(x.bias) : _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i four = broadcast4(x.bytes[n] + 4 * j);
      for (int p = 0; p < kPanels; ++p)
        parts[n][p] = _mm512_dpbusd_epi32(parts[n][p], blocks[p].weights[j], four);
    }
  }
  const __m512 step = _mm512_set1_ps(x.step);
  for (int p = 0; p < kPanels; ++p) {
    __m512i total = parts[kBytes - 1][p];
#pragma GCC unroll 2
    for (int n = kBytes - 2; n >= 0; --n)
      total = _mm512_add_epi32(_mm512_slli_epi32(total, 8), parts[n][p]);
    sum[p] =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(blocks[p].scale, step), sum[p]);
  }
}

// Rows with integers after their other operands. floats(row, index, buffer) returns the 16 floats
// of block `index` of a row, in order; it may write them to buffer (16).
template <class Floats>
struct IntegerRows {
  const std::byte* const* rows;  // (count)
  int64_t integers_at;           // byte of a row at which its (chunks * 4) IntegerBlocks begin
  Floats floats;

  const IntegerBlock* blocks(int64_t i) const {
    return reinterpret_cast<const IntegerBlock*>(rows[i] + integers_at);
  }
};
// Clang 14 does not deduce the arguments of an aggregate by itself.
template <class Floats>
IntegerRows(const std::byte* const*, int64_t, Floats) -> IntegerRows<Floats>;

// acc (count, kPanels * 16) + block b of every panel's chunk times block `index` of every row. For
// rows of which at least one has no integers there: few, and not inlined, since fp32 would take the
// registers of the loop that calls this.
template <int kPanels, class Floats>
[[gnu::noinline]] void add_mixed_block(const uint8_t* const (&chunks)[kPanels], int64_t b,
                                       const IntegerRows<Floats>& rows, int64_t count,
                                       int64_t index, float* acc) {
  const __m512i table = doubled_table();
  for (int64_t i = 0; i < count; ++i) {
    const IntegerBlock& x = rows.blocks(i)[index];
    alignas(64) float buffer[kBlockElems];
    const float* const values = x.count == 0 ? rows.floats(rows.rows[i], index, buffer) : nullptr;
    for (int p = 0; p < kPanels; ++p, acc += kPanelRows) {
      if (x.count == 0) {
        F sum[1] = {load(acc)};
        add_block(chunks[p] + b * kBlockCodesBytes, chunks[p] + kChunkScalesOffset + b * kPanelRows,
                  &values, 0, sum);
        store(acc, sum[0]);
      } else {
        const Block block[1] = {decode(chunks[p], b, table)};
        __m512 sum[1] = {_mm512_loadu_ps(acc)};
        add_integer_block<3>(block, x, sum);
        _mm512_storeu_ps(acc, sum[0]);
      }
    }
  }
}

// acc: (kCount, kPanels * 16).
template <int kPanels, int kCount, class Floats>
void multiply_integer_rows(const Strip& strip, const IntegerRows<Floats>& rows, float* acc) {
  const __m512i table = doubled_table();
  const IntegerBlock* blocks[kCount];  // (chunks * 4) each
  for (int i = 0; i < kCount; ++i) blocks[i] = rows.blocks(i);
  __m512 sum[kCount][kPanels];
  for (auto& row : sum)
    for (__m512& panel : row) panel = _mm512_setzero_ps();
  const auto for_accumulators = [&](const auto& body) {
    for (int i = 0; i < kCount; ++i)
      for (int p = 0; p < kPanels; ++p) body(sum[i][p], acc + (i * kPanels + p) * kPanelRows);
  };
  for (int64_t c = 0; c < strip.chunks; ++c) {
    const Chunks<kPanels, kPrefetchInto> chunks(strip, c);
#pragma GCC unroll 1
    for (int64_t b = 0; b < kBlocksPerChunk; ++b) {
      const int64_t index = c * kBlocksPerChunk + b;
      int32_t all = 3, any = 0;  // counts are 0, 2 or 3
      for (int i = 0; i < kCount; ++i) {
        all &= blocks[i][index].count;
        any |= blocks[i][index].count;
      }
      if (all == 0) [[unlikely]] {
        for_accumulators([](__m512 one, float* to) { _mm512_storeu_ps(to, one); });
        add_mixed_block(chunks.bytes, b, rows, kCount, index, acc);
        for_accumulators([](__m512& one, const float* from) { one = _mm512_loadu_ps(from); });
        continue;
      }
      Block weights[kPanels];
      for (int p = 0; p < kPanels; ++p) weights[p] = decode(chunks.bytes[p], b, table);
      if (any == 2) {
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) add_integer_block<2>(weights, blocks[i][index], sum[i]);
      } else {  // the third byte is 0 where two would do
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) add_integer_block<3>(weights, blocks[i][index], sum[i]);
      }
    }
  }
  for_accumulators([](__m512 one, float* to) { _mm512_storeu_ps(to, one); });
}

// acc (count, panels * 16) for up to kMostRows rows, each with the bits of a single row.
template <int kMostRows, int kPanels, int kCount = 1, class Floats>
void multiply_integer_panels(const Strip& strip, const IntegerRows<Floats>& rows, int64_t count,
                             float* acc) {
  if constexpr (kCount < kMostRows)
    if (count > kCount)
      return multiply_integer_panels<kMostRows, kPanels, kCount + 1>(strip, rows, count, acc);
  multiply_integer_rows<kPanels, kCount>(strip, rows, acc);
}
template <int kMostRows, class Floats>
void multiply_integers(const Strip& strip, const IntegerRows<Floats>& rows, int64_t count,
                       float* acc) {
  if (strip.panels == 1) return multiply_integer_panels<kMostRows, 1>(strip, rows, count, acc);
  multiply_integer_panels<kMostRows, 2>(strip, rows, count, acc);
}
