#include "support/case_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/float_formats.h"
#include "moe/layer.h"
#include "support/backends.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr std::byte kPoison{0xFF};  // NaN as fp32, bf16, fp16 and E4M3; -1 as an integer
constexpr size_t kGuardBytes = 64;
constexpr size_t kAlignment = Arena::kAlignment;

}  // namespace

CaseRun::CaseRun(const Backend& backend, const CaseData& data, int64_t max_tokens, int gemm_config)
    : backend_(&backend), weights_{data.config, data.spec.range, data.scales, {}, {}} {
  const std::string reason = why_not_here(backend);
  EXPECT_EQ(reason, "") << backend.name << " does not run on this machine";
  if (!reason.empty()) return;
  const bool shared = data.spec.options.shared_intermediate_size > 0;
  weights_.tensor_scales.resize(static_cast<size_t>(data.spec.range.count) + 1);
  auto bytes =
      backend.allocate(backend.packed_bytes(data.config, data.spec.range), 0, "packed weights");
  EXPECT_OK(bytes);
  if (!bytes.ok()) return;
  weights_.bytes = std::move(*bytes);
  for (int64_t e = shared ? kSharedExpert : 0; e < data.spec.range.count; ++e) {
    const Status packed = backend.pack_expert(weights_, e, data.expert(e));
    EXPECT_OK(packed);
    if (!packed.ok()) return;
  }
  const Limits limits{max_tokens < 0 ? data.spec.tokens : max_tokens, kGuardBytes, gemm_config};
  const auto device = device_facts(backend.memory == nullptr ? "cpu" : "cuda:0");
  EXPECT_OK(device);
  if (!device.ok()) return;
  auto plan = backend.plan(data.config, data.spec.range, data.scales, limits, *device);
  EXPECT_OK(plan);
  if (!plan.ok()) return;
  plan_ = std::move(*plan);
  tokens_ = last_tokens_ = data.spec.tokens;
  storage_.resize(plan_.workspace.total_bytes + 3 * kAlignment);  // guards before and after
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  base_ = storage_.data() + (2 * kAlignment - address % kAlignment);
  Arena arena(base_, kGuardBytes);
  buffers_ = layer_buffers(data.config, data.spec.range, tokens_, arena);
  if (backend.memory != nullptr) {
    auto memory = backend.allocate(plan_.workspace.total_bytes + 2 * kAlignment, 0, "workspace");
    EXPECT_OK(memory);
    if (!memory.ok()) return;
    device_workspace_ = std::move(*memory);
    device_base_ = device_workspace_.data() + kAlignment;
  }
  poison();
  ok_ = true;
}

void CaseRun::poison() {
  std::fill(storage_.begin(), storage_.end(), kPoison);
  upload_workspace();
}

void CaseRun::upload_workspace() {
  if (backend_->memory != nullptr)
    EXPECT_OK(backend_->memory->to_device(0, device_workspace_.data(), base_ - kAlignment,
                                          device_workspace_.size_bytes(), nullptr));
}

size_t CaseRun::out_bytes(const Batch& batch) const {
  return static_cast<size_t>(batch.tokens * weights_.config->hidden_size * bits(batch.out_dtype) /
                             8);
}

Batch CaseRun::place(const Batch& batch) {
  if (!ok_ || backend_->memory == nullptr) return batch;
  Batch placed = batch;
  const auto& config = weights_.config;
  const auto tokens = static_cast<size_t>(batch.tokens),
             choices = tokens * static_cast<size_t>(config->top_k);
  struct {
    const void* from;
    const void** to;
    size_t size_bytes;
  } const arrays[] = {
      {batch.hidden, &placed.hidden,
       tokens * static_cast<size_t>(config->hidden_size * bits(batch.hidden_dtype) / 8)},
      {batch.topk_ids, &placed.topk_ids, choices * static_cast<size_t>(bits(batch.ids_dtype) / 8)},
      {batch.topk_weights, reinterpret_cast<const void**>(&placed.topk_weights),
       choices * sizeof(float)},
      {batch.shared_weights, reinterpret_cast<const void**>(&placed.shared_weights),
       tokens * sizeof(float)},
      {batch.out, const_cast<const void**>(&placed.out), out_bytes(batch)},
  };
  std::vector<std::byte> bytes;
  for (const auto& array : arrays)
    bytes.resize(bytes.size() + (array.size_bytes + kAlignment) / kAlignment * kAlignment);
  if (device_batch_.size_bytes() < bytes.size())
    device_batch_ = std::move(*backend_->allocate(bytes.size(), 0, "batch"));
  size_t offset = 0;
  for (const auto& array : arrays) {
    if (array.from != nullptr && array.size_bytes != 0)
      std::memcpy(bytes.data() + offset, array.from, array.size_bytes);
    *array.to = array.from == nullptr ? nullptr : device_batch_.data() + offset;
    offset += (array.size_bytes + kAlignment) / kAlignment * kAlignment;
  }
  EXPECT_OK(
      backend_->memory->to_device(0, device_batch_.data(), bytes.data(), bytes.size(), nullptr));
  return placed;
}

void CaseRun::fetch(const Batch& placed, void* out) {
  if (!ok_ || backend_->memory == nullptr) return;
  EXPECT_OK(backend_->memory->to_host(0, base_ - kAlignment, device_workspace_.data(),
                                      device_workspace_.size_bytes(), nullptr));
  if (out_bytes(placed) != 0)
    EXPECT_OK(backend_->memory->to_host(0, out, placed.out, out_bytes(placed), nullptr));
}

std::vector<uint8_t> CaseRun::run(const CaseData& data, Executor* executor) {
  std::vector<uint8_t> out(data.out_bytes(), static_cast<uint8_t>(kPoison));
  const Batch batch = place(data.batch(out.data()));
  EXPECT_OK(run_into(batch, executor != nullptr ? *executor : serial_executor()));
  fetch(batch, out.data());
  return out;
}

std::vector<uint8_t> CaseRun::run_steps(const CaseData& data) {
  std::vector<uint8_t> out(data.out_bytes(), static_cast<uint8_t>(kPoison));
  EXPECT_TRUE(ok_) << backend_->name << ": no run to take steps of";
  if (!ok_) return out;
  const Batch batch = place(data.batch(out.data()));
  const StepContext walk = step(batch, serial_executor());
  const LayerSteps& steps = *backend_->steps;
  EXPECT_OK(steps.route(walk));
  EXPECT_OK(steps.quantize(walk));
  for (const PartBuffers* part : {&walk.buffers.routed, &walk.buffers.shared}) {
    if (part->experts == 0) continue;
    EXPECT_OK(steps.gemm1_swiglu(walk, *part));
    EXPECT_OK(steps.requantize(walk, *part));
    EXPECT_OK(steps.gemm2(walk, *part));
  }
  EXPECT_OK(steps.combine(walk));
  fetch(batch, out.data());
  return out;
}

Status CaseRun::run_into(const Batch& batch, Executor& executor, void* stream) const {
  if (!ok_)
    return unsupported(std::string("a run of ") + backend_->name +
                       ": expected one that was made, see above");
  std::byte* const base = backend_->memory == nullptr ? base_ : device_base_;
  const RunContext context{&executor, stream};
  last_tokens_ = batch.tokens;
  return backend_->run(weights_, plan_, batch, base, context);
}

int64_t CaseRun::broken_guard() const {
  const auto start = static_cast<size_t>(base_ - storage_.data());
  const Limits limits{last_tokens_, kGuardBytes, plan_.limits.gemm_config};
  const auto plan =
      backend_->plan(weights_.config, weights_.range, weights_.scales, limits, plan_.device);
  EXPECT_OK(plan);
  std::vector<Span> spans = plan->workspace.spans;
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.offset_bytes < b.offset_bytes; });
  spans.push_back({"end of the storage", storage_.size() - start, 0});
  size_t at = 0;
  for (const Span& span : spans) {
    const size_t begin = start + span.offset_bytes;
    for (; at < begin; ++at)
      if (storage_[at] != kPoison) return static_cast<int64_t>(at) - static_cast<int64_t>(start);
    at = std::max(at, begin + span.size_bytes);
  }
  return -1;
}

StepContext CaseRun::step(const Batch& batch, Executor& executor) const {
  Arena arena(backend_->memory == nullptr ? base_ : device_base_, kGuardBytes);
  step_buffers_ = layer_buffers(weights_.config, weights_.range, batch.tokens, arena);
  last_tokens_ = batch.tokens;
  if (backend_->steps->plan != nullptr) step_plan_ = backend_->steps->plan(weights_, plan_, batch);
  return StepContext{weights_, batch, step_buffers_, executor, arena, nullptr, step_plan_.get()};
}

void CaseRun::copy_arrays(const CaseRun& from) {
  // The layer's arrays come first in every backend's workspace, with the same sizes.
  Arena arena(nullptr, kGuardBytes);
  layer_buffers(weights_.config, weights_.range, tokens_, arena);
  std::memcpy(base_, from.base_, arena.size_bytes());
  upload_workspace();
}

void expect_same_status(const RunStatus& expected, const RunStatus& actual) {
  EXPECT_EQ(expected.bad_expert_ids, actual.bad_expert_ids);
  EXPECT_EQ(expected.nonfinite_tokens, actual.nonfinite_tokens);
  EXPECT_EQ(expected.nonfinite_rows, actual.nonfinite_rows);
  EXPECT_EQ(expected.hidden_blocks, actual.hidden_blocks);
  EXPECT_EQ(expected.hidden_saturated, actual.hidden_saturated);
  EXPECT_EQ(expected.hidden_zeroed, actual.hidden_zeroed);
  EXPECT_EQ(expected.intermediate_blocks, actual.intermediate_blocks);
  EXPECT_EQ(expected.intermediate_saturated, actual.intermediate_saturated);
  EXPECT_EQ(expected.intermediate_zeroed, actual.intermediate_zeroed);
  EXPECT_EQ(expected.nonfinite_weights, actual.nonfinite_weights);
  EXPECT_EQ(expected.nonfinite_outputs, actual.nonfinite_outputs);
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

std::string difference(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual,
                       DType dtype, int64_t channels) {
  const std::vector<float> e = to_floats(expected, dtype), a = to_floats(actual, dtype);
  if (e.size() != a.size()) return "sizes differ";
  for (size_t i = 0; i < e.size(); ++i) {
    if (std::isnan(e[i]) && std::isnan(a[i])) continue;
    if (e[i] == a[i] && std::signbit(e[i]) == std::signbit(a[i])) continue;
    const auto index = static_cast<int64_t>(i);
    return "token " + std::to_string(index / channels) + " channel " +
           std::to_string(index % channels) + ": expected " + std::to_string(e[i]) + ", got " +
           std::to_string(a[i]);
  }
  return {};
}

}  // namespace nvfp4_moe::internal::test
