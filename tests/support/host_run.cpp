#include "support/host_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "moe/registry.h"
#include "support/support.h"

namespace nvfp4_moe::test {
namespace {

constexpr std::byte kPoison{0xFF};  // NaN as fp32, bf16, fp16 and E4M3; -1 as an integer
constexpr size_t kGuardBytes = 64;

WorkspaceLayout with_guards(const WorkspaceLayout& layout) {
  WorkspaceLayout guarded(kGuardBytes);
  for (const auto& span : layout.spans()) guarded.add(span.name, span.size_bytes);
  return guarded;
}

}  // namespace

std::vector<const Backend*> host_backends() {
  std::vector<const Backend*> list = {&kReferenceBackend};
  for (const Backend* backend : backends())
    if (backend->steps != nullptr && backend != &kReferenceBackend && backend != &kCpuBackend) list.push_back(backend);
  return list;
}

std::vector<const Backend*> judged_backends() {
  std::vector<const Backend*> list = host_backends();
  std::erase(list, &kReferenceBackend);
  return list;
}

HostRun::HostRun(const Backend& backend, const CaseData& data, int64_t max_tokens)
    : backend_(&backend), weights_{data.config, data.spec.range, data.scales, {}, {}} {
  const bool shared = data.spec.options.shared_intermediate_size > 0;
  weights_.tensor_scales.resize(static_cast<size_t>(data.spec.range.count) + 1);
  auto bytes = backend.allocate(backend.packed_bytes(data.config, data.spec.range));
  EXPECT_OK(bytes);
  if (!bytes.ok()) return;
  weights_.bytes = std::move(*bytes);
  for (int64_t e = shared ? kSharedExpert : 0; e < data.spec.range.count; ++e) {
    const Status packed = backend.pack_expert(weights_, e, data.expert(e));
    EXPECT_OK(packed);
    if (!packed.ok()) return;
  }
  const Limits limits{max_tokens < 0 ? data.spec.tokens : max_tokens};
  auto plan = backend.plan(data.config, data.spec.range, data.scales, limits, {});
  EXPECT_OK(plan);
  if (!plan.ok()) return;
  plan_ = std::move(*plan);
  host_spans_ = host_layout(data.config, data.spec.range, limits).spans().size();
  plan_.workspace = with_guards(plan_.workspace);
  storage_.resize(plan_.workspace.total_bytes() + 2 * WorkspaceLayout::kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  base_ = storage_.data() + (WorkspaceLayout::kAlignment - address % WorkspaceLayout::kAlignment);
  const auto workspace = Workspace::make(base_, plan_.workspace.total_bytes(), plan_.workspace);
  EXPECT_OK(workspace);
  if (!workspace.ok()) return;
  buffers_ = host_buffers(data.config, data.spec.range, *workspace);
  poison();
  ok_ = true;
}

void HostRun::poison() { std::fill(storage_.begin(), storage_.end(), kPoison); }

std::vector<uint8_t> HostRun::run(const CaseData& data, Executor* executor) {
  std::vector<uint8_t> out(data.out_bytes(), static_cast<uint8_t>(kPoison));
  EXPECT_OK(run_into(data.batch(out.data()), executor != nullptr ? *executor : serial_executor()));
  return out;
}

Status HostRun::run_into(const Batch& batch, Executor& executor) const {
  NVFP4_MOE_ASSIGN(const Workspace workspace, Workspace::make(base_, plan_.workspace.total_bytes(), plan_.workspace));
  RunContext context;
  context.executor = &executor;
  return backend_->run(weights_, plan_, batch, workspace, context);
}

int64_t HostRun::broken_guard() const {
  std::vector<bool> inside(storage_.size());
  const auto start = static_cast<size_t>(base_ - storage_.data());
  for (const auto& span : plan_.workspace.spans())
    for (size_t i = 0; i < span.size_bytes; ++i) inside[start + span.offset_bytes + i] = true;
  for (size_t i = 0; i < storage_.size(); ++i)
    if (!inside[i] && storage_[i] != kPoison) return static_cast<int64_t>(i) - static_cast<int64_t>(start);
  return -1;
}

HostCall HostRun::call(const Batch& batch, Executor& executor) const {
  const auto& spans = plan_.workspace.spans();
  std::byte* scratch = host_spans_ < spans.size() ? base_ + spans[host_spans_].offset_bytes : nullptr;
  return HostCall{weights_, batch, buffers_, executor, scratch};
}

void HostRun::copy_arrays(const HostRun& from) {
  for (size_t i = 0; i < host_spans_; ++i) {
    const auto& to_span = plan_.workspace.span(static_cast<int>(i));
    const auto& from_span = from.plan_.workspace.span(static_cast<int>(i));
    if (to_span.size_bytes != 0)
      std::memcpy(base_ + to_span.offset_bytes, from.base_ + from_span.offset_bytes, to_span.size_bytes);
  }
}

std::vector<float> to_floats(const std::vector<uint8_t>& bytes, DType dtype) {
  const size_t width = static_cast<size_t>(bits(dtype)) / 8;
  std::vector<float> values(bytes.size() / width);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&values[i], bytes.data() + i * width, width);
      continue;
    }
    uint16_t half = 0;
    std::memcpy(&half, bytes.data() + i * width, width);
    values[i] = dtype == DType::kBf16 ? bf16_to_float(half) : fp16_to_float(half);
  }
  return values;
}

std::string difference(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual, DType dtype,
                       int64_t channels) {
  const std::vector<float> e = to_floats(expected, dtype), a = to_floats(actual, dtype);
  if (e.size() != a.size()) return "sizes differ";
  for (size_t i = 0; i < e.size(); ++i) {
    if (std::isnan(e[i]) && std::isnan(a[i])) continue;
    if (e[i] == a[i] && std::signbit(e[i]) == std::signbit(a[i])) continue;
    const auto index = static_cast<int64_t>(i);
    return "token " + std::to_string(index / channels) + " channel " + std::to_string(index % channels) +
           ": expected " + std::to_string(e[i]) + ", got " + std::to_string(a[i]);
  }
  return {};
}

}  // namespace nvfp4_moe::test
