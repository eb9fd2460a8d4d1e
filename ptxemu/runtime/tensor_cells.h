// Shared by copies and products of tcgen05: cells of tensor memory, operands in shared memory, and
// pairs of ctas.
#pragma once

#include <vector>

#include "runtime/control.h"

namespace ptxemu {

inline uint32_t& cell(Cta* cta, uint64_t address, uint32_t lane, uint32_t column) {
  lane += static_cast<uint32_t>(address >> 16 & 0x3fff);
  column += static_cast<uint32_t>(address & 0xffff);
  if (lane >= kTensorLanes || column >= kTensorColumns || !cta->tensor.owner[column / 32])
    fault_work(cta->cluster, "tensor memory that is not allocated");
  return cta->tensor.cells[lane * kTensorColumns + column];
}

inline MatrixDescriptor tensor_descriptor(Thread* T, uint64_t x) {
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

inline const uint8_t* operand(Cta* cta, const MatrixDescriptor& at, uint32_t row, uint32_t byte,
                              uint32_t size) {
  const uint32_t offset = at.at(row, byte);
  if (offset + size > cta->shared_bytes)
    fault_work(cta->cluster, "tcgen05 reads outside the cta's shared memory");
  return cta->shared + offset;
}

// For the checker of order: rows of an operand in shared memory, and columns of a lane of tensor
// memory.
inline void check_operand(Thread* T, Cta* cta, const MatrixDescriptor& at, uint32_t rows,
                          uint32_t bytes) {
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t byte = 0; byte < bytes; byte += 16)
      if (const uint32_t offset = at.at(row, byte); offset + 16 <= cta->shared_bytes)
        check_tensor_operand(T, cta->shared + offset, 16);
}
inline void check_cells(Thread* T, Cta* cta, uint64_t address, uint32_t lane, uint32_t column,
                        uint32_t columns, bool write) {
  if (columns == 0) return;
  cell(cta, address, lane, column + columns - 1);
  check_tensor(T, TensorAgent::kQueue, &cell(cta, address, lane, column), 4 * columns, write);
}

// The ctas that take part: one, or the even and the odd one of a pair.
inline std::vector<Cta*> partners(Thread* T, bool pair) {
  if (!pair) return {T->cta};
  const auto& ctas = T->cta->cluster->ctas;
  if (ctas.size() % 2) fault(T, "tcgen05 with cta_group::2: the cluster has an odd number of ctas");
  return {ctas[T->rank & ~1u].get(), ctas[T->rank | 1].get()};
}

}  // namespace ptxemu
