// Runs a function in a forked child.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "support/attack.h"

namespace nvfp4_moe::internal::test {

// ThreadSanitizer ends a forked child that starts a thread if its parent has several.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// A sanitizer's own allocator does not handle fork() as the C library's does: locks that another
// thread held in it stay locked in the child.
#ifdef NVFP4_MOE_SANITIZED
inline constexpr bool kChildMayAllocate = false;
#else
inline constexpr bool kChildMayAllocate = true;
#endif

// Each counts as an attack. Returns the body's result, 0 to 255; -1 if the child hangs or dies.
template <class Body>
int in_forked_child(Body&& body) {
  attacked();
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);  // its signal ends a child that hangs
    _exit(body());
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace nvfp4_moe::internal::test
