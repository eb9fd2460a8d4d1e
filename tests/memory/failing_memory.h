// Memory that fails on request: malloc and similar functions, mmap and thread creation, for the
// whole process.
//
// failing_memory.cpp defines those functions. It is linked into this room's tests, and is also a
// shared object that a child process preloads (NVFP4_MOE_FAIL_AT, NVFP4_MOE_FAIL_ALL). Sanitizers
// have their own malloc: with them it defines nothing, and kFailingMemory is false.
#pragma once

#include <cstdint>

#ifdef NVFP4_MOE_SANITIZED
#define NVFP4_MOE_FAILING_MEMORY 0
#else
#define NVFP4_MOE_FAILING_MEMORY 1
#endif

namespace nvfp4_moe::internal::test {

inline constexpr bool kFailingMemory = NVFP4_MOE_FAILING_MEMORY != 0;

enum class Failing { kOne, kAllFrom };

// From now on requests are counted from 1, and number `at` fails; under kAllFrom all later ones
// fail too.
void fail_memory(int64_t at, Failing failing);
struct MemoryRequests {
  int64_t asked = 0;
  int64_t refused = 0;
};
// The requests since fail_memory; from now on none fails.
MemoryRequests stop_failing();
// Blocks and mappings that were allocated and not freed.
int64_t live_blocks();
// The bytes of malloc's blocks in use, from which a new peak starts; and that peak.
int64_t start_peak();
int64_t peak_bytes();

}  // namespace nvfp4_moe::internal::test
