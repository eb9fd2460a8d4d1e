#include "cudart/limits.h"

#include <algorithm>

namespace ptxemu {
namespace {

std::string extents(const uint32_t* x) {
  return std::to_string(x[0])
      .append(", ")
      .append(std::to_string(x[1]))
      .append(", ")
      .append(std::to_string(x[2]));
}

bool differ(const uint32_t* x, const uint32_t* y) { return !std::equal(x, x + 3, y); }

// A directive with its line in the kernel's text.
std::string located(const LaunchLimits& limits, const std::string& directive) {
  const size_t entry = limits.text.find(".entry " + std::string(limits.info.name) + "(");
  const size_t at = limits.text.find(directive, std::min(entry, limits.text.size()));
  if (at == std::string::npos) return directive;
  const auto end = limits.text.begin() + static_cast<std::ptrdiff_t>(at);
  std::string text = directive;
  return text.append(" (PTX line ")
      .append(std::to_string(1 + std::count(limits.text.begin(), end, '\n')))
      .append(")");
}

}  // namespace

std::string launch_refusal(const LaunchLimits& limits, const LaunchShape& shape,
                           const uint32_t* cluster) {
  const KernelInfo& info = limits.info;
  const uint32_t size = cluster[0] * cluster[1] * cluster[2];
  if (info.exact_threads && differ(shape.block, info.max_threads) &&
      !planted(Fault::reqntid_unchecked))
    return "the launch has ctas of " + extents(shape.block) + " threads, " +
           located(limits, ".reqntid") + " requires " + extents(info.max_threads);
  if (shape.cluster[0] && info.cluster[0] && differ(shape.cluster, info.cluster))
    return "the launch has clusters of " + extents(shape.cluster) + " ctas, " +
           located(limits, ".reqnctapercluster") + " requires " + extents(info.cluster);
  if (info.max_cluster && size > info.max_cluster)
    return "the launch has clusters of " + std::to_string(size) + " ctas, " +
           located(limits, ".maxclusterrank") + " allows " + std::to_string(info.max_cluster);
  if (size > 1 && compute_capability() < 90)
    return "a launch with clusters requires compute capability 9.0 or later";
  if (size > 16) return "a cluster has at most 16 ctas, the launch has " + std::to_string(size);
  if (size > 8 && !limits.non_portable_clusters && !planted(Fault::clusters_unchecked))
    return "a cluster of " + std::to_string(size) +
           " ctas requires cudaFuncAttributeNonPortableClusterSizeAllowed: 8 are portable";
  return "";
}

}  // namespace ptxemu
