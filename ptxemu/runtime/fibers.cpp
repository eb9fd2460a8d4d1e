// Fibers: one per PTX thread, each with its own stack, and the ways in which a thread yields.
#include <sys/mman.h>

#include <vector>

#include "runtime/processor.h"

namespace ptxemu {

Processor processor;

namespace {

constexpr size_t kStackBytes = 1 << 20, kStackGuard = 1 << 14, kPageBytes = 1 << 12;
constexpr size_t kStackStagger = 5 * 64;  // an odd number of cache lines
// Each guard is a separate mapping, and Linux allows a process 65530 mappings by default. Kernels
// of several host threads can need more stacks. Beyond a limit, neighbours share one mapping
// without guards.
constexpr size_t kMostGuarded = 20000;

std::vector<uint8_t*>& free_stacks() {
  static auto* stacks = new std::vector<uint8_t*>;
  return *stacks;
}

}  // namespace

uint8_t* take_stack() {
  if (!free_stacks().empty()) {
    uint8_t* stack = free_stacks().back();
    free_stacks().pop_back();
    return stack;
  }
  void* base = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw LaunchFailure("ptxemu: no memory for a thread's stack");
  static size_t made = 0;
  if (++made <= kMostGuarded) mprotect(base, kStackGuard, PROT_NONE);
  return static_cast<uint8_t*>(base);
}

void give_stack(uint8_t* stack) { free_stacks().push_back(stack); }

extern "C" void ptxemu_switch(void** save, void* load);
asm(R"(.text
.globl ptxemu_switch
.hidden ptxemu_switch
.type ptxemu_switch,@function
ptxemu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

bool trigger(Thread* T);

void back_to_scheduler(Thread* T) { ptxemu_switch(&T->stack_pointer, processor.scheduler_stack); }

namespace {

void end_thread(Thread* T) {
  note_progress();
  finish_copies(T);
  check_end_thread(T);
  T->cta->alive--;
  T->cta->cluster->alive--;
  T->warp->alive &= ~(1u << T->lane);
  leave_barriers(T);
  trigger(T);
  back_to_scheduler(T);
}

void fiber_main() {
  Thread* T = processor.running;
  T->cta->cluster->launch->kernel->run(T);
  end_thread(T);
  __builtin_unreachable();
}

}  // namespace

void prepare_fiber(Thread& thread) {
  thread.stack = take_stack();
  // Stacks are a power of two apart, so without an offset all would begin in the same cache set,
  // which has about eight ways. The stacks of a cta's threads are spread over all sets.
  const size_t offset = thread.linear * kStackStagger % kPageBytes;
  uint64_t* top = reinterpret_cast<uint64_t*>(thread.stack + kStackBytes - 64 - offset);
  *--top = 0;  // the stack's alignment at a function's entry
  *--top = reinterpret_cast<uint64_t>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--top = 0;
  thread.stack_pointer = top;
}

void run_fiber(Thread* thread) {
  processor.running = thread;
  ptxemu_switch(&processor.scheduler_stack, thread->stack_pointer);
  processor.running = nullptr;
}

void park(Thread* T, const char* what, uint64_t about) {
  T->waiting = what;
  T->waiting_for = about;
  back_to_scheduler(T);
  T->waiting = nullptr;
}

void yield(Thread* T) {
  T->polling = true;
  wake(T);
  back_to_scheduler(T);
  T->polling = false;
}

void sleep_briefly(Thread* T) {
  processor.outside = true;
  yield(T);
}

void exit_thread(Thread* T) {
  end_thread(T);
  __builtin_unreachable();
}

// The successor may begin once all threads of every cta have triggered or ended. True for the last
// one.
bool trigger(Thread* T) {
  if (T->triggered) return false;
  T->triggered = true;
  check_trigger(T);
  Cta* cta = T->cta;
  if (--cta->untriggered != 0) return false;
  Launch* launch = cta->cluster->launch;
  return ++launch->triggered_ctas == uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
}

// In late order the last thread waits until the successor is blocked, so that its later effects
// become visible late.
void launch_dependents(Thread* T) {
  if (!trigger(T) || order() != Order::kLate) return;
  T->cta->cluster->launch->held = T;
  park(T, "its dependents to begin (late order)", 0);
}

void wait_for_prerequisites(Thread* T) {
  Launch* launch = T->cta->cluster->launch;
  if (launch->predecessor && !launch->predecessor->complete() &&
      !planted(Fault::dependents_early)) {
    launch->waiting_for_predecessor.push_back(T);
    park(T, "the preceding launch (griddepcontrol.wait)", 0);
  }
  check_prerequisites(T);
}

}  // namespace ptxemu
