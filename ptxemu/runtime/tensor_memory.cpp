// tcgen05: tensor memory of 128 lanes by 512 columns a cta, its copies, and accesses by warps.
//
// Work is queued per issuing thread and done in that thread's order. Accesses to columns that are
// not allocated fault.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "runtime/tensor_cells.h"

namespace ptxemu {
namespace {

constexpr uint32_t kTensorPoison = 0x7ffc0dea;  // a NaN, so that sums with it are NaN

// The position of register i of a lane for a shape, relative to the address.
void place(TensorShape shape, uint32_t i, uint32_t lane, uint32_t& row, uint32_t& column) {
  switch (shape) {
    case TensorShape::k32x32b: row = lane, column = i; break;
    case TensorShape::k16x64b:
      row = lane / 4 + 8 * (lane & 1), column = 2 * i + (lane >> 1 & 1);
      if (planted(Fault::tensor_load_16x64b)) row = lane / 4 + 8 * (lane >> 1 & 1);
      break;
    case TensorShape::k16x32bx2: row = lane % 16, column = i; break;
    case TensorShape::k16x128b: row = lane / 4 + 8 * (i & 1), column = i / 2 * 4 + lane % 4; break;
    case TensorShape::k16x256b:
      row = lane / 4 + 8 * (i >> 1 & 1), column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
      if (planted(Fault::tensor_load_repeats)) column -= i / 4 * 4;
      if (planted(Fault::tensor_load_rows)) row ^= 8;
      break;
  }
}

// The cells of register i of a lane: one of 32 bits, or two of 16 with .pack and .unpack. Lanes 16
// to 31 of 16x32bx2 begin `split` columns further.
template <class F>
void each_cell(Cta* cta, const TensorAccess& access, uint32_t i, uint32_t lane, F with) {
  uint32_t row = 0, column = 0;
  place(access.shape, i, lane, row, column);
  if (access.packed) column *= 2;
  if (access.shape == TensorShape::k16x32bx2 && lane >= 16 && !planted(Fault::tensor_load_split))
    column += access.split;
  for (uint32_t part = 0; part < (access.packed ? 2u : 1u); ++part)
    with(cell(cta, access.address, row, column + part), part);
}

// A warp reaches the 32 lanes of its number in its warpgroup. Shapes of 16 lanes begin at the first
// or in the middle.
//
// PTXEMU_TENSOR_LANES=ignored: the two bits of the warp's number do not count. The manual requires
// them, but DeepGEMM leaves them out, because silicon ignores them.
void check_lanes(Thread* T, TensorAccess& access, const char* what) {
  const TensorShape shape = access.shape;
  const char* asked = std::getenv("PTXEMU_TENSOR_LANES");
  if (asked && !std::strcmp(asked, "ignored"))
    access.address = (access.address & ~0x600000ull) | (T->warp->index % 4 * 0x200000u);
  const uint32_t lane = static_cast<uint32_t>(access.address >> 16 & 0xffff);
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

namespace {

// The rows of a copy and their bytes, and how often each is copied.
struct CopyShape {
  uint32_t rows, bytes, times;
};
constexpr CopyShape kCopies[] = {{128, 32, 1}, {4, 32, 1},  {128, 16, 1},
                                 {64, 16, 2},  {64, 16, 2}, {32, 16, 4}};

uint32_t copy_lane(TensorCopy copy, uint32_t row, uint32_t time) {
  if (planted(Fault::tensor_copy_halves) && copy == TensorCopy::k64x128b01)
    copy = TensorCopy::k64x128b02;
  switch (copy) {
    case TensorCopy::k4x256b: return 32 * row;
    case TensorCopy::k64x128b02: return row + 64 * time;
    case TensorCopy::k64x128b01: return row % 32 + row / 32 * 64 + 32 * time;
    default: return row + 32 * time;
  }
}

}  // namespace

void tensor_copy(Thread* T, bool pair, TensorCopy copy, uint64_t to, uint64_t bits) {
  const MatrixDescriptor at = tensor_descriptor(T, bits);
  CopyShape shape = kCopies[static_cast<int>(copy)];
  if (planted(Fault::tcgen05_cp_lanes)) shape.times = 1;
  for (Cta* cta : partners(T, pair)) {
    if (T->order) {
      check_operand(T, cta, at, shape.rows, shape.bytes);
      for (uint32_t row = 0; row < shape.rows; ++row)
        for (uint32_t time = 0; time < shape.times; ++time)
          check_cells(T, cta, to, copy_lane(copy, row, time), 0, shape.bytes / 4, true);
    }
    enqueue_tensor_work(T, [=] {
      for (uint32_t row = 0; row < shape.rows; ++row)
        for (uint32_t word = 0; word < shape.bytes / 4; ++word)
          for (uint32_t time = 0; time < shape.times; ++time)
            cell(cta, to, copy_lane(copy, row, time), word) =
                read<uint32_t>(operand(cta, at, row, 4 * word, 4));
    });
  }
}

void tensor_load_registers(Thread* T, TensorAccess access, int count, uint32_t* const* to) {
  struct Lane {
    uint32_t* const* to;
    uint64_t address;
    Thread* thread;
  } mine{to, access.address, T};
  meet(T, 0, "aligned tcgen05.ld", &mine, true, [=](void** lanes, uint32_t) {
    TensorAccess checked = access;
    check_lanes(T, checked, "tcgen05.ld");
    if (planted(Fault::tensor_memory_columns)) ++checked.address;
    const bool wait = loads_wait();
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const Lane& x = *static_cast<Lane*>(lanes[lane]);
      if (x.address != access.address)
        fault(T, "tcgen05.ld: lanes of a warp disagree about the address");
      for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        uint32_t value = 0;
        each_cell(T->cta, checked, i, lane, [&](uint32_t& from, uint32_t part) {
          check_tensor(T, TensorAgent::kLoad, &from, 4, false);
          const uint32_t half = planted(Fault::tensor_load_packed) ? from >> 16 : from & 0xffff;
          value |= access.packed ? half << (16 * part) : from;
        });
        if (wait) x.thread->tensor_loads.emplace_back(x.to[i], value);
        *x.to[i] = wait ? kTensorPoison : value;
      }
    }
  });
}

void tensor_store_registers(Thread* T, TensorAccess access, int count, const uint32_t* from) {
  meet(T, 0, "aligned tcgen05.st", const_cast<uint32_t*>(from), true, [=](void** lanes, uint32_t) {
    TensorAccess checked = access;
    check_lanes(T, checked, "tcgen05.st");
    for (uint32_t lane = 0; lane < 32; ++lane)
      for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        const uint32_t value = static_cast<uint32_t*>(lanes[lane])[i];
        each_cell(T->cta, checked, i, lane, [&](uint32_t& to, uint32_t part) {
          check_tensor(T, TensorAgent::kStore, &to, 4, true);
          // The upper half of a cell that gets 16 bits is poison.
          to = access.packed ? (kTensorPoison & 0xffff0000u) | (value >> (16 * part) & 0xffff)
                             : value;
        });
      }
  });
}

}  // namespace ptxemu
