// A block of a panel for the fp32 multiplications: 16 rows x 16 of K.
//
// Included like rows.h, after it. "avx2" includes float_block_avx2.h instead, which has the same
// functions with the same bits.

// float_tile alternates the 8-halves of a block.
[[maybe_unused]] constexpr bool kAlternateHalves = false;

// sum[i] += the block's scale times its sum over E2M1 weights times x[i][k .. k + 16). The 8-halves
// are added in two chains that start from 0, in the order k = 0 4 1 5 2 6 3 7, and then the chains.
template <int kCount>
[[gnu::always_inline]] inline void add_block(const uint8_t* codes, const uint8_t* scales,
                                             const float* const* x, int64_t k, F (&sum)[kCount]) {
  F chain[2][kCount];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < kCount; ++i) chain[half][i] = splat(0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      // byte j of a lane holds k = j and 4 + j; loading from there puts it first
      const I lanes = load_lanes(codes + half * 64 + j);
      const F low = e2m1(lanes), high = e2m1(shift_right<4>(lanes));
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        chain[half][i] = multiply_add(low, splat(x[i][k + half * 8 + j]), chain[half][i]);
        chain[half][i] = multiply_add(high, splat(x[i][k + half * 8 + 4 + j]), chain[half][i]);
      }
    }
  }
  const F scale = e4m3_values(load_bytes(scales));
  for (int i = 0; i < kCount; ++i) sum[i] = fma(chain[0][i] + chain[1][i], scale, sum[i]);
}

// out (16 of K, 16 rows) = weight(E2M1 value times the block's scale).
template <class Weight>
[[gnu::always_inline]] inline void decode_block(const uint8_t* codes, const uint8_t* scales,
                                                const Weight& weight, float* out) {
  const F scale = e4m3_values(load_bytes(scales));
  for (int half = 0; half < 2; ++half) {
    const I lanes = load_lanes(codes + half * 64);
    float* vec8 = out + half * 8 * kPanelRows;  // nibble n of a lane is k = n / 2 + 4 (n % 2)
    store(vec8 + 0 * kPanelRows, weight(e2m1(lanes) * scale));
    store(vec8 + 4 * kPanelRows, weight(e2m1(shift_right<4>(lanes)) * scale));
    store(vec8 + 1 * kPanelRows, weight(e2m1(shift_right<8>(lanes)) * scale));
    store(vec8 + 5 * kPanelRows, weight(e2m1(shift_right<12>(lanes)) * scale));
    store(vec8 + 2 * kPanelRows, weight(e2m1(shift_right<16>(lanes)) * scale));
    store(vec8 + 6 * kPanelRows, weight(e2m1(shift_right<20>(lanes)) * scale));
    store(vec8 + 3 * kPanelRows, weight(e2m1(shift_right<24>(lanes)) * scale));
    store(vec8 + 7 * kPanelRows, weight(e2m1(shift_right<28>(lanes)) * scale));
  }
}
