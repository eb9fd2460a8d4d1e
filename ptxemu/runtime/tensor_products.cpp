// tcgen05.mma: dense products of one cta and of pairs, with and without block scales.
//
// A product reads 32 bytes of each row of A and B. Its sums are exact if double holds them, and
// rounded once with the accumulator.
#include "runtime/products.h"
#include "runtime/tensor_cells.h"

namespace ptxemu {
namespace {

constexpr uint32_t kRowBytes = 32;

struct Product {
  std::vector<Cta*> ctas;
  uint64_t d;
  uint32_t m, n;  // of all ctas together
  bool accumulate, integers, saturates;
};

uint32_t add_integers(const Product& product, uint32_t before, double sum) {
  const int64_t exact = static_cast<int32_t>(before) + static_cast<int64_t>(sum);
  return product.saturates && !planted(Fault::tcgen05_wraps)
             ? static_cast<uint32_t>(saturate_integer<int32_t>(exact))
             : static_cast<uint32_t>(exact);
}

// Adds sums of row m of this cta's part of D, columns n to n + count - 1 of the same half of D, to
// their cells in tensor memory, or replaces those.
void put(const Product& product, Cta* cta, uint32_t m, uint32_t n, uint32_t count,
         const double* sums) {
  const bool pair = product.ctas.size() == 2;
  const uint32_t rows = product.m / static_cast<uint32_t>(product.ctas.size());
  uint32_t lane = m, column = n;
  if (rows == 64) {
    if (pair)
      lane = m + (n >= product.n / 2 ? 64 : 0), column = n % (product.n / 2);
    else
      lane = m / 16 * 32 + m % 16;
    if (planted(Fault::tcgen05_half_lanes)) lane = pair ? m * 2 + (lane != m) : m;
  }
  const bool accumulate = product.accumulate || planted(Fault::tcgen05_accumulates);
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t& at = cell(cta, product.d, lane, column + i);
    if (product.integers) {
      at = add_integers(product, accumulate ? at : 0, sums[i]);
      continue;
    }
    const double before = accumulate ? static_cast<double>(as_float(at)) : 0.0;
    at = canonical_nan(float_bits(static_cast<float>(before + sums[i])));
  }
}

void check_product(Thread* T, const Product& product, const MatrixDescriptor& left,
                   const MatrixDescriptor& right) {
  if (!T->order) return;
  const uint32_t count = static_cast<uint32_t>(product.ctas.size()), rows = product.m / count;
  for (Cta* cta : product.ctas) {
    check_operand(T, cta, left, rows, kRowBytes);
    check_operand(T, cta, right, product.n / count, kRowBytes);
    // 64 rows are in half of the lanes; those of a pair are in all lanes, each in half of the
    // columns.
    const bool halves = rows == 64 && count == 2;
    for (uint32_t m = 0; m < (halves ? 128 : rows); ++m)
      check_cells(T, cta, product.d, rows == 64 && !halves ? m / 16 * 32 + m % 16 : m, 0,
                  halves ? product.n / 2 : product.n, true);
  }
}

// The cta that has this part of B's rows.
uint32_t half_of(const Product& product, uint32_t part) {
  return planted(Fault::tcgen05_pair_halves) ? static_cast<uint32_t>(product.ctas.size()) - 1 - part
                                             : part;
}

// D of a product over kK values of k, in kBlocks blocks with a scale each.
// values(cta, descriptor, row, of A, to) and scales(cta, row, of A, to) read a row of A or B. V
// holds sums of a block exactly; unit is what a product of 1 stands for.
template <int kK, int kBlocks, class V, class Values, class Scales>
void multiply(const Product& product, const MatrixDescriptor& left, const MatrixDescriptor& right,
              double unit, Values values, Scales scales) {
  constexpr uint32_t kColumns = 8;  // at once: N is a multiple of it
  const uint32_t count = static_cast<uint32_t>(product.ctas.size()), rows = product.m / count,
                 columns = product.n / count;
  struct ColumnsOfB {
    typename Columns<V, kColumns>::Type values[kK];
    double scales[kBlocks][kColumns];
  };
  std::vector<ColumnsOfB> of_b(product.n / kColumns);
  V row[kK];
  double row_scales[kBlocks];
  for (uint32_t n = 0; n < product.n; ++n) {
    values(product.ctas[half_of(product, n / columns)], right, n % columns, false, row);
    for (uint32_t k = 0; k < kK; ++k) of_b[n / kColumns].values[k][n % kColumns] = row[k];
  }
  for (Cta* cta : product.ctas) {
    for (uint32_t n = 0; n < product.n; ++n) {
      scales(cta, n, false, row_scales);
      for (uint32_t block = 0; block < kBlocks; ++block)
        of_b[n / kColumns].scales[block][n % kColumns] = row_scales[block];
    }
    for (uint32_t m = 0; m < rows; ++m) {
      values(cta, left, m, true, row);
      scales(cta, m, true, row_scales);
      for (uint32_t n = 0; n < product.n; n += kColumns) {
        const ColumnsOfB& b = of_b[n / kColumns];
        double sums[kColumns];
        row_of_product<kK, kBlocks, V, kColumns>(row, row_scales, b.values, b.scales, unit, sums);
        put(product, cta, m, n, kColumns, sums);
      }
    }
  }
}

// The fields of instruction descriptors.
uint32_t d_type(uint32_t bits) { return bits >> 4 & 3; }
uint32_t a_type(uint32_t bits) { return bits >> 7 & 7; }
uint32_t b_type(uint32_t bits) { return bits >> 10 & 7; }
uint32_t a_scale_id(uint32_t bits) { return bits >> 29 & 3; }
uint32_t b_scale_id(uint32_t bits) { return bits >> 4 & 3; }

// Bit t: type t of A and B is one of the kind.
constexpr uint32_t kTypes[] = {0b11, 0b100, 0b111011, 0b11, 0b111011, 0b10, 0b10};
constexpr const char* kTypesRequired[] = {
    "tcgen05.mma kind::f16: operands must be f16 or bf16",
    "tcgen05.mma kind::tf32: operands must be tf32",
    "tcgen05.mma kind::f8f6f4: operands must be E4M3, E5M2, E2M3, E3M2 or E2M1",
    "tcgen05.mma kind::i8: operands must be u8 or s8",
    "tcgen05.mma kind::mxf8f6f4: operands must be E4M3, E5M2, E2M3, E3M2 or E2M1",
    "tcgen05.mma kind::mxf4: operands must be E2M1",
    "tcgen05.mma kind::mxf4nvf4: operands must be E2M1",
};

// Fields that only products with block scales have.
void check_scales(Thread* T, const TensorProduct& asked) {
  const uint32_t bits = asked.descriptor, ids[] = {a_scale_id(bits), b_scale_id(bits)};
  for (const uint32_t id : ids) {
    if (asked.blocks == 4 && id)
      fault(T, "tcgen05.mma: scale selectors must be 0 for blocks of 16");
    if (asked.blocks == 2 && id & 1)
      fault(T, "tcgen05.mma: scale selectors must be 0 or 2 with two scales a row");
  }
  const bool ue8m0 = bits >> 23 & 1;
  if (ue8m0 == (asked.blocks == 4) && !planted(Fault::scale_type_unchecked))
    fault(T, asked.blocks == 4 ? "tcgen05.mma: UE8M0 scales of blocks of 16 are not supported"
                               : "tcgen05.mma: blocks of 32 require UE8M0 scales (bit 23)");
  if (bits >> 31)
    fault(T, asked.kind == TensorKind::kMxf8f6f4
                 ? "tcgen05.mma: bit 31 of the instruction descriptor must be 0"
                 : "tcgen05.mma: K = 96 is not supported");
}

void check_descriptor(Thread* T, const TensorProduct& asked, const Product& product) {
  const uint32_t bits = asked.descriptor;
  const bool block_scaled = asked.blocks != 0, integers = asked.kind == TensorKind::kI8;
  const uint32_t reserved = block_scaled ? 0x07000048u : integers ? 0x20800040u : 0x20800048u;
  if (bits & reserved && !planted(Fault::descriptor_unchecked))
    fault(T, block_scaled
                 ? "tcgen05.mma: bits 3, 6 and 24 to 26 of the instruction descriptor must be 0"
             : integers ? "tcgen05.mma: bits 6, 23 and 29 of the instruction descriptor must be 0"
                        : "tcgen05.mma: bits 3, 6, 23 and 29 of the instruction descriptor must "
                          "be 0");
  const bool rows =
      asked.pair ? product.m == 256 || product.m == 128 : product.m == 128 || product.m == 64;
  // Its scales of B are duplicated to halves of the lanes, not to all four groups.
  if (block_scaled && asked.pair && product.m == 128)
    fault(T, "tcgen05.mma: block scales with M = 128 of a pair are not supported");
  if (!rows) fault(T, "tcgen05.mma: M must be 64 or 128, of a pair 128 or 256");
  if (product.n == 0 || product.n > 256 || (asked.pair && product.n % 16))
    fault(T, "tcgen05.mma: N must be a multiple of 8 up to 256, of a pair of 16");
  if (!block_scaled && product.m == 128 && product.n % 16 && !(integers && product.n == 8) &&
      !planted(Fault::tcgen05_kind_unchecked))
    fault(T, "tcgen05.mma: N must be a multiple of 16 with M = 128");
  if (integers && product.n % 16 && product.n != 8 && product.n != 24)
    fault(T, "tcgen05.mma kind::i8: N must be 8, 24 or a multiple of 16");
  if (bits >> 15 & 3) fault(T, "tcgen05.mma: operands that are not K-major are not supported");
  if (integers && bits >> 13 & 3 && !planted(Fault::tcgen05_kind_unchecked))
    fault(T, "tcgen05.mma kind::i8: operands cannot be negated");
  if (bits & 7) fault(T, "tcgen05.mma: sparse operands are not supported");
  const int kind = static_cast<int>(asked.kind);
  if (!(kTypes[kind] >> a_type(bits) & 1) || !(kTypes[kind] >> b_type(bits) & 1))
    fault(T, kTypesRequired[kind]);
  if (block_scaled) return check_scales(T, asked);
  if (d_type(bits) != (integers ? 2 : 1))
    fault(T, integers ? "tcgen05.mma kind::i8: D must be s32" : "tcgen05.mma: D must be f32");
}

Small small_of(uint32_t type) {
  return type == 0   ? Small::kE4M3
         : type == 1 ? Small::kE5M2
         : type == 3 ? Small::kE2M3
         : type == 4 ? Small::kE3M2
                     : Small::kE2M1;
}

// 16 values, which fill 16 bytes in shared memory: with padding after them if they are shorter than
// a byte.
void read_small(Small type, const uint8_t* from, double* to) {
  const uint32_t width = small_bits(type);
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t at = planted(Fault::tcgen05_padding) ? 8 * i : width * i;
    const uint32_t bits = from[at / 8] | (at / 8 < 15 ? from[at / 8 + 1] << 8 : 0);
    to[i] = static_cast<double>(float_from_small(type, bits >> at % 8 & ((1u << width) - 1)));
  }
}

// The scales of a row are bytes of one cell, the same in all four groups of lanes.
uint32_t scale_bytes(Cta* cta, uint64_t scales, uint32_t row, bool of_a) {
  const uint64_t at = scales & ~0xc0000000ull;
  if (planted(Fault::tcgen05_scale_b) && !of_a) row ^= 1;
  if (planted(Fault::tcgen05_scale_rows)) row %= 128;
  const uint32_t bytes = cell(cta, at, row % 32, row / 32);
  for (uint32_t group = 1; group < 4; ++group)
    if (cell(cta, at, group * 32 + row % 32, row / 32) != bytes)
      fault_work(cta->cluster, "tcgen05.mma: scales differ between the groups of lanes");
  return bytes;
}

// Runs multiply with the kind's values. scales(cta, row, of A, to) gives those of a row.
template <class Scales>
void multiply_kind(const TensorProduct& asked, const Product& product, const MatrixDescriptor& left,
                   const MatrixDescriptor& right, Scales scales) {
  const uint32_t bits = asked.descriptor;
  const bool negative = (bits >> 13 & 1) != (bits >> 14 & 1) && !planted(Fault::tcgen05_negated);
  const double sign = negative ? -1 : 1;
  const auto type_of = [bits](bool of_a) { return of_a ? a_type(bits) : b_type(bits); };
  // from(of A, 16 bytes, to) reads half of a row.
  const auto run = [&]<int kK, int kBlocks, class V>(double unit, auto from) {
    const auto values = [=](Cta* cta, const MatrixDescriptor& at, uint32_t row, bool of_a, V* to) {
      from(of_a, operand(cta, at, row, 0, 16), to);
      from(of_a, operand(cta, at, row, 16, 16), to + kK / 2);
    };
    multiply<kK, kBlocks, V>(product, left, right, sign * unit, values, scales);
  };
  const auto halves = [=](bool of_a, const uint8_t* from, double* to) {
    for (int k = 0; k < 8; ++k) {
      const uint16_t half = read<uint16_t>(from + 2 * k);
      to[k] = static_cast<double>(type_of(of_a) ? float_from_bf16(half) : float_from_f16(half));
    }
  };
  const auto floats = [](bool, const uint8_t* from, double* to) {
    for (int k = 0; k < 4; ++k)
      to[k] = static_cast<double>(float_from_tf32(read<uint32_t>(from + 4 * k)));
  };
  const auto bytes = [=](bool of_a, const uint8_t* from, int32_t* to) {
    for (int k = 0; k < 16; ++k)
      to[k] = type_of(of_a) ? int32_t{static_cast<int8_t>(from[k])} : int32_t{from[k]};
  };
  const auto small = [=](bool of_a, const uint8_t* from, double* to) {
    read_small(small_of(type_of(of_a)), from, to);
  };
  const auto nibbles = [](bool, const uint8_t* from, int16_t* to) {
    for (int byte = 0; byte < 16; ++byte) {
      *to++ = kE2m1Halves[from[byte] & 15];
      *to++ = kE2m1Halves[from[byte] >> 4];
    }
  };
  switch (asked.kind) {
    case TensorKind::kF16: return run.template operator()<16, 1, double>(1, halves);
    case TensorKind::kTf32: return run.template operator()<8, 1, double>(1, floats);
    case TensorKind::kI8: return run.template operator()<32, 1, int32_t>(1, bytes);
    case TensorKind::kF8f6f4:
    case TensorKind::kMxf8f6f4: return run.template operator()<32, 1, double>(1, small);
    case TensorKind::kMxf4:
    case TensorKind::kMxf4nvf4:
      return asked.blocks == 4 ? run.template operator()<64, 4, int16_t>(kQuarter, nibbles)
                               : run.template operator()<64, 2, int16_t>(kQuarter, nibbles);
  }
}

// The scales of a row, one for each block: bytes of a cell from the one that the descriptor names.
void scales_of(const TensorProduct& asked, Cta* cta, uint32_t row, bool of_a, double* to) {
  if (!asked.blocks) {
    *to = 1;
    return;
  }
  const uint32_t id = of_a ? a_scale_id(asked.descriptor) : b_scale_id(asked.descriptor);
  uint32_t bytes = scale_bytes(cta, of_a ? asked.scale_a : asked.scale_b, row, of_a);
  if (!planted(Fault::tcgen05_scale_id)) bytes >>= 8 * id;
  for (int block = 0; block < asked.blocks; ++block)
    to[block] = asked.blocks == 4 ? scale_from_ue4m3(bytes >> (8 * block))
                                  : scale_from_ue8m0(bytes >> (8 * block));
}

}  // namespace

void tensor_multiply(Thread* T, TensorProduct asked) {
  const uint32_t bits = asked.descriptor;
  const bool integers = asked.kind == TensorKind::kI8;
  const Product product{partners(T, asked.pair),    asked.d,          (bits >> 24 & 31) * 16,
                        (bits >> 17 & 63) * 8,      asked.accumulate, integers,
                        integers && (bits >> 3 & 1)};
  check_descriptor(T, asked, product);
  const MatrixDescriptor left = tensor_descriptor(T, asked.a),
                         right = tensor_descriptor(T, asked.b);
  check_product(T, product, left, right);
  if (T->order && asked.blocks)
    for (Cta* cta : product.ctas)
      for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
        check_cells(T, cta, asked.scale_a & ~0xc0000000ull, lane, 0,
                    (product.m / static_cast<uint32_t>(product.ctas.size()) + 31) / 32, false);
        check_cells(T, cta, asked.scale_b & ~0xc0000000ull, lane, 0, (product.n + 31) / 32, false);
      }
  enqueue_tensor_work(T, [=] {
    multiply_kind(asked, product, left, right, [&](Cta* cta, uint32_t row, bool of_a, double* to) {
      scales_of(asked, cta, row, of_a, to);
    });
  });
}

}  // namespace ptxemu
