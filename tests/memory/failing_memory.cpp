#include "memory/failing_memory.h"

#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> asked{0};
std::atomic<int64_t> refused{0};
std::atomic<int64_t> live{0};
std::atomic<int64_t> bytes{0}, peak{0};
int64_t fail_at = 0;
bool fail_all = false;

bool refuse() {
  if (!counting.load(std::memory_order_relaxed)) return false;
  const int64_t number = asked.fetch_add(1) + 1;
  if (number != fail_at && !(fail_all && number > fail_at)) return false;
  refused.fetch_add(1);
  return true;
}

}  // namespace

namespace nvfp4_moe::internal::test {

void fail_memory(int64_t at, Failing failing) {
  fail_at = at;
  fail_all = failing == Failing::kAllFrom;
  asked = refused = 0;
  counting = true;
}

MemoryRequests stop_failing() {
  counting = false;
  return {asked, refused};
}

int64_t live_blocks() { return live; }
int64_t start_peak() { return peak = bytes.load(); }
int64_t peak_bytes() { return peak; }

}  // namespace nvfp4_moe::internal::test

#if NVFP4_MOE_FAILING_MEMORY
// The next definition of a function. dlsym may request memory, so it is called before anything
// fails.
template <class Function>
static Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// glibc's second names for its own functions, since the definitions below take the usual names.
// Visible, so that shared libraries use these definitions.
#pragma GCC visibility push(default)
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

static int64_t size_of(void* memory) { return static_cast<int64_t>(malloc_usable_size(memory)); }
static void* given(void* memory) {
  if (memory == nullptr) return memory;
  live.fetch_add(1, std::memory_order_relaxed);
  const int64_t now = bytes.fetch_add(size_of(memory)) + size_of(memory);
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return memory;
}
static void* none() {
  errno = ENOMEM;
  return nullptr;
}

void* malloc(size_t size) { return refuse() ? none() : given(__libc_malloc(size)); }
void* calloc(size_t count, size_t size) {
  return refuse() ? none() : given(__libc_calloc(count, size));
}
void* memalign(size_t alignment, size_t size) {
  return refuse() ? none() : given(__libc_memalign(alignment, size));
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** out, size_t alignment, size_t size) {
  void* memory = memalign(alignment, size);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
void* realloc(void* memory, size_t size) {
  if (refuse()) return none();
  if (memory == nullptr) return given(__libc_realloc(memory, size));
  const int64_t before = size_of(memory);
  void* moved = __libc_realloc(memory, size);
  if (moved == nullptr && size != 0) return moved;  // the block stays
  live.fetch_sub(1, std::memory_order_relaxed);
  bytes.fetch_sub(before);
  return given(moved);
}
void free(void* memory) {
  if (memory == nullptr) return;
  live.fetch_sub(1, std::memory_order_relaxed);
  bytes.fetch_sub(size_of(memory));
  __libc_free(memory);
}

using Mmap = void*(void*, size_t, int, int, int, off_t);
using Munmap = int(void*, size_t);
using ThreadBody = void*(void*);
using PthreadCreate = int(pthread_t*, const pthread_attr_t*, ThreadBody*, void*);
static Mmap* real_mmap = nullptr;
static Munmap* real_munmap = nullptr;
static PthreadCreate* real_pthread_create = nullptr;
__attribute__((constructor)) static void find_next() {
  if (real_mmap == nullptr) real_mmap = next<Mmap>("mmap");
  if (real_munmap == nullptr) real_munmap = next<Munmap>("munmap");
  if (real_pthread_create == nullptr) real_pthread_create = next<PthreadCreate>("pthread_create");
}

void* mmap(void* address, size_t size, int protection, int flags, int file, off_t offset) {
  find_next();
  if (refuse()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* memory = real_mmap(address, size, protection, flags, file, offset);
  if (memory != MAP_FAILED) live.fetch_add(1, std::memory_order_relaxed);
  return memory;
}
int munmap(void* address, size_t size) {
  find_next();
  const int result = real_munmap(address, size);
  if (result == 0) live.fetch_sub(1, std::memory_order_relaxed);
  return result;
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, ThreadBody* body,
                   void* argument) {
  find_next();
  return refuse() ? EAGAIN : real_pthread_create(thread, attributes, body, argument);
}

#ifdef NVFP4_MOE_PRELOADED
// Counts from main on: the program cannot handle failures of the loader and of static initializers.
using Main = int(int, char**, char**);
static Main* real_main = nullptr;
static int counted_main(int argc, char** argv, char** environment) {
  const char* at = std::getenv("NVFP4_MOE_FAIL_AT");
  if (at != nullptr)
    nvfp4_moe::internal::test::fail_memory(std::atoll(at),
                                           std::getenv("NVFP4_MOE_FAIL_ALL") == nullptr
                                               ? nvfp4_moe::internal::test::Failing::kOne
                                               : nvfp4_moe::internal::test::Failing::kAllFrom);
  return real_main(argc, argv, environment);
}
int __libc_start_main(Main* main, int argc, char** argv, void (*init)(), void (*fini)(),
                      void (*loader_fini)(), void* stack_end) {
  real_main = main;
  return next<int(Main*, int, char**, void (*)(), void (*)(), void (*)(), void*)>(
      "__libc_start_main")(counted_main, argc, argv, init, fini, loader_fini, stack_end);
}
// Writes a file if a request was refused. If there is no file, the caller knows that the run was
// the last one.
__attribute__((destructor)) static void tell() {
  const char* path = std::getenv("NVFP4_MOE_FAIL_TELL");
  const auto requests = nvfp4_moe::internal::test::stop_failing();
  if (path == nullptr || requests.refused == 0) return;
  if (FILE* file = std::fopen(path, "w")) std::fclose(file);
}
#endif
}  // extern "C"
#pragma GCC visibility pop
#endif
