// Reads every byte of a loaded expert, so that what is not there shows.
#pragma once

#include <cstdint>

#include "checkpoint/checkpoint.h"

namespace nvfp4_moe::test {

inline uint64_t read_all(const LoadedExpert& loaded) {
  uint64_t sum = 0;
  for (const Nvfp4View* view : {&loaded.source.gate, &loaded.source.up, &loaded.source.down})
    for (int64_t r = 0; r < view->rows; ++r) {
      for (int64_t i = 0; i < view->cols / 2; ++i) sum += view->row_codes(r)[i];
      for (int64_t i = 0; i < view->cols / 16; ++i) sum += view->row_scales(r)[i];
    }
  return sum;
}

}  // namespace nvfp4_moe::test
