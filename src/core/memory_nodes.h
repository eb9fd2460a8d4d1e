// Memory nodes (NUMA) of this host.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace nvfp4_moe::internal {

// Parses a Linux list of nodes such as "0-1,4". Empty if it is not one.
std::vector<int> parse_node_list(std::string_view list);

// Nodes that have memory; empty if the system does not report them.
const std::vector<int>& memory_nodes();

// Makes pages of [data, data + size_bytes) that are touched from now on come from `nodes` in turn.
// data: page-aligned. Returns false if the system declines, which changes nothing.
bool interleave_pages(void* data, size_t size_bytes, const std::vector<int>& nodes);

}  // namespace nvfp4_moe::internal
