// Checks a caller's workspace and prints a plan.
#include "core/plan.h"

namespace nvfp4_moe::internal {

const char* to_string(DeviceKind kind) { return name_of(kind); }

Status check_workspace(const void* base, size_t size_bytes, size_t needed_bytes) {
  if (base == nullptr && needed_bytes != 0)
    return invalid_argument("workspace: expected " + std::to_string(needed_bytes) +
                            " bytes, got null");
  if (const auto misaligned = reinterpret_cast<uintptr_t>(base) % Arena::kAlignment;
      misaligned != 0)
    return invalid_argument("workspace: expected a base aligned to " +
                            std::to_string(Arena::kAlignment) + " bytes, got one " +
                            std::to_string(misaligned) + " bytes past");
  if (size_bytes < needed_bytes)
    return invalid_argument("workspace: expected at least " + std::to_string(needed_bytes) +
                            " bytes, got " + std::to_string(size_bytes));
  return {};
}

std::string to_string(const Plan& plan) {
  std::string text =
      "backend " + plan.backend + ", max_tokens " + std::to_string(plan.limits.max_tokens) + "\n";
  for (const StepPlan& step : plan.steps) text += "  step " + step.step + ": " + step.kernel + "\n";
  text += "  workspace " + std::to_string(plan.workspace.total_bytes) + " bytes\n";
  for (const Span& span : plan.workspace.spans)
    text += "    " + span.name + ": " + std::to_string(span.size_bytes) + " bytes at " +
            std::to_string(span.offset_bytes) + "\n";
  return text;
}

}  // namespace nvfp4_moe::internal
