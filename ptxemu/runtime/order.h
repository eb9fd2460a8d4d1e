// Calls with which translated kernels report to the checker of order (order/), if
// PTXEMU_CHECK=order is set.
//
// Kernels are translated separately for it, with PTXEMU_CHECK defined. Without it the calls compile
// to nothing.
#pragma once

#include <cstdint>

namespace ptxemu {

struct Thread;

enum class Scope : uint8_t { kCta, kCluster, kGpu, kSys };
enum class Semantics : uint8_t { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Strong : uint8_t { kRead, kWrite, kUpdate };

#ifdef PTXEMU_CHECK
constexpr bool kChecked = true;
#else
constexpr bool kChecked = false;
#endif

// ---- accesses of the generic proxy. coherent: false for ld.global.nc
void check_read(Thread* T, const uint8_t* at, uint32_t size, bool coherent);
void check_write(Thread* T, const uint8_t* at, uint32_t size);
// The same for a store. A store that does not change the bytes cannot be observed.
void check_before_store(Thread* T, const uint8_t* at, uint32_t size);
void check_after_store(Thread* T, const uint8_t* at, uint32_t size);
// Atomic operations, and loads and stores that are volatile, relaxed, acquire or release. Before
// the access itself.
void check_strong(Thread* T, const uint8_t* at, uint32_t size, Strong what, Semantics semantics,
                  Scope scope);
inline void on_read(Thread* T, const uint8_t* at, uint32_t size, bool coherent = true) {
  if constexpr (kChecked) check_read(T, at, size, coherent);
}
inline void before_store(Thread* T, const uint8_t* at, uint32_t size) {
  if constexpr (kChecked) check_before_store(T, at, size);
}
inline void after_store(Thread* T, const uint8_t* at, uint32_t size) {
  if constexpr (kChecked) check_after_store(T, at, size);
}
inline uint8_t* on_strong(Thread* T, uint8_t* at, uint32_t size, Strong what, Semantics semantics,
                          Scope scope) {
  if constexpr (kChecked) check_strong(T, at, size, what, semantics, scope);
  return at;
}

// ---- fences
void check_fence(Thread* T, Scope scope);
void check_fence_proxy(Thread* T);
void check_fence_mbarrier_init(Thread* T);
void check_fence_tensor(Thread* T, bool after);
inline void on_fence(Thread* T, Scope scope) {
  if constexpr (kChecked) check_fence(T, scope);
}
inline void on_fence_proxy(Thread* T) {
  if constexpr (kChecked) check_fence_proxy(T);
}
inline void on_fence_mbarrier_init(Thread* T) {
  if constexpr (kChecked) check_fence_mbarrier_init(T);
}
inline void on_fence_tensor(Thread* T, bool after) {
  if constexpr (kChecked) check_fence_tensor(T, after);
}

// ---- registers of wgmma: a product whose registers were written at `line`, after the last
// wgmma.fence
void check_unfenced(Thread* T, uint32_t line);
inline void on_unfenced(Thread* T, uint32_t line) {
  if constexpr (kChecked) check_unfenced(T, line);
}

}  // namespace ptxemu
