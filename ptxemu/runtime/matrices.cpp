// ldmatrix, stmatrix, mma.sync. A product's sum is exact in double if the values allow it, and
// rounded once.
#include <cstring>

#include "runtime/control.h"
#include "runtime/products.h"

namespace ptxemu {
namespace {

struct MatrixLane {
  Thread* thread;
  uint64_t address;
  uint32_t* registers;
};

struct ProductLane {
  uint32_t* d;
  const uint32_t *a, *b, *c;
  uint32_t scale_a, scale_b;
};

// D = sum + C at the places that a lane of m16n8 holds: rows g and g + 8, columns 2 q and 2 q + 1.
void put_floats(void** lanes, const double (*sums)[8]) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    for (uint32_t i = 0; i < 4; ++i) {
      const double sum = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      const double c = planted(Fault::mma_no_c) ? 0.0 : static_cast<double>(as_float(x.c[i]));
      x.d[i] = canonical_nan(float_bits(static_cast<float>(sum + c)));
    }
  }
}

// Products of m16n8 over k values, from arrays (16, k) and (k, 8).
using EightDoubles = Columns<double, 8>::Type;
template <int kK>
void sums_of(const double (*a)[kK], const EightDoubles* b, double (*sums)[8]) {
  static constexpr double kOne[1][8] = {{1, 1, 1, 1, 1, 1, 1, 1}};
  for (int row = 0; row < 16; ++row)
    row_of_product<kK, 1, double, 8>(a[row], kOne[0], b, kOne, 1, sums[row]);
}

}  // namespace

void load_matrix(Thread* T, int count, bool transposed, uint64_t address, uint32_t* to) {
  MatrixLane mine{T, address, to};
  if (planted(Fault::ldmatrix_trans)) transposed = false;
  meet(T, 0, "aligned ldmatrix", &mine, true, [=](void** lanes, uint32_t) {
    for (int i = 0; i < count; ++i) {
      uint16_t matrix[8][8];
      for (int row = 0; row < 8; ++row) {
        const MatrixLane& x = *static_cast<MatrixLane*>(lanes[i * 8 + row]);
        std::memcpy(matrix[row], x.thread->shared_at(x.address, 16), 16);
        if (T->order) check_collective(T, x.thread->shared_at(x.address, 16), 16, false);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const uint16_t low = transposed ? matrix[column][row] : matrix[row][column];
        const uint16_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
        static_cast<MatrixLane*>(lanes[lane])->registers[i] = low | static_cast<uint32_t>(high)
                                                                        << 16;
      }
    }
  });
}

void store_matrix(Thread* T, int count, bool transposed, uint64_t address, const uint32_t* from) {
  uint32_t values[4];
  std::copy(from, from + count, values);
  MatrixLane mine{T, address, values};
  meet(T, 0, "aligned stmatrix", &mine, true, [=](void** lanes, uint32_t) {
    for (int i = 0; i < count; ++i) {
      uint16_t matrix[8][8];
      const int source =
          planted(Fault::stmatrix_rows) && (i == 1 || i == 2) && count == 4 ? 3 - i : i;
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane / 4, column = lane % 4 * 2;
        const uint32_t value = static_cast<MatrixLane*>(lanes[lane])->registers[source];
        (transposed ? matrix[column][row] : matrix[row][column]) = static_cast<uint16_t>(value);
        (transposed ? matrix[column + 1][row] : matrix[row][column + 1]) =
            static_cast<uint16_t>(value >> 16);
      }
      for (int row = 0; row < 8; ++row) {
        const MatrixLane& x = *static_cast<MatrixLane*>(lanes[i * 8 + row]);
        std::memcpy(x.thread->shared_at(x.address, 16), matrix[row], 16);
        if (T->order) check_write(x.thread, x.thread->shared_at(x.address, 16), 16);
      }
    }
  });
}

namespace {

// A (16, k) and B (k, 8) out of the lanes' words, each of kEach values of k: word 2 i of A holds
// row g = lane / 4, word 2 i + 1 row g + 8, and lane % 4 is the place within 4 kEach values.
// value(word, number in it, of A).
template <int kEach, int kK, class V, class F>
void unpack(void** lanes, int k, V (*a)[kK], typename Columns<V, 8>::Type* b, F value) {
  const int second = planted(Fault::mma_rows) ? 0 : 8, first = 8 - second;
  for (int lane = 0; lane < 32; ++lane) {
    const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
    const int g = lane / 4, q = lane % 4 * kEach;
    for (int part = 0; part < k / (4 * kEach); ++part)
      for (int i = 0; i < kEach; ++i) {
        const int at = 4 * kEach * part + q + i;
        a[g + first][at] = value(x.a[2 * part], i, true);
        a[g + second][at] = value(x.a[2 * part + 1], i, true);
        b[at][g] = value(x.b[part], i, false);
      }
  }
}

}  // namespace

void multiply_halves(Thread* T, int k, bool bf16, uint32_t* d, const uint32_t* a, const uint32_t* b,
                     const uint32_t* c) {
  ProductLane mine{d, a, b, c, 0, 0};
  meet(T, 0, "aligned mma.sync", &mine, true, [=](void** lanes, uint32_t) {
    double left[16][16] = {};
    EightDoubles right[16] = {};
    unpack<2>(lanes, k, left, right, [=](uint32_t pair, int i, bool) {
      const uint16_t bits = static_cast<uint16_t>(pair >> (16 * i));
      return static_cast<double>(bf16 ? float_from_bf16(bits) : float_from_f16(bits));
    });
    double sums[16][8];
    sums_of<16>(left, right, sums);
    put_floats(lanes, sums);
  });
}

void multiply_bytes(Thread* T, int k, bool a_signed, bool b_signed, uint32_t* d, const uint32_t* a,
                    const uint32_t* b, const uint32_t* c) {
  ProductLane mine{d, a, b, c, 0, 0};
  meet(T, 0, "aligned mma.sync", &mine, true, [=](void** lanes, uint32_t) {
    int32_t left[16][32] = {};
    Columns<int32_t, 8>::Type right[32] = {};
    unpack<4>(lanes, k, left, right, [=](uint32_t word, int i, bool of_a) {
      const uint8_t byte = static_cast<uint8_t>(word >> (8 * i));
      return (of_a ? a_signed : b_signed) ? int32_t{static_cast<int8_t>(byte)} : int32_t{byte};
    });
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t sum = x.c[i];
        for (int j = 0; j < k; ++j)
          sum +=
              static_cast<uint32_t>(left[lane / 4 + i / 2 * 8][j] * right[j][lane % 4 * 2 + i % 2]);
        x.d[i] = sum;
      }
    }
  });
}

void multiply_fp8(Thread* T, Small a_kind, Small b_kind, uint32_t* d, const uint32_t* a,
                  const uint32_t* b, const uint32_t* c) {
  ProductLane mine{d, a, b, c, 0, 0};
  meet(T, 0, "aligned mma.sync", &mine, true, [=](void** lanes, uint32_t) {
    double left[16][32];
    EightDoubles right[32];
    unpack<4>(lanes, 32, left, right, [=](uint32_t word, int i, bool of_a) {
      const uint32_t byte = word >> (8 * i) & 255;
      return static_cast<double>((of_a ? a_kind : b_kind) == Small::kE4M3 ? float_from_e4m3(byte)
                                                                          : float_from_e5m2(byte));
    });
    double sums[16][8];
    sums_of<32>(left, right, sums);
    put_floats(lanes, sums);
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
    put_floats(lanes, sums);
  });
}

uint32_t MatrixDescriptor::at(uint32_t row, uint32_t byte) const {
  if (swizzle == 0)
    return start + row / 8 * stride + row % 8 * 16 + byte / 16 * leading + byte % 16;
  return swizzled(start + row / 8 * stride + row % 8 * (16u << swizzle) + byte, swizzle);
}

}  // namespace ptxemu
