// tcgen05: tensor memory of 128 lanes by 512 columns a cta, its copies, products, and accesses by
// warps.
//
// Work is queued per issuing thread and done in that thread's order. Accesses to columns that are
// not allocated fault.
// Long because its checks, its queue and its accesses share the cells.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "runtime/control.h"
#include "runtime/products.h"

namespace ptxemu {
namespace {

constexpr uint32_t kTensorPoison = 0x7ffc0dea;  // a NaN, so that sums with it are NaN

uint32_t& cell(Cta* cta, uint64_t address, uint32_t lane, uint32_t column) {
  lane += static_cast<uint32_t>(address >> 16 & 0x3fff);
  column += static_cast<uint32_t>(address & 0xffff);
  if (lane >= kTensorLanes || column >= kTensorColumns || !cta->tensor.owner[column / 32])
    fault_work(cta->cluster, "tensor memory that is not allocated");
  return cta->tensor.cells[lane * kTensorColumns + column];
}

MatrixDescriptor descriptor(Thread* T, uint64_t x) {
  static constexpr int kSwizzles[8] = {0, -1, 3, -1, 2, -1, 1, -1};
  if ((x >> 46 & 7) != 1) fault(T, "tcgen05: the descriptor's version must be 1");
  if (x >> 49 & 7) fault(T, "tcgen05: descriptors with a base offset are not supported");
  if (x >> 52 & 1) fault(T, "tcgen05: descriptors with an absolute address are not supported");
  if (x & 0x1fe00000c000c000 && !planted(Fault::descriptor_unchecked))
    fault(T, "tcgen05: bits 14, 15, 30, 31 and 53 to 60 of a descriptor must be 0");
  int swizzle = kSwizzles[x >> 61];
  if (swizzle < 0) fault(T, "tcgen05: this swizzle is not supported");
  if (planted(Fault::tcgen05_swizzle_64) && swizzle == 2) swizzle = 1;
  return {static_cast<uint32_t>(x & 0x3fff) << 4, static_cast<uint32_t>(x >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(x >> 32 & 0x3fff) << 4, static_cast<uint32_t>(swizzle)};
}

const uint8_t* operand(Cta* cta, const MatrixDescriptor& at, uint32_t row, uint32_t byte,
                       uint32_t size) {
  const uint32_t offset = at.at(row, byte);
  if (offset + size > cta->shared_bytes)
    fault_work(cta->cluster, "tcgen05 reads outside the cta's shared memory");
  return cta->shared + offset;
}

// For the checker of order: rows of an operand in shared memory, and columns of a lane of tensor
// memory.
void check_operand(Thread* T, Cta* cta, const MatrixDescriptor& at, uint32_t rows, uint32_t bytes) {
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t byte = 0; byte < bytes; byte += 16)
      if (const uint32_t offset = at.at(row, byte); offset + 16 <= cta->shared_bytes)
        check_tensor_operand(T, cta->shared + offset, 16);
}
void check_cells(Thread* T, Cta* cta, uint64_t address, uint32_t lane, uint32_t column,
                 uint32_t columns, bool write) {
  if (columns == 0) return;
  cell(cta, address, lane, column + columns - 1);
  check_tensor(T, TensorAgent::kQueue, &cell(cta, address, lane, column), 4 * columns, write);
}

// The ctas that take part: one, or the even and the odd one of a pair.
std::vector<Cta*> partners(Thread* T, bool pair) {
  if (!pair) return {T->cta};
  const auto& ctas = T->cta->cluster->ctas;
  if (ctas.size() % 2) fault(T, "tcgen05 with cta_group::2: the cluster has an odd number of ctas");
  return {ctas[T->rank & ~1u].get(), ctas[T->rank | 1].get()};
}

// The position of register i of a lane for a shape, relative to the address.
void place(TensorShape shape, uint32_t i, uint32_t lane, uint32_t& row, uint32_t& column) {
  switch (shape) {
    case TensorShape::k32x32b: row = lane, column = i; break;
    case TensorShape::k16x128b: row = lane / 4 + 8 * (i & 1), column = i / 2 * 4 + lane % 4; break;
    case TensorShape::k16x256b:
      row = lane / 4 + 8 * (i >> 1 & 1), column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
      if (planted(Fault::tensor_load_repeats)) column -= i / 4 * 4;
      if (planted(Fault::tensor_load_rows)) row ^= 8;
      break;
  }
}

// A warp reaches the 32 lanes of its number in its warpgroup. Shapes of 16 lanes begin at the first
// or in the middle.
void check_lanes(Thread* T, TensorShape shape, uint64_t address, const char* what) {
  const uint32_t lane = static_cast<uint32_t>(address >> 16 & 0xffff);
  if (lane / 32 == T->warp->index % 4 && (lane % (shape == TensorShape::k32x32b ? 32 : 16) == 0 ||
                                          planted(Fault::tensor_lanes_unchecked)))
    return;
  const uint32_t first = T->warp->index % 4 * 32;
  std::ostringstream out;
  out << what << " at lane " << lane;
  if (lane / 32 != first / 32) out << ": lanes that belong to another warp";
  out << ": this shape requires lane " << first;
  if (shape != TensorShape::k32x32b) out << " or " << first + 16;
  out << " in warp " << T->warp->index;
  fault(T, out.str().c_str());
}

// PTXEMU_TENSOR_LOADS=registers: the values of tcgen05.ld are visible at once. The manual
// guarantees them only at wait::ld, but code that ptxas compiles waits for the registers
// themselves, and some CUTLASS kernels depend on that.
bool loads_wait() {
  const char* asked = std::getenv("PTXEMU_TENSOR_LOADS");
  return !asked || std::strcmp(asked, "registers") != 0;
}

struct Product {
  std::vector<Cta*> ctas;
  uint64_t d;
  uint32_t m, n;  // of all ctas together
  bool accumulate;
};

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
    const double before = accumulate ? static_cast<double>(as_float(at)) : 0.0;
    at = canonical_nan(float_bits(static_cast<float>(before + sums[i])));
  }
}

void check_product(Thread* T, const Product& product, const MatrixDescriptor& left,
                   const MatrixDescriptor& right) {
  if (!T->order) return;
  const uint32_t count = static_cast<uint32_t>(product.ctas.size()), rows = product.m / count;
  for (Cta* cta : product.ctas) {
    check_operand(T, cta, left, rows, 32);
    check_operand(T, cta, right, product.n / count, 32);
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

Product make_product(Thread* T, bool pair, uint64_t d, uint32_t kind, bool accumulate,
                     bool block_scaled) {
  Product product{partners(T, pair), d, (kind >> 24 & 31) * 16, (kind >> 17 & 63) * 8, accumulate};
  if (kind & (block_scaled ? 0x07000048u : 0x20800048u) && !planted(Fault::descriptor_unchecked))
    fault(T, block_scaled
                 ? "tcgen05.mma: bits 3, 6 and 24 to 26 of the instruction descriptor must be 0"
                 : "tcgen05.mma: bits 3, 6, 23 and 29 of the instruction descriptor must be 0");
  const bool rows =
      pair ? product.m == 256 || product.m == 128 : product.m == 128 || product.m == 64;
  // Its scales of B are duplicated to halves of the lanes, not to all four groups.
  if (block_scaled && pair && product.m == 128)
    fault(T, "tcgen05.mma: block scales with M = 128 of a pair are not supported");
  if (!rows) fault(T, "tcgen05.mma: M must be 64 or 128, of a pair 128 or 256");
  if (product.n == 0 || product.n > 256 || (pair && product.n % 16))
    fault(T, "tcgen05.mma: N must be a multiple of 8 up to 256, of a pair of 16");
  if (kind >> 15 & 3) fault(T, "tcgen05.mma: operands that are not K-major are not supported");
  if (kind >> 13 & 3) fault(T, "tcgen05.mma: negated operands are not supported");
  if (kind & 7) fault(T, "tcgen05.mma: sparse operands are not supported");
  return product;
}

}  // namespace

void tensor_alloc(Thread* T, bool, uint64_t to, uint32_t columns) {
  meet(T, 0, "aligned tcgen05.alloc", nullptr, true, [=](void**, uint32_t) {
    TensorMemory& memory = T->cta->tensor;
    if (columns < 32 || columns > kTensorColumns || columns & (columns - 1))
      fault(T, "tcgen05.alloc: expected a power of two from 32 to 512 columns");
    if (!memory.permit) fault(T, "tcgen05.alloc after the permit was given up");
    if (!memory.cells) {
      memory.cells.reset(new uint32_t[kTensorLanes * kTensorColumns]);
      std::fill_n(memory.cells.get(), kTensorLanes * kTensorColumns,
                  planted(Fault::tensor_memory_zero) ? 0 : kTensorPoison);
    }
    for (uint32_t at = 0; at + columns <= kTensorColumns; at += columns) {
      uint32_t* first = memory.owner + at / 32;
      if (std::any_of(first, first + columns / 32, [](uint32_t owner) { return owner != 0; }))
        continue;
      std::fill(first, first + columns / 32, columns);
      memory.allocated += columns;
      write<uint32_t>(T->shared_at(to, 4), at);
      if (T->order) check_collective(T, T->shared_at(to, 4), 4, true);
      return;
    }
    fault(T, "tcgen05.alloc: too few free columns, it would wait for ever");
  });
}

void tensor_dealloc(Thread* T, bool, uint32_t address, uint32_t columns) {
  meet(T, 0, "aligned tcgen05.dealloc", nullptr, true, [=](void**, uint32_t) {
    TensorMemory& memory = T->cta->tensor;
    const uint32_t first = (address & 0xffff) / 32;
    if ((address & 0xffff) + columns > kTensorColumns)
      fault(T, "tcgen05.dealloc beyond the last column");
    for (uint32_t i = first; i < first + columns / 32; ++i) {
      if (memory.owner[i] != columns) fault(T, "tcgen05.dealloc of what was not allocated so");
      memory.owner[i] = 0;
    }
    for (uint32_t lane = 0; lane < kTensorLanes; ++lane)
      check_tensor_freed(T, &memory.cells[lane * kTensorColumns + first * 32], 4 * columns);
    memory.allocated -= columns;
  });
}

void tensor_relinquish(Thread* T, bool) {
  meet(T, 0, "aligned tcgen05.relinquish_alloc_permit", nullptr, true,
       [=](void**, uint32_t) { T->cta->tensor.permit = false; });
}

void tensor_wait_load(Thread* T) {
  meet(T, 0, "aligned tcgen05.wait::ld", nullptr, true, [](void**, uint32_t) {});
  check_tensor_wait(T, TensorAgent::kLoad);
  for (auto& [to, value] : T->tensor_loads) *to = value;
  T->tensor_loads.clear();
}
void tensor_wait_store(Thread* T) {
  meet(T, 0, "aligned tcgen05.wait::st", nullptr, true, [](void**, uint32_t) {});
  check_tensor_wait(T, TensorAgent::kStore);
}

// Arrives once all that the thread has issued before is done: work of one thread is done in its
// order.
void tensor_commit(Thread* T, bool, uint64_t barrier, bool multicast, uint32_t mask) {
  Cluster* cluster = T->cta->cluster;
  const uint32_t address = static_cast<uint32_t>(barrier);
  T->shared_at(address, 8);
  const TensorCommit done = check_tensor_commit(T);
  const auto arrive = [=] {
    for (uint32_t rank = 0; rank < cluster->ctas.size(); ++rank)
      if (multicast ? mask >> rank & 1 : rank == 0) {
        const uint32_t at = multicast ? (address & 0xffffff) | rank << kSharedOffsetBits : address;
        uint64_t* mbarrier = reinterpret_cast<uint64_t*>(cluster->shared_at(at));
        check_tensor_done(cluster, done, mbarrier);
        mbarrier_arrive_from_work(cluster, mbarrier);
      }
  };
  if (planted(Fault::tcgen05_commit_early)) return arrive();
  enqueue_tensor_work(T, arrive);
}

// 32 rows of 16 bytes into four columns, once for each warp's 32 lanes.
void tensor_copy(Thread* T, bool pair, uint64_t to, uint64_t bits) {
  const MatrixDescriptor at = descriptor(T, bits);
  for (Cta* cta : partners(T, pair)) {
    if (T->order) {
      check_operand(T, cta, at, 32, 16);
      for (uint32_t row = 0; row < kTensorLanes; ++row) check_cells(T, cta, to, row, 0, 4, true);
    }
    enqueue_tensor_work(T, [=] {
      for (uint32_t row = 0; row < 32; ++row)
        for (uint32_t word = 0; word < 4; ++word)
          for (uint32_t warp = 0; warp < (planted(Fault::tcgen05_cp_lanes) ? 1u : 4u); ++warp)
            cell(cta, to, warp * 32 + row, word) =
                read<uint32_t>(operand(cta, at, row, 4 * word, 4));
    });
  }
}

void tensor_load_registers(Thread* T, TensorShape shape, int count, uint64_t address,
                           uint32_t* const* to) {
  struct Lane {
    uint32_t* const* to;
    uint64_t address;
    Thread* thread;
  } mine{to, address, T};
  meet(T, 0, "aligned tcgen05.ld", &mine, true, [=](void** lanes, uint32_t) {
    check_lanes(T, shape, address, "tcgen05.ld");
    const bool wait = loads_wait();
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const Lane& x = *static_cast<Lane*>(lanes[lane]);
      if (x.address != address) fault(T, "tcgen05.ld: lanes of a warp disagree about the address");
      for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        uint32_t row = 0, column = 0;
        place(shape, i, lane, row, column);
        if (planted(Fault::tensor_memory_columns)) ++column;
        uint32_t& from = cell(T->cta, address, row, column);
        check_tensor(T, TensorAgent::kLoad, &from, 4, false);
        const uint32_t value = from;
        if (wait) x.thread->tensor_loads.emplace_back(x.to[i], value);
        *x.to[i] = wait ? kTensorPoison : value;
      }
    }
  });
}

void tensor_store_registers(Thread* T, TensorShape shape, int count, uint64_t address,
                            const uint32_t* from) {
  meet(T, 0, "aligned tcgen05.st", const_cast<uint32_t*>(from), true, [=](void** lanes, uint32_t) {
    check_lanes(T, shape, address, "tcgen05.st");
    for (uint32_t lane = 0; lane < 32; ++lane)
      for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        uint32_t row = 0, column = 0;
        place(shape, i, lane, row, column);
        uint32_t& to = cell(T->cta, address, row, column);
        check_tensor(T, TensorAgent::kStore, &to, 4, true);
        to = static_cast<uint32_t*>(lanes[lane])[i];
      }
  });
}

// kind::mxf4nvf4 with blocks of 16: scales are in tensor memory, four bytes per row, the same in
// all four groups of lanes.
void tensor_multiply_block_scaled(Thread* T, bool pair, uint64_t d, uint64_t a, uint64_t b,
                                  uint32_t kind, uint64_t scale_a, uint64_t scale_b,
                                  bool accumulate) {
  const Product product = make_product(T, pair, d, kind, accumulate, true);
  if ((kind >> 7 & 7) != 1 || (kind >> 10 & 7) != 1)
    fault(T, "tcgen05.mma mxf4nvf4: operands must be E2M1");
  if (kind >> 23 & 1) fault(T, "tcgen05.mma mxf4nvf4: UE8M0 scales are not supported");
  if ((kind >> 4 & 3) || (kind >> 29 & 3))
    fault(T, "tcgen05.mma mxf4nvf4: scale selectors must be 0 for blocks of 16");
  if (kind >> 31) fault(T, "tcgen05.mma: K = 96 is not supported");
  const MatrixDescriptor left = descriptor(T, a), right = descriptor(T, b);
  check_product(T, product, left, right);
  if (T->order)
    for (Cta* cta : product.ctas)
      for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
        check_cells(T, cta, scale_a & ~0xc0000000ull, lane, 0,
                    (product.m / product.ctas.size() + 31) / 32, false);
        check_cells(T, cta, scale_b & ~0xc0000000ull, lane, 0, (product.n + 31) / 32, false);
      }
  enqueue_tensor_work(T, [=] {
    const auto values = [](Cta* cta, const MatrixDescriptor& at, uint32_t row, bool, int16_t* to) {
      for (uint32_t part = 0; part < 32; part += 16) {
        const uint8_t* codes = operand(cta, at, row, part, 16);
        for (uint32_t byte = 0; byte < 16; ++byte) {
          *to++ = kE2m1Halves[codes[byte] & 15];
          *to++ = kE2m1Halves[codes[byte] >> 4];
        }
      }
    };
    const auto scales = [=](Cta* cta, uint32_t row, bool of_a, double* to) {
      const uint64_t at = (of_a ? scale_a : scale_b) & ~0xc0000000ull;
      if (planted(Fault::tcgen05_scale_b) && !of_a) row ^= 1;
      if (planted(Fault::tcgen05_scale_rows)) row %= 128;
      const uint32_t bytes = cell(cta, at, row % 32, row / 32);
      for (uint32_t group = 1; group < 4; ++group)
        if (cell(cta, at, group * 32 + row % 32, row / 32) != bytes)
          fault_work(cta->cluster, "tcgen05.mma: scales differ between the groups of lanes");
      for (int block = 0; block < 4; ++block) to[block] = scale_from_ue4m3(bytes >> (8 * block));
    };
    multiply<64, 4, int16_t>(product, left, right, kQuarter, values, scales);
  });
}

void tensor_multiply_halves(Thread* T, bool pair, uint64_t d, uint64_t a, uint64_t b, uint32_t kind,
                            bool accumulate) {
  const Product product = make_product(T, pair, d, kind, accumulate, false);
  if ((kind >> 4 & 3) != 1) fault(T, "tcgen05.mma kind::f16: D must be f32");
  if ((kind >> 7 & 7) > 1 || (kind >> 10 & 7) > 1)
    fault(T, "tcgen05.mma kind::f16: operands must be f16 or bf16");
  const bool a_bf16 = kind >> 7 & 1, b_bf16 = kind >> 10 & 1;
  const MatrixDescriptor left = descriptor(T, a), right = descriptor(T, b);
  check_product(T, product, left, right);
  enqueue_tensor_work(T, [=] {
    const auto values = [=](Cta* cta, const MatrixDescriptor& at, uint32_t row, bool of_a,
                            double* to) {
      for (uint32_t k = 0; k < 16; ++k) {
        const uint16_t bits = read<uint16_t>(operand(cta, at, row, k / 8 * 16, 16) + k % 8 * 2);
        to[k] = static_cast<double>((of_a ? a_bf16 : b_bf16) ? float_from_bf16(bits)
                                                             : float_from_f16(bits));
      }
    };
    multiply<16, 1, double>(product, left, right, 1, values,
                            [](Cta*, uint32_t, bool, double* to) { *to = 1; });
  });
}

}  // namespace ptxemu
