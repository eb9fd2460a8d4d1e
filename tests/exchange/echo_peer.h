// Rank 1 of a world of two, as rank 0's callbacks see it. It sends what rank 0 would send in its
// place, unless a test or a fuzzer alters it; so every unaltered message of an opening and of a run
// is valid. Without GoogleTest, for fuzz targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>

namespace nvfp4_moe::internal::test {

struct EchoPeer {
  // call: the number of calls before it. received: rank 1's block.
  std::function<void(int64_t call, std::span<std::byte> received)> change;
  bool spoils = false;  // alters what rank 0 sent to itself
  int64_t calls = 0;

  static int32_t all_to_all_v(void* user, const void* send, const int64_t* send_bytes, void* recv,
                              const int64_t* recv_bytes, int64_t, char*, size_t) {
    auto& self = *static_cast<EchoPeer*>(user);
    const auto* const own = static_cast<const std::byte*>(send);
    auto* const kept = static_cast<std::byte*>(recv);
    const int64_t size = recv_bytes[1];
    if (recv_bytes[0] > 0) std::memcpy(kept, own, static_cast<size_t>(recv_bytes[0]));
    std::byte* const received = kept + recv_bytes[0];
    if (size > 0) std::memset(received, 0, static_cast<size_t>(size));
    // Rank 1's data for this rank are a copy of this rank's own; in a gather both blocks are the
    // same.
    const int64_t echoed = size < send_bytes[0] ? size : send_bytes[0];
    if (echoed > 0) std::memcpy(received, own, static_cast<size_t>(echoed));
    constexpr int32_t kRank = 1;
    if (self.calls == 0)
      std::memcpy(received + sizeof(uint64_t), &kRank, sizeof(kRank));  // its handshake
    if (self.change) self.change(self.calls, {received, static_cast<size_t>(size)});
    if (self.spoils && recv_bytes[0] > 0) kept[0] = ~kept[0];
    ++self.calls;
    return 0;
  }
};

}  // namespace nvfp4_moe::internal::test
