// Software prefetch of a strip's bytes. It doubles the speed of a GEMV, since a core's own
// prefetchers stop at 4 KB pages.
#pragma once

#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/panel.h"

namespace nvfp4_moe::internal::cpu {

// The cache that prefetches fill. L2 by default: 64 bytes on their way to L1 occupy one of its few
// miss buffers as long as memory takes, which halves what a Zen 4 core reads. On a Xeon with AMX
// few rows are 1 to 4 % faster if weights go to L1. Tiles are slower then: they need L1 for
// themselves.
enum class PrefetchInto { kL1, kL2 };

// How far ahead: 3.5 KB of each panel into L2, 1.7 KB into L1. For L2, distances from 2.3 to 4.6 KB
// differed little on two hosts, smaller and larger ones were slower.
constexpr int64_t ahead_chunks(PrefetchInto into) { return into == PrefetchInto::kL2 ? 6 : 3; }

// Prefetches the chunk ahead_chunks after chunk c of one panel, in the strip or in what comes after
// it. Always inlined: GCC considers a function that only prefetches to have no effect, and removes
// calls of it.
template <PrefetchInto kInto = PrefetchInto::kL2>
[[gnu::always_inline]] inline void prefetch_ahead(const Strip& strip, int64_t panel, int64_t c) {
  constexpr int64_t kAhead = ahead_chunks(kInto);
  constexpr int kLocality = kInto == PrefetchInto::kL2 ? 2 : 3;
  const int64_t beyond = c + kAhead - strip.chunks;
  const uint8_t* bytes =
      beyond < 0 ? strip.bytes + (c + kAhead) * kChunkBytes : strip.next + beyond * kChunkBytes;
  bytes += panel * strip.chunks * kChunkBytes;
#pragma GCC unroll 9
  for (int64_t offset = 0; offset < kChunkBytes; offset += 64)
    __builtin_prefetch(bytes + offset, 0, kLocality);
}

// Chunk c of every panel of a strip, for kernels that read all panels at the same time. Prefetches
// what they read later.
template <int kPanels, PrefetchInto kInto = PrefetchInto::kL2>
struct Chunks {
  const uint8_t* bytes[kPanels];  // (576) each

  [[gnu::always_inline]] Chunks(const Strip& strip, int64_t c) {
    for (int p = 0; p < kPanels; ++p) {
      prefetch_ahead<kInto>(strip, p, c);
      bytes[p] = strip.bytes + (p * strip.chunks + c) * kChunkBytes;
    }
  }
};

}  // namespace nvfp4_moe::internal::cpu
