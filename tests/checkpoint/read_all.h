// The bytes of a loaded expert: of a matrix in a row, or all of them read, so that what is not there shows.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::internal::test {

// The bytes of a matrix's codes and block scales, row after row.
inline std::vector<uint8_t> codes_of(const Nvfp4View& view) {
  std::vector<uint8_t> out;
  for (int64_t r = 0; r < view.rows; ++r) out.insert(out.end(), view.row_codes(r), view.row_codes(r) + view.cols / 2);
  return out;
}
inline std::vector<uint8_t> scales_of(const Nvfp4View& view) {
  std::vector<uint8_t> out;
  for (int64_t r = 0; r < view.rows; ++r)
    out.insert(out.end(), view.row_scales(r), view.row_scales(r) + view.cols / 16);
  return out;
}

inline uint64_t read_all(const LoadedExpert& loaded) {
  uint64_t sum = 0;
  for (const Nvfp4View* view : {&loaded.source.gate, &loaded.source.up, &loaded.source.down})
    for (const auto& bytes : {codes_of(*view), scales_of(*view)})
      sum = std::accumulate(bytes.begin(), bytes.end(), sum);
  return sum;
}

}  // namespace nvfp4_moe::internal::test
