// mma.sync. A sum of products is exact in double if the values allow it, and rounded once.
#include "runtime/control.h"
#include "runtime/products.h"

namespace ptxemu {
namespace {

struct ProductLane {
  uint32_t* d;
  const uint32_t *a, *b, *c;
  uint32_t scale_a, scale_b;
};

// The element of D or C that register i of a lane has: rows g and g + 8, columns 2 q and 2 q + 1.
uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 4 + i / 2 * 8; }
uint32_t column_of(uint32_t lane, uint32_t i) { return lane % 4 * 2 + i % 2; }

// D = sum + C of one type. Halves are two in a register, the lower column first.
void put_sums(void** lanes, MmaForm form, const double (*sums)[8]) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    for (uint32_t i = 0; i < static_cast<uint32_t>(form.m) / 4; ++i) {
      const double sum = sums[row_of(lane, i)][column_of(lane, i)];
      const bool add = !planted(Fault::mma_no_c);
      if (form.d == MmaType::kF16) {
        const uint32_t half = x.c[i / 2] >> (16 * (i % 2)) & 0xffff;
        const double c = add ? static_cast<double>(float_from_f16(static_cast<uint16_t>(half))) : 0;
        uint32_t bits = f16_from_double(sum + c);
        if (planted(Fault::mma_f16_twice))
          bits = f16_from_double(static_cast<double>(float_from_f16(f16_from_double(sum))) + c);
        x.d[i / 2] = i % 2 ? x.d[i / 2] | bits << 16 : bits;
      } else {
        const double c = add ? static_cast<double>(as_float(x.c[i])) : 0.0;
        x.d[i] = canonical_nan(float_bits(static_cast<float>(sum + c)));
      }
    }
  }
}

// Products of 16 rows and 8 columns over k values, from arrays (16, k) and (k, 8).
using EightDoubles = Columns<double, 8>::Type;
template <int kK, int kRow>
void sums_of(const double (*a)[kRow], const EightDoubles* b, double (*sums)[8]) {
  static constexpr double kOne[1][8] = {{1, 1, 1, 1, 1, 1, 1, 1}};
  for (int row = 0; row < 16; ++row)
    row_of_product<kK, 1, double, 8>(a[row], kOne[0], b, kOne, 1, sums[row]);
}

}  // namespace

namespace {

// A (m, k) and B (k, 8) out of the lanes' words, each of kEach values of k: word i of A holds row
// g = lane / 4, or with 16 rows of A row g + 8 if i is odd, and lane % 4 is the place within
// 4 kEach values. value(word, number in it, of A).
template <int kEach, class Word, int kK, class V, class F>
void unpack(void** lanes, MmaForm form, V (*a)[kK], typename Columns<V, 8>::Type* b, F value) {
  const int halves = form.m / 8, swapped = planted(Fault::mma_rows) && halves == 2;
  for (int lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    const Word *of_a = reinterpret_cast<const Word*>(x.a),
               *of_b = reinterpret_cast<const Word*>(x.b);
    const int g = lane / 4, q = lane % 4 * kEach;
    for (int part = 0; part < form.k / (4 * kEach); ++part)
      for (int i = 0; i < kEach; ++i) {
        const int at = 4 * kEach * part + q + i;
        for (int half = 0; half < halves; ++half)
          a[g + 8 * (half ^ swapped)][at] = value(of_a[halves * part + half], i, true);
        b[at][g] = value(of_b[part], i, false);
      }
  }
}

// Values of 8, 16 and 32 bits.
struct FloatOperands {
  double a[16][32] = {};
  EightDoubles b[32] = {};
};

template <int kEach, class F>
void unpack_floats(void** lanes, MmaForm form, FloatOperands& to, F value) {
  unpack<kEach, uint32_t>(lanes, form, to.a, to.b, [=](uint32_t word, int i, bool of_a) {
    return static_cast<double>(value(word >> (i * (32 / kEach)), of_a ? form.a : form.b));
  });
}

// A byte holds a value of 8 bits, one of 6 in its lower bits, or one of 4 in its middle.
float float_of_byte(uint32_t byte, MmaType type) {
  switch (type) {
    case MmaType::kE5M2: return float_from_e5m2(byte);
    case MmaType::kE2M3: return float_from_small(Small::kE2M3, byte);
    case MmaType::kE3M2: return float_from_small(Small::kE3M2, byte);
    case MmaType::kE2M1: return float_from_e2m1(planted(Fault::mma_e2m1_place) ? byte : byte >> 2);
    default: return float_from_e4m3(byte);
  }
}

void float_sums(void** lanes, MmaForm form, double (*sums)[8]) {
  FloatOperands operands;
  if (form.a == MmaType::kF16 || form.a == MmaType::kBf16)
    unpack_floats<2>(lanes, form, operands, [](uint32_t bits, MmaType type) {
      const uint16_t half = static_cast<uint16_t>(bits);
      return type == MmaType::kBf16 ? float_from_bf16(half) : float_from_f16(half);
    });
  else if (form.a == MmaType::kTf32)
    unpack_floats<1>(lanes, form, operands,
                     [](uint32_t bits, MmaType) { return float_from_tf32(bits); });
  else
    unpack_floats<4>(lanes, form, operands, float_of_byte);
  form.k == 32   ? sums_of<32>(operands.a, operands.b, sums)
  : form.k == 16 ? sums_of<16>(operands.a, operands.b, sums)
                 : sums_of<8>(operands.a, operands.b, sums);
}

// s32 sums, which wrap without .satfinite. kEach values of 32 / kEach bits are in a word.
template <int kEach>
void put_integers(void** lanes, MmaForm form) {
  constexpr int kBits = 32 / kEach, kMost = 16 * kEach;
  int32_t left[16][kMost];
  Columns<int32_t, 8>::Type right[kMost];
  unpack<kEach, uint32_t>(lanes, form, left, right, [=](uint32_t word, int i, bool of_a) {
    const MmaType type = of_a ? form.a : form.b;
    const uint32_t bits = word << (32 - kBits * (i + 1));  // the value's bits come first
    if (type == MmaType::kS8 || (type == MmaType::kS4 && !planted(Fault::mma_s4_sign)))
      return static_cast<int32_t>(bits) >> (32 - kBits);
    return static_cast<int32_t>(bits >> (32 - kBits));
  });
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    for (uint32_t i = 0; i < static_cast<uint32_t>(form.m) / 4; ++i) {
      int64_t sum = static_cast<int32_t>(x.c[i]);
      for (int j = 0; j < form.k; ++j) {
        const int32_t product = left[row_of(lane, i)][j] * right[j][column_of(lane, i)];
        sum += form.b == MmaType::kB1Xor ? left[row_of(lane, i)][j] ^ right[j][column_of(lane, i)]
                                         : product;
      }
      x.d[i] = form.saturates && !planted(Fault::mma_wraps)
                   ? static_cast<uint32_t>(saturate_integer<int32_t>(sum))
                   : static_cast<uint32_t>(sum);
    }
  }
}

// f64: one rounding for each product and its sum, in the order of k.
void put_doubles(void** lanes, MmaForm form) {
  double left[16][16];
  Columns<double, 8>::Type right[16];
  unpack<1, uint64_t>(lanes, form, left, right,
                      [](uint64_t bits, int, bool) { return as_double(bits); });
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    for (uint32_t i = 0; i < static_cast<uint32_t>(form.m) / 4; ++i) {
      double sum = as_double(reinterpret_cast<const uint64_t*>(x.c)[i]);
      for (int k = 0; k < form.k; ++k)
        sum = __builtin_fma(left[row_of(lane, i)][k], right[k][column_of(lane, i)], sum);
      reinterpret_cast<uint64_t*>(x.d)[i] = double_bits(sum);
    }
  }
}

}  // namespace

void multiply_matrices(Thread* T, MmaForm form, void* d, const void* a, const void* b,
                       const void* c) {
  ProductLane mine{static_cast<uint32_t*>(d),
                   static_cast<const uint32_t*>(a),
                   static_cast<const uint32_t*>(b),
                   static_cast<const uint32_t*>(c),
                   0,
                   0};
  meet(T, 0, "aligned mma.sync", &mine, true, [=](void** lanes, uint32_t) {
    switch (form.a) {
      case MmaType::kS8:
      case MmaType::kU8: return put_integers<4>(lanes, form);
      case MmaType::kS4:
      case MmaType::kU4: return put_integers<8>(lanes, form);
      case MmaType::kB1And:
      case MmaType::kB1Xor: return put_integers<32>(lanes, form);
      case MmaType::kF64: return put_doubles(lanes, form);
      default: break;
    }
    double sums[16][8];
    float_sums(lanes, form, sums);
    put_sums(lanes, form, sums);
  });
}

// kind::mxf8f6f4: m16n8k32 with one UE8M0 scale for each row of A and column of B. They come from
// the lanes and bytes that multiply_block_scaled describes.
void multiply_scaled_rows(Thread* T, MmaForm form, BlockScales scale_a, BlockScales scale_b,
                          uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  if (scale_a.thread_id > 1 || scale_b.thread_id > 3)
    fault(T, "mma.sync block_scale: no such thread-id");
  if (scale_a.byte_id > 3 || scale_b.byte_id > 3) fault(T, "mma.sync block_scale: no such byte-id");
  if (planted(Fault::block_scale_byte_a)) scale_a.byte_id = 0;
  ProductLane mine{
      d, a, b, c, scale_a.bytes >> (8 * scale_a.byte_id), scale_b.bytes >> (8 * scale_b.byte_id)};
  meet(T, 0, "aligned mma.sync.block_scale", &mine, true, [=](void** lanes, uint32_t) {
    double sums[16][8];
    float_sums(lanes, form, sums);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
      if (lane % 4 / 2 == scale_a.thread_id)
        for (double& sum : sums[lane / 4 + lane % 2 * 8]) sum *= scale_from_ue8m0(x.scale_a);
      if (lane % 4 == scale_b.thread_id)
        for (auto& row : sums) row[lane / 4] *= scale_from_ue8m0(x.scale_b);
    }
    put_sums(lanes, form, sums);
  });
}

namespace {

// Operands of m16n8k64 of E2M1: values in halves, and a scale for each block of a row of A or a
// column of B.
struct BlockScaledOperands {
  int16_t a[16][64];
  Columns<int16_t, 8>::Type b[64];
  double a_scales[16][4], b_scales[4][8];
};

void unpack_block_scaled(void** lanes, int blocks, bool ue8m0, uint32_t a_thread, uint32_t b_thread,
                         BlockScaledOperands& to) {
  const auto value = [](uint32_t word, int i) {
    return kE2m1Halves[word >> (4 * i) & (planted(Fault::block_scale_sign) ? 7 : 15)];
  };
  const auto scale = [=](uint32_t bytes, int block) {
    const uint32_t byte = bytes >> (8 * block) & 255;
    return ue8m0 ? static_cast<double>(float_from_bf16(bf16_from_ue8m0(byte)))
                 : scale_from_ue4m3(byte);
  };
  for (int lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 8; ++i) {
      for (int word = 0; word < 4; ++word)
        to.a[g + word % 2 * 8][8 * q + word / 2 * 32 + i] = value(x.a[word], i);
      for (int word = 0; word < 2; ++word) to.b[8 * q + word * 32 + i][g] = value(x.b[word], i);
    }
    for (int block = 0; block < blocks; ++block) {
      if (static_cast<uint32_t>(q / 2) == a_thread)
        to.a_scales[g + q % 2 * 8][block] = scale(x.scale_a, block);
      if (static_cast<uint32_t>(q) == b_thread)
        to.b_scales[planted(Fault::block_scale_column) ? blocks - 1 - block : block][g] =
            scale(x.scale_b, block);
    }
  }
}

}  // namespace

// m16n8k64 of E2M1 with a scale for each block of a row of A and a column of B.
//
// Of the four lanes of a quad, two hold A's scales (rows g and g + 8), chosen by thread_id 0 or 1,
// and one holds B's (thread_id 0 to 3). byte_id selects the first of two bytes if a row has two
// blocks.
void multiply_block_scaled(Thread* T, int blocks, bool ue8m0, BlockScales scale_a,
                           BlockScales scale_b, uint32_t* d, const uint32_t* a, const uint32_t* b,
                           const uint32_t* c) {
  if (scale_a.thread_id > 1 || scale_b.thread_id > 3)
    fault(T, "mma.sync block_scale: no such thread-id");
  if (blocks == 4 ? scale_a.byte_id || scale_b.byte_id : (scale_a.byte_id | scale_b.byte_id) & ~2u)
    fault(T, "mma.sync block_scale: no such byte-id");
  if (planted(Fault::block_scale_byte_a)) scale_a.byte_id = 0;
  if (planted(Fault::block_scale_byte_b)) scale_b.byte_id = 0;
  ProductLane mine{
      d, a, b, c, scale_a.bytes >> (8 * scale_a.byte_id), scale_b.bytes >> (8 * scale_b.byte_id)};
  meet(T, 0, "aligned mma.sync.block_scale", &mine, true, [=](void** lanes, uint32_t) {
    BlockScaledOperands operands;
    unpack_block_scaled(lanes, blocks, ue8m0, scale_a.thread_id, scale_b.thread_id, operands);
    double sums[16][8];
    for (int row = 0; row < 16; ++row)
      (blocks == 4 ? row_of_product<64, 4, int16_t, 8>
                   : row_of_product<64, 2, int16_t, 8>)(operands.a[row], operands.a_scales[row],
                                                        operands.b, operands.b_scales, kQuarter,
                                                        sums[row]);
    put_sums(lanes, {16, 64, MmaType::kE2M1, MmaType::kE2M1, MmaType::kF32, false}, sums);
  });
}

uint32_t MatrixDescriptor::at(uint32_t row, uint32_t byte) const {
  if (swizzle == 0)
    return start + row / 8 * stride + row % 8 * 16 + byte / 16 * leading + byte % 16;
  return swizzled(start + row / 8 * stride + row % 8 * (16u << swizzle) + byte, swizzle);
}

}  // namespace ptxemu
