// Writes a packet to the memory of its expert rank, from a CTA that has the token
// (backend/device_peers.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/exchange/packets.cuh"
#include "backend/cuda/exchange/peers.cuh"

namespace nvfp4_moe::internal::cuda {

// Waits until the rank has taken the packets of the previous run. Called by one thread.
__device__ inline bool packets_are_taken(const PeerLink& link, int rank) {
  const PeerControl* const own = link.wait.control;
  const uint64_t before = word_from_l2(own->dispatch_of_rows);
  const auto taken = [&] { return ptx::load_acquire_system(&own->taken[rank]) >= before; };
  return wait_for_rank(
      link.wait, [&] { return rank; }, taken);
}
// Called by one thread of the kernel that begins a run. Kernels that read this word run after it.
__device__ inline void begin_dispatch(const PeerLink& link) {
  link.wait.control->dispatch = link.wait.control->dispatch_of_rows + 1;
}

__device__ inline void push_packet(const PushPackets& call, int64_t token, int rank,
                                   ThreadGroup group) {
  const int64_t top_k = call.packet.top_k;
  const int32_t first = call.from.first_of_rank[rank], end = call.from.first_of_rank[rank + 1];
  bool any = false;
  for (int64_t k = 0; k < top_k; ++k) {
    const int32_t slot = call.from.slots[token * top_k + k];
    any |= slot >= first && slot < end;
  }
  std::byte* const to = call.packets.of_rank[rank] +
                        (call.link.rank * call.packet_stride + token) * call.packet.bytes;
  const PacketOfToken of_token{call.packet, call.from.arrays, call.from.slots, call.from.weights};
  if (any)
    of_token.put(to, token, first, end, group);
  else
    of_token.put_none(to, group);
}

// Called by one thread, after a barrier of the threads that wrote the packet.
__device__ inline void flag_packet(const PushPackets& call, int64_t token, int rank) {
  auto* const flags = reinterpret_cast<uint32_t*>(call.flags.of_rank[rank]);
  ptx::store_release_system(flags + call.link.rank * call.packet_stride + token,
                            flag_of_packets(call.link.wait.control));
}

}  // namespace nvfp4_moe::internal::cuda
