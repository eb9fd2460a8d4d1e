// The single emulated processor: the running fiber, whether its launch has failed, and the state
// that files of the run time share.
#pragma once

#include <sstream>
#include <string>

#include "runtime/control.h"

namespace ptxemu {

struct Processor {
  void* scheduler_stack = nullptr;
  Thread* running = nullptr;  // null while no fiber runs
  bool failed = false;
  std::string failure;    // the report
  uint64_t progress = 0;  // grows with what polling threads may see
  bool outside = false;   // a thread has slept or read the time since the last progress
  Order order = Order::kAtOnce;
  uint64_t random = 1;
};
extern Processor processor;

// ---- fibers
void give_stack(uint8_t* stack);
// Sets a thread up to run its launch's kernel from the start.
void prepare_fiber(Thread& thread);
// Runs the thread until it waits, polls or ends.
void run_fiber(Thread* thread);
void back_to_scheduler(Thread* T);

// ---- reports
void stop(const std::string& report);

void report_cluster(std::ostringstream& out, const Cluster& cluster);
void report_barriers(std::ostringstream& out, const Cluster& cluster);

Order asked_order();
void seed_random();

// ---- clusters
void start_cluster(Launch& launch);
void free_cluster(Cluster& cluster);

}  // namespace ptxemu
