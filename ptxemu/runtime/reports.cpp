// The report of a failed launch: the place of the failure, and what each warp waits for.
#include "runtime/reports.h"

#include <cstdio>
#include <cstring>
#include <map>

#include "runtime/memory_map.h"
#include "runtime/processor.h"

namespace ptxemu {

std::string coordinates(const uint32_t* x) {
  return "(" + std::to_string(x[0]) + "," + std::to_string(x[1]) + "," + std::to_string(x[2]) + ")";
}

// Lists what each warp waits for; lanes that wait for the same thing are grouped.
void report_cluster(std::ostringstream& out, const Cluster& cluster) {
  for (const auto& cta : cluster.ctas)
    for (const Warp& warp : cta->warps) {
      std::map<std::string, uint32_t> lanes;
      for (uint32_t lane = 0; lane < 32; ++lane) {
        if (!(warp.alive >> lane & 1)) continue;
        const Thread& thread = *warp.lanes[lane];
        std::ostringstream state;
        if (thread.waiting)
          state << "waits for " << thread.waiting << " 0x" << std::hex << thread.waiting_for
                << std::dec;
        else
          state << (thread.polling ? "polls" : "runs");
        state << ", PTX line " << thread.line;
        lanes[state.str()] |= 1u << lane;
      }
      for (const auto& [state, mask] : lanes) {
        char text[16];
        std::snprintf(text, sizeof text, "%08x", mask);
        out << "  cta " << coordinates(cta->ctaid) << " rank " << cta->rank << " warp "
            << warp.index << " lanes " << text << ": " << state << "\n";
      }
    }
}

void report_barriers(std::ostringstream& out, const Cluster& cluster) {
  for (const auto& [barrier, waiting] : cluster.barrier_waiting) {
    if (waiting.empty()) continue;
    const uint64_t value = *barrier;
    out << "  mbarrier that " << waiting.size() << " threads wait for: phase " << (value >> 63)
        << ", " << (value & 0xfffff) << " of " << (value >> 20 & 0xfffff) << " arrivals and "
        << static_cast<int64_t>(value >> 40 & 0x7fffff) - (1 << 22) << " bytes pending\n";
  }
}

void stop(const std::string& report) {
  processor.failed = true;
  processor.failure = report;
  std::fputs(report.c_str(), stderr);
}

std::string headline(const KernelInfo* kernel) {
  return std::string(" in kernel ") + kernel->name + "\n";
}

void fault(Thread* T, const char* what) {
  std::ostringstream out;
  const Launch& launch = *T->cta->cluster->launch;
  out << "ptxemu: " << what << headline(launch.kernel);
  out << "  thread " << coordinates(T->tid) << " of cta " << coordinates(T->cta->ctaid)
      << ", PTX line " << T->line << "\n";
  stop(out.str());
  if (processor.running) back_to_scheduler(T);
  throw LaunchFailure(processor.failure);
}

void fault_work(Cluster* cluster, const char* what) {
  std::ostringstream out;
  out << "ptxemu: " << what << ", in asynchronous work of a cluster that begins with cta "
      << coordinates(cluster->ctas[0]->ctaid) << headline(cluster->launch->kernel);
  report_cluster(out, *cluster);
  stop(out.str());
  if (processor.running) back_to_scheduler(processor.running);
  throw LaunchFailure(processor.failure);
}

void fault_address(Thread* T, const char* space, uint64_t address, uint32_t size) {
  std::ostringstream out;
  const bool aligned = !misaligned(address, size);
  out << (aligned ? "out of bounds: " : "misaligned: ") << size << " bytes of " << space
      << " memory at 0x" << std::hex << address << std::dec;
  if (std::strcmp(space, "global") == 0) out << ", " << describe_address(address);
  if (std::strcmp(space, "shared") == 0)
    out << ", the cta has " << T->cta->shared_bytes << " bytes from 0x400";
  fault(T, out.str().c_str());
}

bool find_allocation(Thread* T, uint64_t address, uint32_t size) {
  if (planted(Fault::bounds_unchecked)) return true;
  return allocated(address, size, &T->memory_low, &T->memory_high);
}

uint8_t* shared_elsewhere(Thread* T, uint32_t address, uint32_t size) {
  const uint32_t rank = address >> kSharedOffsetBits, offset = address & 0xffffff;
  const bool inside = offset >= kSharedBase && offset + size <= T->shared_end;
  if (rank >= T->cta->cluster_size || misaligned(address, size) ||
      (!inside && !planted(Fault::shared_unchecked)))
    fault_address(T, "shared", address, size);
  return T->cta->cluster->ctas[rank]->shared + offset;
}

}  // namespace ptxemu
