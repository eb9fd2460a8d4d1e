#include "memory/sweep.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace nvfp4_moe::internal::test {
namespace {

constexpr int kMostFaults = 30;

// The child's report to its parent.
struct Shared {
  int64_t at;  // the request that fails now
  bool finished;
  int64_t tried, out_of_memory, survived, requests;
  int faults;
  char fault[kMostFaults][400];
};

int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

Status run(const Operation& operation) {
  try {
    return operation.run();
  } catch (...) {  // as every entry point of the library does
    return caught_exception();
  }
}

struct Attempt {
  Code code = Code::kOk;
  char message[300] = {};  // no block of its own
  MemoryRequests requests;
  int64_t leaked = 0;
  int files = 0;
};

Attempt attempt(const Operation& operation, int64_t at, Failing failing) {
  if (operation.reset) operation.reset();
  Attempt result;
  const int files = open_files();
  const int64_t before = live_blocks();
  {
    fail_memory(at, failing);
    const Status status = run(operation);
    result.requests = stop_failing();
    result.code = status.code();
    std::snprintf(result.message, sizeof result.message, "%s", status.message().c_str());
  }
  result.leaked = live_blocks() - before;
  result.files = open_files() - files;
  return result;
}

void add_fault(Shared& shared, int64_t at, const std::string& what) {
  if (shared.faults < kMostFaults)
    std::snprintf(shared.fault[shared.faults++], sizeof shared.fault[0], "request %lld: %s",
                  static_cast<long long>(at), what.c_str());
}

[[noreturn]] void child(const Operation& operation, Failing failing, const Sweep& how,
                        Shared& shared) {
  for (int i = 0; i < 2; ++i) {  // one-time allocations exist afterwards
    if (operation.reset) operation.reset();
    const Status status = run(operation);
    if (status.code() != operation.expected) {
      add_fault(
          shared, 0,
          std::string("without a failure: ") + to_string(status.code()) + ": " + status.message());
      shared.finished = true;
      _exit(0);
    }
  }
  for (int64_t at = shared.at; shared.faults < kMostFaults;
       at += at < how.every_to ? 1 : how.step) {
    shared.at = at;
    alarm(static_cast<unsigned>(how.seconds_per_run));
    Attempt result = attempt(operation, at, failing);
    // Memory that an error's path allocates once and keeps is not a leak. A real leak appears again
    // when the same request fails again.
    if (result.leaked != 0 || result.files != 0) result = attempt(operation, at, failing);
    if (result.requests.refused == 0) {
      shared.requests = result.requests.asked;
      break;
    }
    ++shared.tried;
    if (result.leaked > 0)
      add_fault(shared, at, "blocks not given back: " + std::to_string(result.leaked));
    if (result.files > 0) add_fault(shared, at, "files left open: " + std::to_string(result.files));
    if (result.code == operation.expected)
      ++shared.survived;
    else if (result.code == Code::kOutOfMemory)
      ++shared.out_of_memory;
    else
      add_fault(shared, at, std::string(to_string(result.code)) + ": " + result.message);
    if (result.code == Code::kOutOfMemory && result.message[0] == 0)
      add_fault(shared, at, "no message");
  }
  shared.finished = true;
  _exit(0);
}

}  // namespace

SweepResult sweep(const Operation& operation, Failing failing, const Sweep& how) {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Shared& shared = *new (memory) Shared{};
  shared.at = how.first;
  while (!shared.finished && shared.faults < kMostFaults) {
    const pid_t pid = fork();
    if (pid == 0) child(operation, failing, how, shared);
    int status = 0;
    waitpid(pid, &status, 0);
    if (shared.finished) break;
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    ++shared.tried;
    add_fault(shared, shared.at,
              signal == SIGALRM ? "hangs"
              : signal != 0     ? std::string("ends by ") + strsignal(signal)
                                : "exits");
    shared.at += shared.at < how.every_to ? 1 : how.step;
  }
  SweepResult result{shared.tried, shared.out_of_memory, shared.survived, shared.requests, {}};
  for (int i = 0; i < shared.faults; ++i) result.faults.emplace_back(shared.fault[i]);
  munmap(memory, sizeof(Shared));
  return result;
}

}  // namespace nvfp4_moe::internal::test
