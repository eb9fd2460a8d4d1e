// The part of a sum that one of several ranks adds.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace nvfp4_moe::internal {

// Elements [first, end) of count. Like count, both are multiples of kUnit, so that the elements of
// one thread are in one shard.
struct Shard {
  static constexpr int64_t kUnit = 8;
  int64_t first, end;

  NVFP4_MOE_HOST_DEVICE static Shard of(int64_t count, int64_t rank, int64_t world) {
    const int64_t units = count / kUnit, each = units / world, rest = units % world;
    const int64_t first = each * rank + (rank < rest ? rank : rest);
    return {first * kUnit, (first + each + (rank < rest ? 1 : 0)) * kUnit};
  }
  NVFP4_MOE_HOST_DEVICE int64_t count() const { return end - first; }
};

}  // namespace nvfp4_moe::internal
