// The functions that translated kernels call: one per instruction, named for what it does.
#pragma once

#include "runtime/atomics.h"
#include "runtime/formats.h"
#include "runtime/machine.h"

namespace ptxemu {

// ---- threads
[[noreturn]] void fault(Thread* T, const char* what);
[[noreturn]] void exit_thread(Thread* T);
void yield(Thread* T);
inline void poll(Thread* T) {
  if ((++T->polls & 15) == 0) yield(T);
}
void sleep_briefly(Thread* T);  // nanosleep
uint64_t clock_now();
uint64_t global_timer();  // nanoseconds of real time
uint64_t variable_address(Thread* T, uint64_t offset);
void launch_dependents(Thread* T);
void wait_for_prerequisites(Thread* T);
void set_max_registers(Thread* T, uint32_t count, bool increase);

// ---- addresses
uint8_t* shared_elsewhere(Thread* T, uint32_t address, uint32_t size);
bool find_allocation(Thread* T, uint64_t address, uint32_t size);
[[noreturn]] void fault_address(Thread* T, const char* space, uint64_t address, uint32_t size);
inline bool misaligned(uint64_t address, uint32_t size) {
  return size <= 32 && (address & (size - 1)) != 0;
}
inline uint8_t* Thread::shared_at(uint64_t address, uint32_t size) {
  const uint32_t low = static_cast<uint32_t>(address), offset = low & 0xffffff;
  if (__builtin_expect((low >> kSharedOffsetBits) != rank || offset + size > shared_end ||
                           offset < kSharedBase || misaligned(low, size),
                       0))
    return shared_elsewhere(this, low, size);
  return shared + offset;
}
inline uint8_t* Thread::global_at(uint64_t address, uint32_t size) {
  if (__builtin_expect(
          address < memory_low || address + size > memory_high || misaligned(address, size), 0))
    if (misaligned(address, size) || !find_allocation(this, address, size))
      fault_address(this, "global", address, size);
  return reinterpret_cast<uint8_t*>(address);
}
inline uint8_t* Thread::local_at(uint64_t address, uint32_t size) {
  if (__builtin_expect(
          address < local_low || address + size > local_high || misaligned(address, size), 0))
    fault_address(this, "local", address, size);
  return reinterpret_cast<uint8_t*>(address);
}
inline bool is_shared(uint64_t address) { return (address >> 56) == (kSharedTag >> 56); }
inline uint64_t generic_to_shared(uint64_t address) { return address & 0xffffffffu; }
inline uint64_t shared_to_generic(uint64_t address) { return kSharedTag | (address & 0xffffffffu); }
inline uint8_t* Thread::generic_at(uint64_t address, uint32_t size) {
  if (is_shared(address)) return shared_at(generic_to_shared(address), size);
  return address >= local_low && address < local_high ? local_at(address, size)
                                                      : global_at(address, size);
}
inline uint64_t map_rank(Thread* T, uint64_t address, uint32_t rank) {
  if (planted(Fault::cluster_rank)) rank = T->rank;
  if (rank >= T->cta->cluster_size) fault(T, "mapa: the cluster has no such rank");
  return (address & 0xffffff) | static_cast<uint64_t>(rank) << kSharedOffsetBits;
}

// ---- warps
enum class Shuffle { kIdx, kUp, kDown, kBfly };
enum class Vote { kBallot, kAny, kAll, kUni };
enum class Reduction {
  kAdd,
  kAnd,
  kOr,
  kXor,
  kMinU32,
  kMaxU32,
  kMinS32,
  kMaxS32,
  kMinF32,
  kMaxF32
};
void warp_sync(Thread* T, uint32_t mask);
uint32_t active_mask(Thread* T);
uint32_t shuffle(Thread* T, Shuffle mode, uint32_t value, uint32_t by, uint32_t clamp,
                 uint32_t mask, bool& in_range);
uint32_t vote(Thread* T, Vote kind, bool predicate, uint32_t mask);
uint32_t match_any(Thread* T, uint64_t value, uint32_t mask);
uint32_t match_all(Thread* T, uint64_t value, uint32_t mask, bool& equal);
uint32_t reduce(Thread* T, Reduction kind, uint32_t value, uint32_t mask);
uint32_t reduce_floats(Thread* T, Reduction kind, bool absolute, bool nan, uint32_t value,
                       uint32_t mask);
bool elect(Thread* T, uint32_t mask, uint32_t& leader);

// ---- barriers
enum class BarrierReduction { kPopc, kAnd, kOr };
void barrier_sync(Thread* T, uint32_t id, uint32_t count);
void barrier_arrive(Thread* T, uint32_t id, uint32_t count);
uint32_t barrier_reduce(Thread* T, uint32_t id, uint32_t count, bool predicate,
                        BarrierReduction kind);
void cluster_arrive(Thread* T, bool release);
void cluster_wait(Thread* T);
void mbarrier_init(Thread* T, uint64_t address, uint32_t count);
void mbarrier_invalidate(Thread* T, uint64_t address);
void mbarrier_expect(Thread* T, uint64_t address, uint32_t bytes);
void mbarrier_complete(Thread* T, uint64_t address, uint32_t bytes);
uint64_t mbarrier_arrive(Thread* T, uint64_t address, uint32_t count, bool drop, bool release);
bool mbarrier_wait(Thread* T, uint64_t address, uint32_t phase, bool blocking, bool acquire);
uint32_t mbarrier_pending(uint64_t state);

// ---- copies
void store_async(Thread* T, uint64_t to, const void* values, uint32_t size, uint64_t barrier);
void copy_async(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint32_t source_bytes);
void copy_async_commit(Thread* T);
void copy_async_wait(Thread* T, uint32_t groups_left);
void copy_async_wait_all(Thread* T);
void copy_async_arrive(Thread* T, uint64_t barrier, bool counted);
void bulk_commit(Thread* T);
void bulk_wait(Thread* T, uint32_t groups_left, bool reads_alone);
void bulk_load(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint64_t barrier,
               bool multicast, uint32_t mask);
void bulk_store(Thread* T, uint64_t to, uint64_t from, uint32_t size);
void bulk_exchange(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint64_t barrier);
void bulk_add(Thread* T, uint64_t to, uint64_t from, uint32_t size, bool floats);
template <class V>
void bulk_reduce(Thread* T, uint64_t to, uint64_t from, uint32_t size) {
  bulk_add(T, to, from, size, std::is_same<V, float>::value);
}
void tensor_load(Thread* T, int rank, uint64_t to, uint64_t map, const int32_t* at,
                 uint64_t barrier, bool multicast, uint32_t mask, bool pair);
void tensor_store(Thread* T, int rank, uint64_t map, const int32_t* at, uint64_t from, bool add);
enum class TensorMapField {
  kGlobalAddress,
  kGlobalDim,
  kGlobalStride,
  kBoxDim,
  kElementStride,
  kRank
};
void tensor_map_replace(Thread* T, uint8_t* map, TensorMapField field, uint32_t ordinal,
                        uint64_t value);
void tensor_map_copy(Thread* T, uint64_t to, uint64_t from);
void cancel_cluster(Thread* T, uint64_t to, uint64_t barrier, bool all);
inline bool was_canceled(u128 answer) { return static_cast<bool>(answer >> 127); }
inline uint32_t canceled_ctaid(u128 answer, int axis) {
  return axis == 0   ? static_cast<uint32_t>(answer)
         : axis == 3 ? 0
                     : static_cast<uint32_t>(answer >> (16 + 16 * axis)) & 0xffffu;
}

// ---- matrices
void load_matrix(Thread* T, int count, bool transposed, uint64_t address, uint32_t* to);
void store_matrix(Thread* T, int count, bool transposed, uint64_t address, const uint32_t* from);
void load_byte_matrix(Thread* T, int count, uint32_t bits, uint64_t address, uint32_t* to);
void load_byte_matrix_transposed(Thread* T, int count, uint32_t bits, uint64_t address,
                                 uint32_t* to);
void store_byte_matrix(Thread* T, int count, uint64_t address, const uint32_t* from);
uint32_t transpose_matrix(Thread* T, uint32_t value);
enum class MmaType {
  kF16,
  kBf16,
  kTf32,
  kF32,
  kF64,
  kE4M3,
  kE5M2,
  kE2M3,
  kE3M2,
  kE2M1,
  kS8,
  kU8,
  kS4,
  kU4,
  kB1And,
  kB1Xor,
  kS32
};
struct MmaForm {
  int m, k;  // n is 8
  MmaType a, b, d;
  bool saturates;
};
void multiply_matrices(Thread* T, MmaForm form, void* d, const void* a, const void* b,
                       const void* c);
struct BlockScales {
  uint32_t bytes, byte_id, thread_id;
};
void multiply_block_scaled(Thread* T, int blocks, bool ue8m0, BlockScales scale_a,
                           BlockScales scale_b, uint32_t* d, const uint32_t* a, const uint32_t* b,
                           const uint32_t* c);
void multiply_scaled_rows(Thread* T, MmaForm form, BlockScales scale_a, BlockScales scale_b,
                          uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
enum class WgmmaType { kF16, kBf16, kE4M3, kE5M2 };
void wgmma_issue(Thread* T, int n, WgmmaType a_type, WgmmaType b_type, const uint32_t* a,
                 uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate, uint32_t* const* d);
void wgmma_fence(Thread* T);
void wgmma_commit(Thread* T);
void wgmma_wait(Thread* T, uint32_t groups_left);
void copy_in_flight(Thread* T, uint32_t* to, const uint32_t* from);
void drop_in_flight(Thread* T, const uint32_t* to);

// ---- tensor memory
enum class TensorShape { k32x32b, k16x64b, k16x32bx2, k16x128b, k16x256b };
struct TensorAccess {
  TensorShape shape;
  bool packed;     // .pack::16b and .unpack::16b
  uint32_t split;  // of 16x32bx2, in columns
  uint64_t address;
};
enum class TensorCopy { k128x256b, k4x256b, k128x128b, k64x128b02, k64x128b01, k32x128b };
void tensor_alloc(Thread* T, bool pair, uint64_t to, uint32_t columns);
void tensor_dealloc(Thread* T, bool pair, uint32_t address, uint32_t columns);
void tensor_relinquish(Thread* T, bool pair);
void tensor_wait_load(Thread* T);
void tensor_wait_store(Thread* T);
void tensor_commit(Thread* T, bool pair, uint64_t barrier, bool multicast, uint32_t mask);
void tensor_copy(Thread* T, bool pair, TensorCopy copy, uint64_t to, uint64_t descriptor);
void tensor_load_registers(Thread* T, TensorAccess access, int count, uint32_t* const* to);
void tensor_store_registers(Thread* T, TensorAccess access, int count, const uint32_t* from);
enum class TensorKind { kF16, kTf32, kF8f6f4, kI8, kMxf8f6f4, kMxf4, kMxf4nvf4 };
struct TensorProduct {
  TensorKind kind;
  bool pair;
  uint64_t d, a, b;
  uint32_t descriptor;
  bool accumulate;
  int blocks;  // of scales along K; 0 without
  uint64_t scale_a, scale_b;
};
void tensor_multiply(Thread* T, TensorProduct product);
inline void require_no_lane_mask(Thread* T, uint32_t mask) {
  if (mask) fault(T, "tcgen05.mma with disabled output lanes is not supported");
}

}  // namespace ptxemu
