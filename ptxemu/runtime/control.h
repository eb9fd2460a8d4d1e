// Internals shared by the parts of the run time, in addition to kernel.h: waiting, asynchronous
// work, its orders, and failures.
#pragma once

#include <stdexcept>

#include "order/hooks.h"
#include "runtime/kernel.h"

namespace ptxemu {

// When asynchronous work is done, and in which order warps run (PTXEMU_ORDER; PTXEMU_SEED for the
// second).
enum class Order { kAtOnce, kRandom, kLate };
Order order();
uint32_t random_number();

// A launch that failed: its report. Further launches fail as well, until the device is reset.
struct LaunchFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Stops the launch from within asynchronous work, which no thread runs.
[[noreturn]] void fault_work(Cluster* cluster, const char* what);

void park(Thread* T, const char* what, uint64_t about);
inline void wake(Thread* T) { T->warp->ready |= 1u << T->lane; }
// Notifies the scheduler of a change that polling threads may see.
void note_progress();

void enqueue_copy(Cluster* cluster, Work work);
// Writes bytes to shared memory and completes them at an mbarrier. from: their source, for the
// checker of order.
void enqueue_delivery(Thread* T, uint32_t to, const uint8_t* from, uint32_t size, uint32_t barrier,
                      uint32_t bytes, std::function<void(uint8_t*)> deliver);
void enqueue_tensor_work(Thread* T, Work work);
// Does one item of the cluster's asynchronous work. Returns false if there was no work.
bool do_some_work(Cluster* cluster);

uint64_t* mbarrier_at(Thread* T, uint64_t address);
void mbarrier_complete_bytes(Cluster* cluster, uint64_t* barrier, uint32_t bytes);
void mbarrier_arrive_from_work(Cluster* cluster, uint64_t* barrier);
void add_pending_arrival(Thread* T, uint64_t* barrier);

void leave_barriers(Thread* T);
void wake_for_registers(Cta* cta);  // threads in setmaxnreg.inc look again
void finish_copies(Thread* T);

// Waits for the lanes of `mask` (aligned: the whole warp). The last lane runs its `together` on the
// inputs of all. A pointer to it, because a std::function of each lane would allocate memory.
using Together = void (*)(const void* object, void** lanes, uint32_t mask);
void meet(Thread* T, uint32_t mask, const char* what, void* mine, bool aligned, Together call,
          const void* object);
template <class F>
void meet(Thread* T, uint32_t mask, const char* what, void* mine, bool aligned, const F& together) {
  const Together call = [](const void* object, void** lanes, uint32_t present) {
    (*static_cast<const F*>(object))(lanes, present);
  };
  meet(T, mask, what, mine, aligned, call, &together);
}
constexpr uint32_t kWholeWarp = 0xffffffffu;

// The byte at (row, byte of k) of a K-major operand under a shared-memory descriptor.
struct MatrixDescriptor {
  uint32_t start, leading, stride, swizzle;  // bytes; swizzle: 0 none, 1 to 3 for 32, 64, 128 bytes
  uint32_t at(uint32_t row, uint32_t byte) const;
};
inline uint32_t swizzled(uint32_t address, uint32_t mode) {
  return mode == 0 ? address : address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace ptxemu
