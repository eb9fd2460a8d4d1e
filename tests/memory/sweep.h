// A sweep repeats one operation, each time with another of its memory requests failing.
//
// It runs in a child process, which reports its position through shared memory. If the child ends
// or hangs, the failed request has revealed a fault, and another child continues with the next one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/status.h"
#include "memory/failing_memory.h"

namespace nvfp4_moe::internal::test {

struct Operation {
  std::string name;
  // The whole operation: it closes everything that it opens.
  std::function<Status()> run;
  // Without failures, before each run; may be empty.
  std::function<void()> reset;
  Code expected = Code::kOk;  // when nothing fails
};

struct Sweep {
  int64_t first = 1;         // every request from the first
  int64_t every_to = 40;     // up to this one,
  int64_t step = 1;          // and then each step-th
  int seconds_per_run = 20;  // a longer run counts as hanging
};

struct SweepResult {
  int64_t tried = 0;
  int64_t out_of_memory = 0;
  int64_t survived = 0;             // runs that succeeded all the same
  int64_t requests = 0;             // of a whole run
  std::vector<std::string> faults;  // "request 17: ..."
};

SweepResult sweep(const Operation& operation, Failing failing, const Sweep& how);

}  // namespace nvfp4_moe::internal::test
