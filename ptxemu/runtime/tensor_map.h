// The 128 bytes of a tensor map, in our own layout, because the hardware's is not documented.
#pragma once

#include <cstdint>

namespace ptxemu {

struct TensorMap {
  static constexpr uint32_t kMagic = 0x7e450a9d;
  uint64_t address;
  uint32_t magic;
  uint8_t type, rank, interleave,
      swizzle;       // CUtensorMapDataType, dimensions, CUtensorMapInterleave, CUtensorMapSwizzle
  uint32_t dims[5];  // elements; 0 means 2^32
  uint64_t strides[4];  // bytes, of dimensions 1 to 4
  uint16_t box[5];      // elements
  uint8_t element_strides[5];
  uint8_t fill, promotion;
  uint8_t unused[13];

  uint64_t dim(int i) const { return dims[i] ? dims[i] : 1ull << 32; }
  uint32_t element_bits() const {
    static constexpr uint8_t kBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
    return kBits[type];
  }
  // 16U4_ALIGN16B: 16 elements of four bits fill half of 16 bytes in shared memory.
  bool spread() const { return type == 14; }
  uint32_t row_bytes() const { return spread() ? box[0] : box[0] * element_bits() / 8; }
  uint32_t box_bytes() const {
    uint32_t bytes = row_bytes();
    for (int i = 1; i < rank; ++i) bytes *= box[i];
    return bytes;
  }
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace ptxemu
