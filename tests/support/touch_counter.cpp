#include "support/touch_counter.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace nvfp4_moe::test {
namespace {

struct Region {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::vector<uint8_t> touched;  // by page; written by the signal handler, never resized there
};

std::vector<Region>* regions = nullptr;
struct sigaction previous {};
uintptr_t page = 4096;

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (regions != nullptr) {
    for (Region& region : *regions) {
      if (address < region.begin || address >= region.end) continue;
      const uintptr_t index = (address - region.begin) / page;
      region.touched[index] = 1;
      (void)::mprotect(reinterpret_cast<void*>(region.begin + index * page), page, PROT_READ);
      return;
    }
  }
  // Not ours: whoever was asked before, or the default.
  if ((previous.sa_flags & SA_SIGINFO) != 0 && previous.sa_sigaction != nullptr) {
    previous.sa_sigaction(signal, info, context);
    return;
  }
  ::signal(signal, SIG_DFL);
}

}  // namespace

TouchCounter::TouchCounter(const TensorIndex& index) {
  if (regions != nullptr) throw std::logic_error("one TouchCounter at a time");
  page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  regions = new std::vector<Region>();
  for (const auto& file : index.files()) {
    const TensorInfo& first = file->header().tensors.front();
    const auto data = reinterpret_cast<uintptr_t>(file->data(first)) - first.begin;
    Region region;
    region.begin = data - file->header().data_offset;  // a mapping begins on a page
    region.end = region.begin + (file->size_bytes() + page - 1) / page * page;
    region.touched.resize((region.end - region.begin) / page);
    regions->push_back(std::move(region));
  }
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &previous);
  for (const Region& region : *regions) {
    (void)::mprotect(reinterpret_cast<void*>(region.begin), region.end - region.begin, PROT_NONE);
  }
}

TouchCounter::~TouchCounter() {
  for (const Region& region : *regions) {
    (void)::mprotect(reinterpret_cast<void*>(region.begin), region.end - region.begin, PROT_READ);
  }
  ::sigaction(SIGSEGV, &previous, nullptr);
  delete regions;
  regions = nullptr;
}

uint64_t TouchCounter::touched_bytes() const {
  uint64_t pages = 0;
  for (const Region& region : *regions) {
    pages += static_cast<uint64_t>(std::count(region.touched.begin(), region.touched.end(), uint8_t{1}));
  }
  return pages * page;
}

uint64_t TouchCounter::touched_bytes(const std::byte* data, size_t size_bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  uint64_t pages = 0;
  for (const Region& region : *regions) {
    if (begin < region.begin || begin >= region.end) continue;
    for (uintptr_t p = (begin - region.begin) / page; p * page + region.begin < begin + size_bytes; ++p) {
      pages += region.touched[p];
    }
  }
  return pages * page;
}

}  // namespace nvfp4_moe::test
