#include "core/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "core/memory_nodes.h"

namespace nvfp4_moe::internal {

Status out_of_memory(const char* purpose, size_t size_bytes, const std::string& where,
                     size_t free_bytes, size_t total_bytes) {
  return {Code::kOutOfMemory, std::string(purpose) + ": expected " + std::to_string(size_bytes) +
                                  " bytes on " + where + ", " + std::to_string(free_bytes) +
                                  " of " + std::to_string(total_bytes) +
                                  " are free: out of memory"};
}

Result<Buffer> allocate_pages(size_t size_bytes, const char* purpose) {
  if (size_bytes == 0) return Buffer();
  void* data =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return out_of_memory(purpose, size_bytes, "cpu",
                         static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page_bytes,
                         static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes);
  }
  // Weights are read once per call from end to end. With 4 KB pages a core's prefetchers stop at
  // every page, and its page walks wait for memory. If the system declines, small pages work too.
  Buffer pages(static_cast<std::byte*>(data), size_bytes,
               [](std::byte* p, size_t n) { munmap(p, n); });
  constexpr size_t kHugePage = size_t{1} << 21;
  if (size_bytes >= 2 * kHugePage) {
    madvise(data, size_bytes, MADV_HUGEPAGE);
    // Any core may take any expert, so each expert should be spread over all nodes' memory
    // channels. Without interleaving, pages filled by one thread would all be on its node.
    if (memory_nodes().size() > 1) interleave_pages(data, size_bytes, memory_nodes());
  }
  return pages;
}

}  // namespace nvfp4_moe::internal
