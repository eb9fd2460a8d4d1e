#include "core/memory_nodes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <fstream>
#include <string>

namespace nvfp4_moe::internal {
namespace {

constexpr int kMostNodes = 1024;  // the most that Linux can be configured for

}  // namespace

std::vector<int> parse_node_list(std::string_view list) {
  std::vector<int> nodes;
  const char *at = list.data(), *const end = at + list.size();
  while (at != end) {
    int first = 0;
    auto [after, error] = std::from_chars(at, end, first);
    if (error != std::errc()) return {};
    int last = first;
    if (after != end && *after == '-') {
      const auto range = std::from_chars(after + 1, end, last);
      if (range.ec != std::errc()) return {};
      after = range.ptr;
    }
    if (first < 0 || last < first || last >= kMostNodes) return {};
    for (int node = first; node <= last; ++node) nodes.push_back(node);
    if (after == end) break;
    if (*after != ',' || after + 1 == end) return {};
    at = after + 1;
  }
  return nodes;
}

const std::vector<int>& memory_nodes() {
  static const std::vector<int> nodes = [] {
    std::ifstream file("/sys/devices/system/node/has_memory");
    file.exceptions(std::ios::badbit);  // running out of memory is not the end of the file
    std::string line;
    std::getline(file, line);
    return parse_node_list(line);
  }();
  return nodes;
}

bool interleave_pages(void* data, size_t size_bytes, const std::vector<int>& nodes) {
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kWordBits] = {};
  for (const int node : nodes) mask[node / kWordBits] |= 1ul << (node % kWordBits);
  constexpr long kInterleave = 3;  // MPOL_INTERLEAVE
  return syscall(SYS_mbind, data, size_bytes, kInterleave, mask, kMostNodes, 0) == 0;
}

}  // namespace nvfp4_moe::internal
