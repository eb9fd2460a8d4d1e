// Shared by the kernels of a layer over ranks: packet addresses, and copies by a CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backend/cuda/steps/thread_group.cuh"
#include "backend/device_exchange.h"

namespace nvfp4_moe::internal::cuda {

inline constexpr int kPacketThreads = 128;  // per packet
inline constexpr uint32_t kOverflowed = 1, kWrong = 2, kPeerIsLate = 4,
                          kLinkFailed = 8;  // reasons why a run's out is NaN

// Address of packet `packet`, counted over all messages. It is in the message to or from `rank`.
__device__ inline std::byte* packet_at(const MessageLayout& layout, std::byte* messages,
                                       int64_t rank, int64_t packet) {
  return messages + packet * layout.packet.bytes + (rank + 1) * layout.header_bytes;
}
// The header of rank's message. first_packet: its first packet, counted over all messages.
__device__ inline MessageHeader* header_at(const MessageLayout& layout, std::byte* messages,
                                           int64_t rank, int64_t first_packet) {
  return reinterpret_cast<MessageHeader*>(packet_at(layout, messages, rank - 1, first_packet));
}

// Copies vectors group.rank, group.rank + group.size, ... A thread reads kAtOnce vectors before it
// writes any of them.
template <class Vector>
__device__ void copy_vectors(Vector* to, const Vector* from, int64_t count, ThreadGroup group) {
  constexpr int kAtOnce = 4;
  for (int64_t first = group.rank; first < count; first += kAtOnce * group.size) {
    Vector read[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * group.size < count) read[i] = from[first + i * group.size];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * group.size < count) to[first + i * group.size] = read[i];
  }
}
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes,
                                  ThreadGroup group = ThreadGroup::cta()) {
  const auto misaligned =
      reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (misaligned % 16 == 0)
    copy_vectors(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), bytes / 16,
                 group);
  else if (misaligned % 8 == 0)
    copy_vectors(reinterpret_cast<uint2*>(to), reinterpret_cast<const uint2*>(from), bytes / 8,
                 group);
  else
    copy_vectors(to, from, bytes, group);
}

// Writes a source rank's token as a packet for the rank that has slots [first, end). The caller
// writes first_row.
struct PacketOfToken {
  const PacketFormat& packet;
  const WireArray (&arrays)[kWireArrays];
  const int32_t* slots;  // (T, k)
  const float* weights;  // (T, k)

  // For a token without slots on the rank.
  __device__ void put_none(std::byte* to, ThreadGroup group) const {
    for (int64_t k = group.rank; k < packet.top_k; k += group.size) put_slot(to, k, -1, 0);
  }
  __device__ void put(std::byte* to, int64_t token, int32_t first, int32_t end,
                      ThreadGroup group) const {
    // Read small fields before writing large ones, since each read has the latency of a large one.
    const SmallBytes small(*this, token, group);
    const int64_t assignment = token * packet.top_k;
    const bool has_slot = group.rank < packet.top_k;
    const int32_t slot = has_slot ? slots[assignment + group.rank] : -1;
    const float weight = has_slot ? weights[assignment + group.rank] : 0;
    int64_t offset = 0;
#pragma unroll
    for (const WireArray& array : arrays) {
      if (array.row_bytes >= kSmallBytes)
        copy_bytes(to + offset, static_cast<const std::byte*>(array.rows) + token * array.row_bytes,
                   array.row_bytes, group);
      offset += array.row_bytes;
    }
    small.put(to);
    if (has_slot) put_slot_of(to, group.rank, slot, weight, first, end);
    for (int64_t k = group.rank + group.size; k < packet.top_k; k += group.size)
      put_slot_of(to, k, slots[assignment + k], weights[assignment + k], first, end);
    for (int64_t i = offset + group.rank; i < packet.slots_at; i += group.size)
      to[i] = std::byte{0};
    for (int64_t i = packet.first_row_at + 4 + group.rank; i < packet.bytes; i += group.size)
      to[i] = std::byte{0};
  }

 private:
  static constexpr int64_t kSmallBytes = 8;  // smaller arrays hold one scale or flag

  // One byte of the small arrays for each of the group's first threads.
  struct SmallBytes {
    int64_t at = -1;
    std::byte value{};
    __device__ SmallBytes(const PacketOfToken& of, int64_t token, ThreadGroup group) {
      int64_t offset = 0;
      const std::byte* from = nullptr;
      int next = 0;  // the thread that has the array's first byte
#pragma unroll
      for (const WireArray& array : of.arrays) {
        const auto bytes = static_cast<int>(array.row_bytes);
        if (bytes < kSmallBytes) {
          const int own = group.rank - next;
          if (own >= 0 && own < bytes) {
            at = offset + own;
            from = static_cast<const std::byte*>(array.rows) + token * bytes + own;
          }
          next += bytes;
        }
        offset += array.row_bytes;
      }
      if (at >= 0) value = *from;
    }
    __device__ void put(std::byte* to) const {
      if (at >= 0) to[at] = value;
    }
  };

  __device__ void put_slot_of(std::byte* to, int64_t k, int32_t slot, float weight, int32_t first,
                              int32_t end) const {
    const bool own = slot >= first && slot < end;
    put_slot(to, k, own ? slot : -1, own ? weight : 0);
  }
  __device__ void put_slot(std::byte* to, int64_t k, int32_t slot, float weight) const {
    reinterpret_cast<int32_t*>(to + packet.slots_at)[k] = slot;
    reinterpret_cast<float*>(to + packet.weights_at)[k] = weight;
  }
};

}  // namespace nvfp4_moe::internal::cuda
