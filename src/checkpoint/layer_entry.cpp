// Which experts of a layer the files have. See layer_index.h.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "checkpoint/layer_index.h"

namespace nvfp4_moe::internal {

std::vector<int64_t> LayerEntry::stored_in(const ExpertRange& range) const {
  if (routed.role == TensorRole::kStacked) {
    std::vector<int64_t> all(
        static_cast<size_t>(stack_fits ? range.count : std::min<int64_t>(range.count, 1)));
    std::iota(all.begin(), all.end(), range.first);
    return all;
  }
  const auto begin = std::lower_bound(stored.begin(), stored.end(), range.first);
  return {begin, std::lower_bound(begin, stored.end(), range.first + range.count)};
}

void LayerEntry::add_missing(int64_t layer, const ExpertRange& range, FindingList& findings) const {
  if (routed.role == TensorRole::kStacked) return;
  const std::vector<int64_t> here = stored_in(range);
  const int64_t missing = range.count - static_cast<int64_t>(here.size());
  if (missing == 0) return;
  Finding finding{Severity::kError, "missing_expert", layer, -1, "", "", "no such tensor", missing};
  const auto count = static_cast<int64_t>(stored.size());
  if (count == router_rows && count > 0 && stored.back() == count - 1) {
    finding.actual = fmt::format(
        "a layer of {} experts, as its router has: fewer than the config's, which is not "
        "implemented",
        count);
  }
  finding.expected = fmt::format("experts {} to {}", range.first, range.first + range.count - 1);
  auto next = here.begin();
  for (int64_t e = range.first; e < range.first + range.count; ++e) {
    if (next != here.end() && *next == e) {
      ++next;
      continue;
    }
    std::string name = routed.name(e, routed.projections().front(), routed.parts.codes);
    if (finding.expert < 0) {
      finding.expert = e;
      finding.tensor = std::move(name);
    } else {
      finding.examples.push_back(std::move(name));
    }
    if (finding.examples.size() == Finding::kMaxExamples) break;
  }
  findings.add(std::move(finding));
}

}  // namespace nvfp4_moe::internal
