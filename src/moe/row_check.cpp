#include "moe/row_check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "backend/layer_steps.h"
#include "core/float_formats.h"
#include "judge/judge.h"
#include "moe/env.h"
#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

// How often the thread polls for samples.
constexpr std::chrono::milliseconds kInterval{2};

// How the rows of a token make up its output, for the limits of a token that is compared by itself
// (docs/explanation/numerics.md, section 8).
struct RowShares {
  double norm = 0;      // the norm of out if the rows were orthogonal; 0 if it is not finite
  double elements = 0;  // see token_limits
};

RowShares row_shares(const MoeConfig& config, const Batch& batch, const LayerBuffers& buffers) {
  const bool after_down = config->router_weight == RouterWeight::kAfterDown;
  const DType dtype = config->row_format == RowFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const int64_t hidden = config->hidden_size;
  std::vector<float> values(static_cast<size_t>(hidden));
  double total = 0, most_per_element = 0;
  const auto add = [&](const void* rows, int64_t row, double weight, int64_t intermediate_size) {
    to_floats(static_cast<const std::byte*>(rows) + row * hidden * (bits(dtype) / 8), dtype, hidden,
              values.data());
    double square = 0;
    for (const float value : values) square += static_cast<double>(value) * value;
    square *= weight * weight;
    total += square;
    most_per_element = std::max(most_per_element, square / static_cast<double>(intermediate_size));
  };
  for (int64_t k = 0; k < config->top_k; ++k)
    if (const int64_t row = buffers.row_of_assignment[k]; row >= 0)
      add(buffers.routed.rows_out, row, after_down ? batch.topk_weights[k] : 1.0,
          config->intermediate_size);
  if (buffers.shared.experts > 0)
    add(buffers.shared.rows_out, 0, batch.shared_weights != nullptr ? batch.shared_weights[0] : 1.0,
        config->shared_intermediate_size);
  if (!std::isfinite(total) || total == 0)
    return {0, static_cast<double>(config->top_k * config->intermediate_size)};
  return {std::sqrt(total), total / most_per_element};
}

}  // namespace

Result<std::unique_ptr<RowCheck>> RowCheck::open(const Backend& backend,
                                                 const PackedWeights& weights, DeviceKind kind,
                                                 std::string name) {
  std::unique_ptr<RowCheck> check(new RowCheck(backend, weights, std::move(name)));
  NVFP4_MOE_TRY(check->prepare(kind).in("NVFP4_MOE_CHECK"));
  check->worker_->thread = std::thread([of = check.get()] { of->run(); });
  return check;
}

Status RowCheck::prepare(DeviceKind kind) {
  const DeviceSampling* const sampling = device_sampling(kind);
  if (sampling == nullptr)
    return unsupported(std::string("expected a device that samples tokens of runs, got ") +
                       to_string(kind));
  MoeOptions options = weights_.config.options();
  options.num_experts = options.top_k;
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
  const ExpertRange range{0, options.top_k};
  Limits limits;
  limits.max_tokens = 1;
  NVFP4_MOE_ASSIGN(plan_,
                   kReferenceBackend.plan(config, range, weights_.scales, limits, host_facts()));
  const size_t experts =
      static_cast<size_t>(range.count) + (options.shared_intermediate_size > 0 ? 1 : 0);
  reference_.reset(new PackedWeights{config, range, weights_.scales,
                                     std::vector<TensorScales>(experts), Buffer()});
  NVFP4_MOE_ASSIGN(reference_->bytes,
                   kReferenceBackend.allocate(kReferenceBackend.packed_bytes(config, range), 0,
                                              "experts of the reference"));
  NVFP4_MOE_ASSIGN(workspace_, kReferenceBackend.allocate(
                                   kReferenceBackend.workspace_bytes(config, range, plan_, 1), 0,
                                   "workspace of the reference"));
  residents_.resize(experts);
  replaced_at_.resize(weights_.tensor_scales.size());
  layout_ = SampleLayout::of(options.hidden_size, options.top_k);
  NVFP4_MOE_ASSIGN(sampler_, sampling->open(weights_));
  return {};
}

RowCheck::~RowCheck() {
  if (process_ != fork_count()) {
    static_cast<void>(worker_.release());
    return;
  }
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->ends = true;
  }
  worker_->changed.notify_all();
  if (!worker_->thread.joinable()) return;
  worker_->thread.join();
  report();
}

Status RowCheck::failure() {
  const std::lock_guard lock(worker_->mutex);
  return std::exchange(worker_->failure, Status());
}

Status RowCheck::finish() {
  uint64_t last = 0;
  for (int i = 0; i < kSampleSlots; ++i)
    last = std::max(last, std::atomic_ref(slot(i)->written).load(std::memory_order_acquire));
  std::unique_lock lock(worker_->mutex);
  worker_->changed.wait(lock, [&] {
    const Sample* const first = oldest();
    return first == nullptr || first->written > last;
  });
  return std::exchange(worker_->failure, Status());
}

Status RowCheck::replaced(int64_t local_expert, void* stream, bool at_rest) {
  ++replacements_;
  replaced_at_[weights_.index_of(local_expert)] = replacements_;
  return sampler_->note_replacement(replacements_, stream, at_rest);
}

RowCheck::Counts RowCheck::counts() const {
  Counts counts{checked_.load(), skipped_.load(), failed_.load()};
  if (process_ != fork_count()) return counts;  // the device is the parent's
  if (const Result<uint64_t> dropped = sampler_->dropped(); dropped.ok())
    counts.dropped += *dropped;
  return counts;
}

Sample* RowCheck::slot(int index) const {
  return reinterpret_cast<Sample*>(sampler_->slots() + index * layout_.slot_bytes);
}

// The slot of the first run that the device has written and the thread has not released.
Sample* RowCheck::oldest() const {
  Sample* first = nullptr;
  for (int i = 0; i < kSampleSlots; ++i) {
    Sample* const at = slot(i);
    const uint64_t written = std::atomic_ref(at->written).load(std::memory_order_acquire);
    if (written == std::atomic_ref(at->released).load(std::memory_order_relaxed)) continue;
    if (first == nullptr || written < first->written) first = at;
  }
  return first;
}

std::string RowCheck::place() const {
  return "NVFP4_MOE_CHECK: " + (name_.empty() ? "" : name_ + ": ") + "backend " + backend_.name;
}

void RowCheck::run() {
  sampler_->enter_thread();
  std::unique_lock lock(worker_->mutex);
  while (true) {
    const bool ends = worker_->ends;
    Sample* const sample = oldest();
    if (sample == nullptr) {
      if (ends) return;
      worker_->changed.wait_for(lock, kInterval);
      continue;
    }
    lock.unlock();
    if (ends && sampler_->is_busy()) return;
    bool compared = false;
    Status status = check_and_log(*sample, compared);
    lock.lock();
    ++(compared ? checked_ : skipped_);
    if (status.code() == Code::kCheckFailed) ++failed_;
    if (worker_->failure.ok()) worker_->failure = std::move(status);
    std::atomic_ref(sample->released).store(sample->written, std::memory_order_release);
    worker_->changed.notify_all();
  }
}

void RowCheck::report() noexcept {
  sampler_->close();
  int waiting = 0;
  for (int i = 0; i < kSampleSlots; ++i) waiting += slot(i)->written != slot(i)->released;
  try {
    if (!worker_->failure.ok())
      log_or_print(LogLevel::kError,
                   worker_->failure.message() + " (no call returned this before the layer ended)");
    if (waiting > 0)
      log_or_print(LogLevel::kError, place() + ": runs not checked when the layer ended: " +
                                         std::to_string(waiting) + "; call status() last");
  } catch (...) {  // no memory is left
  }
}

Status RowCheck::check_and_log(const Sample& sample, bool& compared) noexcept {
  Status status;
  try {
    const Result<bool> result = check(sample);
    status = result.status();
    compared = status.code() == Code::kCheckFailed || (result.ok() && *result);
  } catch (...) {
    status = caught_exception();
  }
  if (status.ok()) return status;
  try {
    if (!compared)
      status = status.in("NVFP4_MOE_CHECK: could not check run " + std::to_string(sample.written) +
                         (name_.empty() ? "" : ": " + name_));
    log_line(LogLevel::kError, status.message());
  } catch (...) {  // no memory is left for the prefix or the log
  }
  return status;
}

Result<bool> RowCheck::load(int64_t at, int64_t local_expert, uint64_t replaced) {
  Resident& resident = residents_[reference_->index_of(at)];
  ExpertBuffers buffers;
  uint64_t last_replaced = 0;
  {
    const Hold held = hold();
    const uint64_t now = replaced_at_[weights_.index_of(local_expert)];
    if (now > replaced) return false;
    if (resident.expert == local_expert && resident.replaced == now) return true;
    last_replaced = now;
    // The sample was written after the last replacement of this expert, and no other one can begin
    // meanwhile, so that the bytes are at rest.
    NVFP4_MOE_TRY(sampler_->unpack(weights_, local_expert, backend_.unpack_expert, buffers));
  }
  resident = {};  // stays so if packing fails or throws halfway
  NVFP4_MOE_TRY(
      kReferenceBackend.pack_expert(*reference_, at, source_of(weights_.config, buffers)));
  resident = {local_expert, last_replaced};
  return true;
}

Result<bool> RowCheck::load_experts(const Sample& sample, std::vector<int64_t>& ids) {
  const int64_t top_k = weights_.config->top_k;
  const std::byte* const given = array(sample, layout_.ids);
  const auto id_of = [&](int64_t k) {
    return sample.ids_dtype == DType::kI64 ? reinterpret_cast<const int64_t*>(given)[k]
                                           : reinterpret_cast<const int32_t*>(given)[k];
  };
  const auto find = [&](int64_t expert) {
    for (int64_t at = 0; at < top_k; ++at)
      if (residents_[static_cast<size_t>(at)].expert == expert) return at;
    return int64_t{-1};
  };
  std::vector<bool> needed(static_cast<size_t>(top_k));
  std::vector<int64_t> local(static_cast<size_t>(top_k), -1);
  for (int64_t k = 0; k < top_k; ++k)
    if (const auto expert = weights_.range.local(id_of(k))) {
      local[static_cast<size_t>(k)] = *expert;
      if (const int64_t at = find(*expert); at >= 0) needed[static_cast<size_t>(at)] = true;
    }
  ids.assign(static_cast<size_t>(top_k), -1);
  for (int64_t k = 0; k < top_k; ++k) {
    const int64_t expert = local[static_cast<size_t>(k)];
    if (expert < 0) continue;
    int64_t at = find(expert);
    if (at < 0) at = std::find(needed.begin(), needed.end(), false) - needed.begin();
    needed[static_cast<size_t>(at)] = true;
    NVFP4_MOE_ASSIGN(const bool loaded, load(at, expert, sample.replaced));
    if (!loaded) return false;
    ids[static_cast<size_t>(k)] = at;
  }
  return reference_->config->shared_intermediate_size > 0
             ? load(kSharedExpert, kSharedExpert, sample.replaced)
             : Result<bool>(true);
}

Result<bool> RowCheck::check(const Sample& sample) {
  std::vector<int64_t> ids;
  NVFP4_MOE_ASSIGN(const bool loaded, load_experts(sample, ids));
  if (!loaded) return false;
  const MoeConfig& config = reference_->config;
  const int64_t hidden = config->hidden_size;
  std::vector<std::byte> out(static_cast<size_t>(hidden * (bits(sample.out_dtype) / 8)));
  Batch batch;
  batch.tokens = 1;
  batch.hidden = array(sample, layout_.hidden);
  batch.hidden_dtype = sample.hidden_dtype;
  batch.topk_ids = ids.data();
  batch.ids_dtype = DType::kI64;
  batch.topk_weights = reinterpret_cast<const float*>(array(sample, layout_.weights));
  batch.shared_weights = sample.has_shared_weight ? &sample.shared_weight : nullptr;
  batch.out = out.data();
  batch.out_dtype = sample.out_dtype;
  NVFP4_MOE_TRY(kReferenceBackend.run(*reference_, plan_, batch, workspace_.data(),
                                      RunContext{&serial_executor()}));

  Arena arena(workspace_.data());
  const RowShares shares =
      row_shares(config, batch, layer_buffers(config, reference_->range, 1, arena));
  std::vector<float> expected(static_cast<size_t>(hidden)), actual(expected.size());
  to_floats(out.data(), sample.out_dtype, hidden, expected.data());
  to_floats(array(sample, layout_.out), sample.out_dtype, hidden, actual.data());
  Comparison comparison = compare(expected.data(), actual.data(), 1, hidden, shares.norm);
  for (int64_t* token :
       {&comparison.worst_token, &comparison.max_token, &comparison.nonfinite_token})
    if (*token == 0) *token = sample.token;
  const std::string broken = broken_limit(comparison, token_limits(config, shares.elements));
  if (broken.empty()) return true;
  return check_failed(place() + ": run " + std::to_string(sample.written) + ": " + broken);
}

}  // namespace nvfp4_moe::internal
