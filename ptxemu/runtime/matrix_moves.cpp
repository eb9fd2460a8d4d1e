// ldmatrix, stmatrix and movmatrix: 8 x 8 matrices of 16 bits, and their forms of 8 bits and less.
#include <cstring>

#include "runtime/control.h"

namespace ptxemu {
namespace {

struct MatrixLane {
  Thread* thread;
  uint64_t address;
  uint32_t* registers;
};

// Row r of matrix i: 16 bytes at the address of lane `first` + r.
uint8_t* row_at(void** lanes, int lane, bool write) {
  const MatrixLane& x = *static_cast<MatrixLane*>(lanes[lane]);
  uint8_t* row = x.thread->shared_at(x.address, 16);
  if (x.thread->order)
    write ? check_write(x.thread, row, 16) : check_collective(x.thread, row, 16, false);
  return row;
}

// 16 values of 4 or 6 bits, which padding fills up to 16 bytes, each in the lower bits of a byte.
void widen(uint32_t bits, const uint8_t* from, uint8_t* to) {
  if (bits == 8 || planted(Fault::ldmatrix_padding)) {
    std::memcpy(to, from, 16);
    return;
  }
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t at = bits * i, pair = from[at / 8] | from[at / 8 + 1] << 8;
    to[i] = static_cast<uint8_t>(pair >> at % 8 & ((1u << bits) - 1));
  }
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

// m8n16: lane 4 r + q gets bytes 4 q and up of row r.
void load_byte_matrix(Thread* T, int count, uint32_t bits, uint64_t address, uint32_t* to) {
  MatrixLane mine{T, address, to};
  meet(T, 0, "aligned ldmatrix", &mine, true, [=](void** lanes, uint32_t) {
    for (int i = 0; i < count; ++i)
      for (int row = 0; row < 8; ++row) {
        uint8_t bytes[16];
        widen(bits, row_at(lanes, i * 8 + row, false), bytes);
        for (int q = 0; q < 4; ++q)
          static_cast<MatrixLane*>(lanes[row * 4 + q])->registers[i] =
              read<uint32_t>(bytes + 4 * q);
      }
  });
}

// m16n16.trans: lane 4 g + q gets rows 4 q to 4 q + 3 of column g, and in its second register those
// of column g + 8.
void load_byte_matrix_transposed(Thread* T, int count, uint32_t bits, uint64_t address,
                                 uint32_t* to) {
  MatrixLane mine{T, address, to};
  meet(T, 0, "aligned ldmatrix", &mine, true, [=](void** lanes, uint32_t) {
    for (int i = 0; i < count; ++i) {
      uint8_t matrix[16][16];
      for (int row = 0; row < 16; ++row)
        widen(bits, row_at(lanes, i * 16 + row, false), matrix[row]);
      for (int lane = 0; lane < 32; ++lane)
        for (int half = 0; half < 2; ++half) {
          uint32_t word = 0;
          for (int byte = 0; byte < 4; ++byte) {
            const int row = lane % 4 * 4 + byte, column = lane / 4 + 8 * half;
            word |=
                uint32_t{planted(Fault::ldmatrix_bytes) ? matrix[column][row] : matrix[row][column]}
                << (8 * byte);
          }
          static_cast<MatrixLane*>(lanes[lane])->registers[2 * i + half] = word;
        }
    }
  });
}

// m16n8.trans: each register of lane 4 g + q has rows 2 q and 2 q + 1 of column g, then of column
// g + 8.
void store_byte_matrix(Thread* T, int count, uint64_t address, const uint32_t* from) {
  uint32_t values[4];
  std::copy(from, from + count, values);
  MatrixLane mine{T, address, values};
  meet(T, 0, "aligned stmatrix", &mine, true, [=](void** lanes, uint32_t) {
    for (int i = 0; i < count; ++i)
      for (int row = 0; row < 8; ++row) {
        uint8_t* to = row_at(lanes, i * 8 + row, true);
        for (int column = 0; column < 16; ++column) {
          const int lane = column % 8 * 4 + row / 2,
                    byte = row % 2 + (planted(Fault::stmatrix_bytes) ? 0 : column / 8 * 2);
          to[column] = static_cast<uint8_t>(static_cast<MatrixLane*>(lanes[lane])->registers[i] >>
                                            (8 * byte));
        }
      }
  });
}

// Lane 4 r + q has elements 2 q and 2 q + 1 of row r, and gets those of column r.
uint32_t transpose_matrix(Thread* T, uint32_t value) {
  struct Lane {
    uint32_t value, result;
  } mine{value, 0};
  meet(T, 0, "aligned movmatrix", &mine, true, [](void** lanes, uint32_t) {
    const auto element = [&](int row, int column) {
      return static_cast<Lane*>(lanes[row * 4 + column / 2])->value >> (16 * (column % 2)) & 0xffff;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int column = lane / 4, row = lane % 4 * 2;
      static_cast<Lane*>(lanes[lane])->result =
          planted(Fault::movmatrix_rows) ? static_cast<Lane*>(lanes[lane])->value
                                         : element(row, column) | element(row + 1, column) << 16;
    }
  });
  return mine.result;
}

}  // namespace ptxemu
