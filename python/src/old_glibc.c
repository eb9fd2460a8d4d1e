// For wheels only: functions of glibc after 2.28 that GCC 12's libstdc++ and libgcc call, in terms
// of functions that 2.28 has. Wheels are linked with the symbol versions of 2.28, so that they load
// on every distribution since 2018 (docs/contribute/dependencies.md).
//
// All names are local to the module: its export map lists its entry only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

// 2.32. Zero, "there may be other threads", is right at any time.
char __libc_single_threaded = 0;

// 2.36. std::random_device throws no exception here, as with glibc's own.
uint32_t arc4random(void) {
  uint32_t number;
  char* bytes = (char*)&number;
  for (size_t filled = 0; filled < sizeof(number);) {
    const ssize_t got = getrandom(bytes + filled, sizeof(number) - filled, 0);
    if (got < 0 && errno != EINTR) abort();
    if (got > 0) filled += (size_t)got;
  }
  return number;
}

// 2.33. Before, these were inline functions over calls with a version of the struct.
#if defined(__x86_64__)
enum { kStatVersion = 1 };
#elif defined(__aarch64__)
enum { kStatVersion = 0 };
#else
#error "the version of struct stat is known for x86-64 and aarch64 only"
#endif
_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "one struct on 64-bit hosts");
int __xstat(int version, const char* path, struct stat* out);
int __lxstat(int version, const char* path, struct stat* out);
int __fxstat(int version, int file, struct stat* out);
int __fxstatat(int version, int folder, const char* path, struct stat* out, int flags);

int stat(const char* path, struct stat* out) { return __xstat(kStatVersion, path, out); }
int lstat(const char* path, struct stat* out) { return __lxstat(kStatVersion, path, out); }
int fstat(int file, struct stat* out) { return __fxstat(kStatVersion, file, out); }
int fstatat(int folder, const char* path, struct stat* out, int flags) {
  return __fxstatat(kStatVersion, folder, path, out, flags);
}
int stat64(const char* path, struct stat64* out) { return stat(path, (struct stat*)out); }
int lstat64(const char* path, struct stat64* out) { return lstat(path, (struct stat*)out); }
int fstat64(int file, struct stat64* out) { return fstat(file, (struct stat*)out); }
int fstatat64(int folder, const char* path, struct stat64* out, int flags) {
  return fstatat(folder, path, (struct stat*)out, flags);
}

// 2.30. If the host has it, the host's is called. Otherwise the deadline moves to the clock that
// pthread_cond_timedwait takes, as libstdc++ does on such a host; its callers compare their own
// clock after the wait.
typedef int (*CondClockWait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* deadline) {
  const CondClockWait host = (CondClockWait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (host != NULL) return host(condition, mutex, clock, deadline);
  struct timespec now, wall;
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &wall) != 0) return EINVAL;
  wall.tv_sec += deadline->tv_sec - now.tv_sec;
  wall.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) {
    wall.tv_nsec += 1000000000;
    --wall.tv_sec;
  } else if (wall.tv_nsec >= 1000000000) {
    wall.tv_nsec -= 1000000000;
    ++wall.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &wall);
}

// 2.35. libgcc's unwinder asks for the loaded file that holds an address, and takes from the answer
// only where that file's table of frames begins.
struct Search {
  uintptr_t address;
  struct dl_find_object* found;
};

static int find_in(struct dl_phdr_info* file, size_t size, void* data) {
  (void)size;
  const struct Search* search = data;
  const ElfW(Phdr)* frames = NULL;
  int inside = 0;
  for (int i = 0; i < file->dlpi_phnum; ++i) {
    const ElfW(Phdr)* part = &file->dlpi_phdr[i];
    const uintptr_t begin = file->dlpi_addr + part->p_vaddr;
    if (part->p_type == PT_LOAD && search->address - begin < part->p_memsz) {
      inside = 1;
      search->found->dlfo_map_start = (void*)begin;
      search->found->dlfo_map_end = (void*)(begin + part->p_memsz);
    }
    if (part->p_type == PT_GNU_EH_FRAME) frames = part;
  }
  if (!inside) return 0;
  if (frames == NULL) return -1;
  search->found->dlfo_eh_frame = (void*)(file->dlpi_addr + frames->p_vaddr);
  return 1;
}

int _dl_find_object(void* address, struct dl_find_object* found) {
  memset(found, 0, sizeof(*found));
  struct Search search = {(uintptr_t)address, found};
  return dl_iterate_phdr(find_in, &search) == 1 ? 0 : -1;
}
