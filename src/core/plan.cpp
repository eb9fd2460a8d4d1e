// Placing workspace spans, checking a caller's workspace, and printing a plan.
#include "core/plan.h"

#include <limits>

namespace nvfp4_moe {
namespace {

// Sums that do not fit stay at the largest size_t, which no workspace can satisfy.
size_t saturating_add(size_t a, size_t b) {
  return a > std::numeric_limits<size_t>::max() - b ? std::numeric_limits<size_t>::max() : a + b;
}

}  // namespace

int WorkspaceLayout::add(std::string name, size_t size_bytes) {
  const size_t offset = saturating_add(total_bytes_, kAlignment - 1) / kAlignment * kAlignment;
  spans_.push_back({std::move(name), offset, size_bytes});
  total_bytes_ = saturating_add(saturating_add(offset, size_bytes), guard_bytes_);
  return static_cast<int>(spans_.size()) - 1;
}

Result<Workspace> Workspace::make(void* base, size_t size_bytes, const WorkspaceLayout& layout) {
  if (base == nullptr && layout.total_bytes() != 0)
    return invalid_argument("workspace: expected " + std::to_string(layout.total_bytes()) + " bytes, got null");
  if (const auto misaligned = reinterpret_cast<uintptr_t>(base) % WorkspaceLayout::kAlignment; misaligned != 0)
    return invalid_argument("workspace: expected a base aligned to " + std::to_string(WorkspaceLayout::kAlignment) +
                            " bytes, got one " + std::to_string(misaligned) + " bytes past");
  if (size_bytes < layout.total_bytes())
    return invalid_argument("workspace: expected at least " + std::to_string(layout.total_bytes()) + " bytes, got " +
                            std::to_string(size_bytes));
  return Workspace(static_cast<std::byte*>(base), &layout);
}

std::string to_string(const Plan& plan) {
  std::string text = "backend " + plan.backend + ", max_tokens " + std::to_string(plan.limits.max_tokens) + "\n";
  for (const StepPlan& step : plan.steps) text += "  step " + step.step + ": " + step.kernel + "\n";
  text += "  workspace " + std::to_string(plan.workspace.total_bytes()) + " bytes\n";
  for (const WorkspaceLayout::Span& span : plan.workspace.spans())
    text += "    " + span.name + ": " + std::to_string(span.size_bytes) + " bytes at " +
            std::to_string(span.offset_bytes) + "\n";
  return text;
}

}  // namespace nvfp4_moe
