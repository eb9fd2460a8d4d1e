// Functions on rows of elements, 16 at a time, shared by all instruction sets: conversions,
// quantization, SwiGLU, combine.
//
// Each instruction set's file includes it once, in its unnamed namespace after one of the
// vector_*.h, which define the operations used here; so it is compiled for that instruction set.
// All operations are IEEE operations in a fixed order, so every instruction set gives the same
// bits.

inline constexpr int kLanes = 16;

inline F load16(const void* x, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return load(static_cast<const float*>(x) + index);
  const uint16_t* halves = static_cast<const uint16_t*>(x) + index;
  return dtype == DType::kBf16 ? load_bf16(halves) : load_fp16(halves);
}

// To nearest, ties to even; NaN stays NaN.
inline void store_bf16(uint16_t* p, F a) {
  const I all = bits(a);
  const I rounded = shift_right<16>(all + splat(0x7FFF) + (shift_right<16>(all) & splat(1)));
  const I quiet = shift_right<16>(all) | splat(0x40);
  store_u16(p, select((all & splat(0x7FFFFFFF)) > splat(0x7F800000), quiet, rounded));
}
inline void store16(void* out, DType dtype, int64_t index, F a) {
  if (dtype == DType::kF32) return store(static_cast<float*>(out) + index, a);
  uint16_t* halves = static_cast<uint16_t*>(out) + index;
  if (dtype == DType::kBf16) return store_bf16(halves, a);
  store_fp16(halves, a);
}

inline I magnitude_bits(F a) { return bits(a) & splat(0x7FFFFFFF); }

float row_amax(const void* x, DType dtype, int64_t k) {
  I largest = splat(0);
  for (int64_t i = 0; i < k; i += kLanes)
    largest = max(largest, magnitude_bits(load16(x, dtype, i)));
  return std::bit_cast<float>(max_lane(largest));  // finite < Inf < NaN as bits
}

void row_to_bf16(const void* x, DType dtype, int64_t k, uint16_t* out) {
  for (int64_t i = 0; i < k; i += kLanes) store_bf16(out + i, load16(x, dtype, i));
}

// The product of two bf16 or fp16 numbers is exact in fp32, so storing it is its only rounding.
void scale_hidden_row(const void* x, DType dtype, int64_t k, float weight, void* out) {
  for (int64_t i = 0; i < k; i += kLanes)
    store16(out, dtype, i, load16(x, dtype, i) * splat(weight));
}

// ---- E4M3 of 16 block scales at once (core/float_formats.h has the steps)

// E4M3 bytes of floats >= 0, to nearest even, saturating at 448.
inline I e4m3_bytes(F a) {
  const I all = bits(a);
  const I normal =
      shift_right<20>(all + splat(0x7FFFF) + (shift_right<20>(all) & splat(1))) - splat(120 << 3);
  const I subnormal = bits(a * splat(0x1p9f) + splat(0x1p23f)) -
                      splat(0x4B000000);  // below 2^-6: multiples of 2^-9
  const I byte = select(splat(0x3C800000) > all, subnormal, normal);
  return select(all > splat(0x43DFFFFF), splat(0x7E), byte);
}
inline F e4m3_values(I bytes) {
  const F normal = from_bits(shift_left<20>(bytes) + splat(120 << 23));
  return select(splat(8) > bytes, to_float(bytes) * splat(0x1p-9f), normal);
}

// The E4M3 number nearest to a / 2^shift, ties to even, times 2^shift, for |a| < 448 2^shift.
// least: bits of 2^(shift - 6), the smallest normal number times 2^shift. Adding 1.5 2^20 times a's
// power of two (or times `least`'s if a is smaller) leaves only the bits of a that E4M3 has: three
// bits below its first, or multiples of 2^(shift - 9).
inline F round_to_e4m3(F a, I least) {
  const I exponent = max(bits(a) & splat(0x7F800000), least);
  const F large = from_bits(exponent + splat((20 << 23) + (1 << 22)));
  return (a + large) - large;
}
inline I least_normal(int shift) { return splat((127 - 6 + shift) << 23); }

// ---- quantization (core/quantize.h has the formulas): 16 blocks' scales, then their codes

// Codes of one block under the divisor (exact mode) or factor (vllm_order) of its scale.
inline void block_codes(F x, bool vllm_order, float inverse, float v, uint8_t* codes) {
  const F q = vllm_order ? x * splat(v) : (x * splat(inverse)) / splat(v);
  const F a = from_bits(magnitude_bits(q));
  I code = shift_right<28>(bits(q)) & splat(8);
  code = plus_one(a > splat(0.25f), code);
  code = plus_one(a >= splat(0.75f), code);
  code = plus_one(a > splat(1.25f), code);
  code = plus_one(a >= splat(1.75f), code);
  code = plus_one(a > splat(2.5f), code);
  code = plus_one(a >= splat(3.5f), code);
  code = plus_one(a > splat(5.0f), code);
  store_codes(codes, code);
}

RowCounts quantize_row(const QuantizeRow& row) {
  constexpr float kSixth = 1.0f / 6.0f;
  const bool vllm_order = row.vllm_order;
  const float inverse = 1.0f / row.scale;       // vllm_order: the global scale
  const float inverse_global = 1.0f / inverse;  // vllm_order only
  const int64_t blocks = row.k / kBlockElems;
  RowCounts counts{.blocks = static_cast<uint64_t>(blocks), .row_scale = row.scale};
  for (int64_t first = 0; first < blocks; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, blocks - first);
    int32_t amax_bits[kLanes] = {};
    for (int64_t b = 0; b < count; ++b)
      amax_bits[b] = max_lane(magnitude_bits(load16(row.x, row.dtype, (first + b) * kBlockElems)));
    const F amax = from_bits(load(amax_bits));
    const F scale = vllm_order ? splat(inverse) * (amax * splat(kSixth))
                               : (amax * splat(inverse)) * splat(kSixth);
    const I bytes = e4m3_bytes(scale);
    const F v = e4m3_values(bytes);
    const uint32_t zero = ~lanes_of(bytes > splat(0)) & ((1u << count) - 1u);
    counts.saturated += static_cast<uint64_t>(std::popcount(lanes_of(scale > splat(448.0f))));
    counts.zeroed += static_cast<uint64_t>(std::popcount(lanes_of(amax > splat(0.0f)) & zero));

    uint8_t block_scales[kLanes];
    float divisors[kLanes];
    store_bytes(block_scales, bytes);
    store(divisors, vllm_order ? splat(1.0f) / (v * splat(inverse_global)) : v);
    std::memcpy(row.block_scales + first, block_scales, static_cast<size_t>(count));
    for (int64_t b = 0; b < count; ++b) {
      uint8_t* codes = row.codes + (first + b) * (kBlockElems / 2);
      if ((zero >> b & 1u) != 0)
        std::memset(codes, 0, kBlockElems / 2);
      else
        block_codes(load16(row.x, row.dtype, (first + b) * kBlockElems), vllm_order, inverse,
                    divisors[b], codes);
    }
  }
  return counts;
}

// int8_block (core/quantize.h has the formula).
RowCounts quantize_row_int8(const void* x, DType dtype, int64_t k, int8_t* codes, float* scales) {
  RowCounts counts{.blocks = static_cast<uint64_t>(k / kBlockElems)};
  for (int64_t i = 0; i < k; i += kBlockElems) {
    const F values = load16(x, dtype, i);
    const auto amax = std::bit_cast<float>(max_lane(magnitude_bits(values)));
    const float scale = std::max(amax / 127.0f, kInt8BlockMinScale);
    // Adding 1.5 2^23 leaves the quotient's nearest integer, ties to even, in the low bits of the
    // sum.
    const I rounded = bits(values / splat(scale) + splat(0x1.8p23f)) - splat(0x4B400000);
    uint8_t bytes[kLanes];
    store_bytes(bytes, rounded & splat(0xFF));
    std::memcpy(codes + i, bytes, kLanes);
    scales[i / kBlockElems] = scale;
    // The largest element has the largest code.
    counts.zeroed += amax > 0 && amax / scale <= 0.5f;
  }
  return counts;
}

// fp8 (docs/explanation/numerics.md has the formula).
RowCounts quantize_row_fp8(const void* x, DType dtype, int64_t k, float scale, uint8_t* codes) {
  RowCounts counts{.blocks = static_cast<uint64_t>(k / kBlockElems), .row_scale = scale};
  const F inverse = splat(1.0f / scale);
  for (int64_t i = 0; i < k; i += kBlockElems) {
    const F values = load16(x, dtype, i), quotient = values * inverse;
    const F magnitude = from_bits(magnitude_bits(quotient));
    const I bytes = e4m3_bytes(magnitude);
    store_bytes(codes + i, bytes | (shift_right<24>(bits(quotient)) & splat(0x80)));
    counts.saturated += lanes_of(magnitude > splat(448.0f)) != 0;
    counts.zeroed +=
        lanes_of(bytes > splat(0)) == 0 && lanes_of(magnitude_bits(values) > splat(0)) != 0;
  }
  return counts;
}
// The values of 16 E4M3 bytes.
inline F fp8_values(const uint8_t* codes) {
  const I bytes = load_bytes(codes);
  return from_bits(bits(e4m3_values(bytes & splat(0x7F))) | shift_left<24>(bytes & splat(0x80)));
}

// ---- SwiGLU

// e^x within 1 ulp for |x| <= 87, overflowing to Inf and underflowing towards 0 beyond; NaN stays
// NaN. x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts; e^r by its series up to r^7 (the
// rest is below 2^-27); 2^n as two factors, since n may exceed the exponents of normal numbers.
inline F exponential(F x) {
  x = select(x > splat(104.0f), splat(104.0f), x);
  x = select(splat(-104.0f) > x, splat(-104.0f), x);
  const F shifted = fma(x, splat(1.44269504f),
                        splat(0x1.8p23f));  // rounds x / ln 2 to the integer n in the low bits
  const F n = shifted - splat(0x1.8p23f);
  F r = fma(n, splat(-0x1.62e4p-1f), x);
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  F p = splat(0x1.a01a02p-13f);  // 1/7!
  p = fma(p, r, splat(0x1.6c16c2p-10f));
  p = fma(p, r, splat(0x1.111112p-7f));
  p = fma(p, r, splat(0x1.555556p-5f));
  p = fma(p, r, splat(0x1.555556p-3f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const I exponent = bits(shifted) - splat(0x4B400000);
  const I half = shift_right_signed<1>(exponent);
  const F first = from_bits(shift_left<23>(half + splat(127)));
  const F second = from_bits(shift_left<23>(exponent - half + splat(127)));
  return (p * first) * second;
}

// x limited from above or, for within, on both sides; NaN stays NaN.
inline F at_most(F x, F limit) { return select(x > limit, limit, x); }
inline F within(F x, F limit) {
  const F least = splat(0.0f) - limit;
  return select(least > x, least, at_most(x, limit));
}
// x sigmoid(s)
inline F times_sigmoid(F x, F s) { return x / (splat(1.0f) + exponential(splat(0.0f) - s)); }
inline F silu(F x) { return times_sigmoid(x, x); }

inline void gate_and_up(const SwigluRows& rows, int64_t i, F& g, F& u) {
  g = load(rows.acc + i * kStripRows) * splat(rows.gate_alpha[i]);
  u = load(rows.acc + i * kStripRows + kPanelRows) * splat(rows.up_alpha[i]);
  if (rows.gate_bias == nullptr) return;
  g = g + load(rows.gate_bias);
  u = u + load(rows.up_bias);
}
// Replaces the lanes of h in the sigmoid's far tail. Rare, so gate and up are recomputed.
inline F with_tail(const MoeOptions& options, const SwigluRows& rows, int64_t i, uint32_t lanes,
                   F h) {
  F g = h, u = h;
  gate_and_up(rows, i, g, u);
  float gate[kLanes], up[kLanes], out[kLanes];
  store(gate, g);
  store(up, u);
  store(out, h);
  swiglu_tail(options, lanes, gate, up, out);
  return load(out);
}

void gelu_or_situ_rows(const MoeOptions& options, const SwigluRows& rows) {
  for (int64_t i = 0; i < rows.count; ++i) {
    F g = splat(0.0f), u = g;
    gate_and_up(rows, i, g, u);
    F h = gelu_or_situ(options, g, u);
    if (rows.weight != nullptr) h = h * splat(rows.weight[i]);
    store_bf16(rows.out + i * rows.stride, h);
  }
}

void swiglu_rows(const MoeOptions& options, const SwigluRows& rows) {
  if (is_gelu_or_situ(options.activation)) return gelu_or_situ_rows(options, rows);
  const F limit = splat(options.swiglu_limit.value_or(0.0f)), one = splat(1.0f),
          alpha = splat(options.swiglu_alpha);
  for (int64_t i = 0; i < rows.count; ++i) {
    F g = one, u = one;
    gate_and_up(rows, i, g, u);
    uint32_t tail = lanes_of(splat(kSigmoidTail) > g);
    F h = g;
    switch (options.activation) {
      case Activation::kSwiglu: h = silu(g) * u; break;
      case Activation::kSwigluClamped: h = silu(at_most(g, limit)) * within(u, limit); break;
      case Activation::kSwigluStep: h = at_most(silu(g), limit) * within(u, limit); break;
      case Activation::kSwigluOai: {
        const F gate = at_most(g, limit), s = alpha * gate;
        tail = lanes_of(splat(kSigmoidTail) > s);
        h = times_sigmoid(gate, s) * (within(u, limit) + one);
        break;
      }
      case Activation::kRelu2: break;  // no gate: see round_rows
      case Activation::kGelu:
      case Activation::kGeluTanh:
      case Activation::kSitu: break;  // above
    }
    if (tail != 0) h = with_tail(options, rows, i, tail, h);
    if (rows.weight != nullptr) h = h * splat(rows.weight[i]);
    store_bf16(rows.out + i * rows.stride, h);
  }
}

// ---- epilogues of gemm2, of the linear and of gemm1 without a gate; combine

// NaN stays NaN; never -0.
inline F relu2(F x) {
  const F positive = select(splat(0.0f) >= x, splat(0.0f), x);
  return positive * positive;
}

void round_rows(const RoundRows& rows) {
  for (int64_t i = 0; i < rows.count; ++i) {
    for (int64_t c = 0; c < rows.channels; c += kLanes) {
      F value = load(rows.acc + i * rows.acc_stride + c) * splat(rows.alpha[i]);
      if (rows.bias != nullptr) value = value + load(rows.bias + c);
      if (rows.relu2) value = relu2(value);
      if (rows.weight != nullptr) value = value * splat(rows.weight[i]);
      if (rows.channels - c >= kLanes) {
        store16(rows.out, rows.dtype, i * rows.stride + c, value);
        continue;
      }
      uint8_t rest[kLanes * sizeof(float)];  // the matrix ends within the panel
      store16(rest, rows.dtype, 0, value);
      const size_t width = rows.dtype == DType::kF32 ? 4 : 2;
      std::memcpy(
          static_cast<uint8_t*>(rows.out) + static_cast<size_t>(i * rows.stride + c) * width, rest,
          static_cast<size_t>(rows.channels - c) * width);
    }
  }
}

// Returns the number of elements of out that are NaN or Inf.
uint64_t combine_tokens(const StepContext& step, int64_t first_token, int64_t end_token) {
  const MoeOptions& options = step.weights.config.options();
  const DType row_dtype = options.row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const int64_t hidden = options.hidden_size, top_k = options.top_k;
  const bool after_down = options.router_weight == RouterWeight::kAfterDown;
  const PartBuffers& shared = step.buffers.shared;
  const auto overflow = static_cast<int32_t>(overflow_bits(step.batch.out_dtype));
  uint64_t nonfinite = 0;
  for (int64_t token = first_token; token < end_token; ++token) {
    const int32_t* rows = step.buffers.row_of_assignment + token * top_k;
    const float* weights = step.batch.topk_weights + token * top_k;
    I largest = splat(0);
    for (int64_t h = 0; h < hidden; h += kLanes) {
      F acc = splat(0.0f);
      for (int64_t k = 0; k < top_k; ++k) {
        if (rows[k] < 0) continue;
        const F row = load16(step.buffers.routed.rows_out, row_dtype, rows[k] * hidden + h);
        acc = after_down ? fma(splat(weights[k]), row, acc) : acc + row;
      }
      if (shared.experts > 0) {
        const F row = load16(shared.rows_out, row_dtype, token * hidden + h);
        const float* weight = step.batch.shared_weights;
        acc = weight == nullptr ? acc + row : fma(splat(weight[token]), row, acc);
      }
      store16(step.batch.out, step.batch.out_dtype, token * hidden + h, acc);
      largest = max(largest, magnitude_bits(acc));
    }
    if (max_lane(largest) < overflow) continue;
    for (int64_t h = 0; h < hidden; h += kLanes) {  // rare: the row is read again
      float values[kLanes];
      store(values, load16(step.batch.out, step.batch.out_dtype, token * hidden + h));
      for (const float value : values)
        nonfinite += (std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu) >= 0x7F800000u;
    }
  }
  return nonfinite;
}

// ---- operands

void nvfp4_operands(const uint8_t* codes, const uint8_t* block_scales, int64_t k, std::byte* row) {
  const int64_t blocks = k / kBlockElems;
  auto* out = reinterpret_cast<Int8Block*>(row);
  for (int64_t b = 0; b < blocks; ++b) {
    int8_block_values(codes + b * (kBlockElems / 2), out[b]);
    out[b].scale = e4m3_to_float(block_scales[b]) * kNvfp4OperandFactor;
  }
  std::fill(out + blocks, out + chunks_of(k) * kBlocksPerChunk, Int8Block{});
}

void int8_operands(const int8_t* codes, const float* scales, int64_t k, std::byte* row) {
  const int64_t blocks = k / kBlockElems;
  auto* out = reinterpret_cast<Int8Block*>(row);
  for (int64_t b = 0; b < blocks; ++b) {
    int32_t sum = 0;
    for (int i = 0; i < kBlockElems; ++i) sum += codes[b * kBlockElems + i];
    std::memcpy(out[b].values, codes + b * kBlockElems, kBlockElems);
    out[b].bias = -12 * sum;
    out[b].scale = scales[b] * kInt8OperandFactor;
  }
  std::fill(out + blocks, out + chunks_of(k) * kBlocksPerChunk, Int8Block{});
}
