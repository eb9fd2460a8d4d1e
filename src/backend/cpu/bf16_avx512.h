// Weights as bf16 with their block scales folded in, and rows of bf16, for instructions that
// multiply pairs of bf16.
//
// Included in the unnamed namespace of nvfp4_moe::internal::cpu, inside a target region, after
// int8_avx512.h. `e2m1 * e4m3` has 6 significant bits, so bf16 holds it exactly. Decoding takes
// four instructions for 32 weights, all on 16-bit integers. In a 32-bit lane the codes appear in
// the order k = 0 2 4 6 1 3 5 7 (of 8), two at a time, so the rows' elements are stored in that
// order.

// 32-bit pairs per block of a row, and vectors per block of a panel
constexpr int64_t kBlockPairs = kBlockElems / 2;
constexpr int64_t kBf16ChunkBytes = kChunkK * static_cast<int64_t>(sizeof(uint16_t));

void bf16_operands(const uint16_t* bf16, int64_t k, std::byte* out) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  uint16_t* values = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < k; i += 8) {
    const __m128i vec8 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bf16 + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm_shuffle_epi8(vec8, order));
  }
  std::fill(values + k, values + chunks_of(k) * kChunkK, uint16_t{0});
}
// The same for E4M3 bytes, which bf16 holds exactly.
void bf16_operands_of_fp8(const uint8_t* codes, int64_t k, std::byte* out) {
  alignas(64) uint16_t chunk[kChunkK];
  for (int64_t i = 0; i < k; i += kChunkK) {
    const int64_t count = std::min(kChunkK, k - i);
    for (int64_t j = 0; j < count; j += kLanes)
      store_u16(chunk + j, shift_right<16>(bits(fp8_values(codes + i + j))));
    bf16_operands(chunk, count, out + i * static_cast<int64_t>(sizeof(uint16_t)));
  }
}

// ---- decoding: bits(e2m1 * s) = base - (table[code] & mask), saturating at 0
//
// base = bits(-4 * 1.5 s): the largest magnitude, negative, and so the largest of all as an
// unsigned number. The table subtracts the sign (2^15), and one exponent (2^7) for every power of
// two below 4. If the code's significand is 1 and not 1.5, its low seven bits are ones, and mask
// reduces them to bits(1.5 s) - bits(s), which fits into seven bits for every 4-bit significand.
// Code 0 subtracts more than base, which saturates at 0. base is 0 if s is.
alignas(64) constexpr uint16_t kTakeAway[32] = {
    0xFFFF, 0x81FF, 0x817F, 0x8100, 0x80FF, 0x8080, 0x807F, 0x8000, 0xFFFF, 0x01FF, 0x017F,
    0x0100, 0x00FF, 0x0080, 0x007F, 0x0000, 0xFFFF, 0x81FF, 0x817F, 0x8100, 0x80FF, 0x8080,
    0x807F, 0x8000, 0xFFFF, 0x01FF, 0x017F, 0x0100, 0x00FF, 0x0080, 0x007F, 0x0000};

// Both come from the scale's E4M3 byte, as words: bits(s) = 16 byte + bits(2^-7) if s is normal,
// and bits(1.5 s) - bits(s) depends only on its significand. Bytes below 8 (subnormal scales and 0)
// use the table.
constexpr uint16_t kScaleBits = 0x3C00,
                   kTopBits = 0x8100;  // 2^-7; the sign and the 4 of -4 * 1.5 s
struct ScaleTables {
  alignas(64) uint16_t step[32], small_step[32], small_base[32];

  constexpr ScaleTables() : step(), small_step(), small_base() {
    // for significand (8 + m) / 8
    constexpr uint16_t kOneAndHalf[8] = {64, 72, 80, 84, 80, 76, 72, 68};
    for (int i = 0; i < 32; ++i) step[i] = kOneAndHalf[i % 8];
    for (int m = 1; m < 8; ++m) {
      const float s = static_cast<float>(m) * 0x1p-9f;
      const uint32_t one = std::bit_cast<uint32_t>(s) >> 16,
                     more = std::bit_cast<uint32_t>(1.5f * s) >> 16;
      small_step[m] = static_cast<uint16_t>(more - one);
      small_base[m] = static_cast<uint16_t>(more + kTopBits);
    }
  }
};
constexpr ScaleTables kScaleTables;

// fp8: bits(c) - bits(s), with c = 1.5 s rounded to four significant bits, ties to even. With it
// the same lookup gives every weight rounded to E4M3, as long as no weight is subnormal there:
// codes with significand 1 are powers of two times s.
alignas(64) constexpr uint16_t kRoundedStep[32] = {64, 80, 80, 80, 80, 80, 64, 64, 64, 80, 80,
                                                   80, 80, 80, 64, 64, 64, 80, 80, 80, 80, 80,
                                                   64, 64, 64, 80, 80, 80, 80, 80, 64, 64};
// The smallest block scale byte of a matrix for which every weight is normal in E4M3, 0.5 s >=
// 2^(shift - 6). Only normal scales, since the lookup needs those.
constexpr uint8_t least_fast_scale(int shift) {
  return static_cast<uint8_t>(shift < -1 ? 8 : (shift + 2) * 8);
}

// Byte r of 16, as a word, twice: byte 63 of the 16 is 0.
alignas(64) constexpr uint8_t kTwice[64] = {
    0,  63, 0,  63, 1,  63, 1,  63, 2,  63, 2,  63, 3,  63, 3,  63, 4,  63, 4,  63, 5,  63,
    5,  63, 6,  63, 6,  63, 7,  63, 7,  63, 8,  63, 8,  63, 9,  63, 9,  63, 10, 63, 10, 63,
    11, 63, 11, 63, 12, 63, 12, 63, 13, 63, 13, 63, 14, 63, 14, 63, 15, 63, 15, 63};

// Keeps constants in registers; the compiler would rather recompute known values for every block.
inline __m512i keep(__m512i x) {
  asm("" : "+v"(x));
  return x;
}
struct DecodeConstants {
  __m512i take_away, step, bits, exponents, twice;
  // multiplying and taking the high half is a shift by 4 that two ports can execute, not one
  __m512i sixteenth;

  explicit DecodeConstants(bool fp8)
      : take_away(keep(_mm512_load_si512(kTakeAway))),
        step(keep(_mm512_load_si512(fp8 ? kRoundedStep : kScaleTables.step))),
        bits(keep(_mm512_set1_epi16(static_cast<int16_t>(kScaleBits + kTopBits)))),
        exponents(keep(_mm512_set1_epi16(static_cast<int16_t>(0xFF80)))),
        twice(keep(_mm512_load_si512(kTwice))),
        sixteenth(keep(_mm512_set1_epi16(1 << 12))) {}
};

struct BlockScale {
  __m512i base, mask;
};
// Computes the scale of a block's 16 bytes. kSmall: some may be below 8.
template <bool kSmall>
inline BlockScale block_scale(const uint8_t* bytes, const DecodeConstants& constants) {
  const __m512i words = _mm512_permutexvar_epi8(
      constants.twice,
      _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  __m512i step = _mm512_permutexvar_epi16(words, constants.step);
  __m512i base =
      _mm512_add_epi16(_mm512_add_epi16(_mm512_slli_epi16(words, 4), step), constants.bits);
  if constexpr (kSmall) {
    const __mmask32 small = _mm512_cmplt_epu16_mask(words, _mm512_set1_epi16(8));
    step = _mm512_mask_permutexvar_epi16(step, small, words,
                                         _mm512_load_si512(kScaleTables.small_step));
    base = _mm512_mask_permutexvar_epi16(base, small, words,
                                         _mm512_load_si512(kScaleTables.small_base));
  }
  return {base, _mm512_or_si512(step, constants.exponents)};
}
inline __m512bh weights(__m512i codes, const BlockScale& scale, __m512i table) {
  const __m512i take = _mm512_and_si512(_mm512_permutexvar_epi16(codes, table), scale.mask);
  return (__m512bh)_mm512_subs_epu16(scale.base, take);
}
// Eight vectors of one block's weights, in the order of a row's pairs, kPanels vectors apart.
template <int kPanels, bool kSmall>
inline void decode_block(const uint8_t* chunk, int64_t in_chunk, const DecodeConstants& constants,
                         __m512bh* out) {
  const BlockScale scale =
      block_scale<kSmall>(chunk + kChunkScalesOffset + in_chunk * kPanelRows, constants);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, out += 4 * kPanels) {
    const uint8_t* bytes = chunk + in_chunk * kBlockCodesBytes + half * 64;
    const __m512i codes = _mm512_loadu_si512(bytes),
                  later = _mm512_loadu_si512(bytes + 1);  // a shift by 8 at no cost
    out[0 * kPanels] = weights(codes, scale, constants.take_away);
    out[1 * kPanels] =
        weights(_mm512_mulhi_epu16(codes, constants.sixteenth), scale, constants.take_away);
    out[2 * kPanels] = weights(later, scale, constants.take_away);
    out[3 * kPanels] =
        weights(_mm512_mulhi_epu16(later, constants.sixteenth), scale, constants.take_away);
  }
}

// The same under fp8 for any scales, in fp32 arithmetic.
template <int kPanels>
inline void decode_block_rounded(const uint8_t* chunk, int64_t in_chunk, int shift, __m512bh* out) {
  const F scale = e4m3_values(load_bytes(chunk + kChunkScalesOffset + in_chunk * kPanelRows));
  const I least = least_normal(shift);
  const auto weight = [&](I code) { return bits(round_to_e4m3(e2m1(code) * scale, least)); };
  for (int half = 0; half < 2; ++half) {
    I codes = load_lanes(chunk + in_chunk * kBlockCodesBytes + half * 64);
    for (int pair = 0; pair < 4; ++pair, out += kPanels, codes = shift_right<4>(codes)) {
      const I low = shift_right<16>(weight(codes)), high = weight(shift_right<16>(codes));
      *out = (__m512bh)((high & splat(static_cast<int32_t>(0xFFFF0000))) | low).v;
    }
  }
}

// Decodes a strip's blocks in order, all panels of a block at a time: (pairs, panels) vectors.
template <int kPanels, bool kFp8 = false>
struct Decoder {
  const Strip& strip;
  const DecodeConstants constants{kFp8};
  const uint8_t* chunk[kPanels];
  // Whether the chunk has scales that the lookup cannot handle: 0 and subnormal ones, and under fp8
  // small ones.
  bool small[kPanels];
  int64_t next = 0;  // index of the next block

  explicit Decoder(const Strip& all) : strip(all) {}

  // Always inlined: a call in the loop of the tiles takes 15 % of its time.
  [[gnu::always_inline]] void decode_next(__m512bh* out) {
    const int64_t c = next / kBlocksPerChunk, in_chunk = next % kBlocksPerChunk;
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const int shift = strip.fp8_shift[static_cast<size_t>(p)];
      if (in_chunk == 0) {
        prefetch_ahead(strip, p, c);
        chunk[p] = strip.bytes + (p * strip.chunks + c) * kChunkBytes;
        const uint8_t least = kFp8 ? least_fast_scale(shift) : 8;
        small[p] = _mm512_cmplt_epu8_mask(_mm512_loadu_si512(chunk[p] + kChunkScalesOffset),
                                          _mm512_set1_epi8(static_cast<char>(least))) != 0;
      }
      if (!small[p])
        decode_block<kPanels, false>(chunk[p], in_chunk, constants, out + p);
      else if constexpr (kFp8)
        decode_block_rounded<kPanels>(chunk[p], in_chunk, shift, out + p);
      else
        decode_block<kPanels, true>(chunk[p], in_chunk, constants, out + p);
    }
    ++next;
  }
};
