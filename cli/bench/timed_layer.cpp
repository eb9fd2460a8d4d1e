#include "cli/bench/timed_layer.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>

namespace nvfp4_moe::internal::cli {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - begin).count();
}

// Calls time(step, function) for the six steps, in their order, until one fails.
template <class Time>
Status walk_steps(const LayerSteps& steps, const StepContext& step, const Time& time) {
  NVFP4_MOE_TRY(time(0, [&] { return steps.route(step); }));
  NVFP4_MOE_TRY(time(1, [&] { return steps.quantize(step); }));
  for (const PartBuffers* part : {&step.buffers.routed, &step.buffers.shared}) {
    if (part->experts == 0) continue;
    NVFP4_MOE_TRY(time(kGemm1, [&] { return steps.gemm1_swiglu(step, *part); }));
    NVFP4_MOE_TRY(time(3, [&] { return steps.requantize(step, *part); }));
    NVFP4_MOE_TRY(time(kGemm2, [&] { return steps.gemm2(step, *part); }));
  }
  NVFP4_MOE_TRY(time(5, [&] { return steps.combine(step); }));
  return {};
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

size_t touch_oldest(RandomTokens& batch, std::vector<int32_t>& oldest) {
  std::map<int32_t, int32_t> names;
  for (int32_t& id : batch.ids) {
    const auto found =
        names.try_emplace(id, oldest[std::min(names.size(), oldest.size() - 1)]).first;
    id = found->second;
  }
  std::rotate(oldest.begin(), oldest.begin() + static_cast<int64_t>(names.size()), oldest.end());
  return names.size();
}

Result<TimedLayer> TimedLayer::open(const Subject& subject, const std::string& backend,
                                    const std::string& device, int64_t max_tokens, int64_t copies,
                                    Executor& executor, const ProgressFn& progress) {
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(subject.options));
  LayerOptions options;
  options.backend = backend;
  options.device = device;
  options.range = subject.range;
  options.limits.max_tokens = max_tokens;
  options.executor = &executor;
  std::vector<std::unique_ptr<MoeLayer>> layers;
  for (int64_t i = 0; i < copies; ++i) {
    NVFP4_MOE_ASSIGN(auto layer, MoeLayer::open(config, subject.source, options, progress));
    layers.push_back(std::move(layer));
  }
  const MoeLayer& first = *layers.front();
  NVFP4_MOE_ASSIGN(Buffer workspace, first.backend().allocate(first.workspace_bytes(),
                                                              first.weights().device, "workspace"));
  return TimedLayer(subject, std::move(layers), std::move(workspace));
}

ColdBatches cold_batches(const MoeOptions& options, const ExpertRange& range, int64_t tokens,
                         uint64_t seed, size_t copies) {
  std::vector<int32_t> all(static_cast<size_t>(range.count));
  std::iota(all.begin(), all.end(), static_cast<int32_t>(range.first));
  std::vector<std::vector<int32_t>> oldest(copies, all);
  std::vector<size_t> touched(copies);
  ColdBatches cold;
  // Until every copy has been used completely, so that the first batch finds nothing cached when it
  // is used again.
  while (cold.tokens.size() < kLeastBatches ||
         *std::min_element(touched.begin(), touched.end()) < all.size()) {
    for (size_t copy = 0; copy < copies; ++copy) {
      cold.tokens.push_back(random_tokens(options, range, tokens, seed + cold.tokens.size()));
      const size_t experts = touch_oldest(cold.tokens.back(), oldest[copy]);
      touched[copy] += std::max<size_t>(experts, 1);
      cold.experts.push_back(static_cast<double>(experts));
    }
  }
  return cold;
}

Status TimedLayer::prepare(int64_t tokens, uint64_t seed) {
  placed_.clear();
  batches_.reset();  // frees the old batches before new ones are made
  return prepare(
      std::make_shared<ColdBatches>(cold_batches(options_, range_, tokens, seed, copies_.size())));
}

Status TimedLayer::prepare(std::shared_ptr<ColdBatches> batches) {
  placed_.clear();
  batches_ = std::move(batches);
  next_ = 0;
  if (layer().backend().memory == nullptr) return {};
  for (RandomTokens& batch : batches_->tokens) {
    NVFP4_MOE_ASSIGN(PlacedBatch placed, PlacedBatch::place(layer(), batch.batch()));
    placed_.push_back(std::move(placed));
  }
  return {};
}

// Calls body(batch, copy, timed) and returns the batches of the timed calls.
template <class Body>
Result<std::vector<size_t>> TimedLayer::repeat_calls(const Repeat& repeat, const Body& body) {
  std::vector<size_t> timed;
  const auto begin = Clock::now();
  for (int64_t run = -kUntimedRuns; run < repeat.most_runs; ++run) {
    const size_t batch = next_++ % batches_->tokens.size();
    NVFP4_MOE_TRY(body(batches_->tokens[batch], *copies_[batch % copies_.size()], run >= 0));
    if (run >= 0) timed.push_back(batch);
    if (run + 1 >= kLeastRuns && microseconds(begin, Clock::now()) > repeat.seconds * 1e6) break;
  }
  return timed;
}

Result<RunTimes> TimedLayer::time_replays(const Repeat& repeat) const {
  const DeviceMeasures* const measures = layer().backend().measures;
  if (measures == nullptr)
    return unsupported(std::string("bench: backend ") + layer().backend().name +
                       " has no clock for its device");
  const auto all = [&](void* stream) -> Status {
    for (size_t batch = 0; batch < placed_.size(); ++batch)
      NVFP4_MOE_TRY(copies_[batch % copies_.size()]->run(placed_[batch].batch(), workspace_.data(),
                                                         workspace_.size_bytes(), stream));
    return {};
  };
  const auto count = static_cast<double>(placed_.size());
  RunTimes times;
  NVFP4_MOE_ASSIGN(
      times.us, measures->time_graph(layer().weights().device, all, repeat.seconds,
                                     std::max<int64_t>(repeat.most_runs / std::ssize(placed_), 1)));
  for (double& us : times.us) us /= count;
  std::sort(times.us.begin(), times.us.end());
  times.experts = std::accumulate(batches_->experts.begin(), batches_->experts.end(), 0.0) / count;
  return times;
}

Result<RunTimes> TimedLayer::time_runs(const Repeat& repeat) {
  if (!placed_.empty()) return time_replays(repeat);
  RunTimes times;
  NVFP4_MOE_ASSIGN(
      const std::vector<size_t> timed,
      repeat_calls(repeat, [&](RandomTokens& tokens, const MoeLayer& layer, bool count) -> Status {
        const Batch batch = tokens.batch();
        const auto begin = Clock::now();
        NVFP4_MOE_TRY(layer.run(batch, workspace_.data(), workspace_.size_bytes()));
        if (count) times.us.push_back(microseconds(begin, Clock::now()));
        return {};
      }));
  for (const size_t batch : timed) times.experts += batches_->experts[batch];
  times.experts /= static_cast<double>(timed.size());
  std::sort(times.us.begin(), times.us.end());
  return times;
}

Result<std::array<double, kSteps>> TimedLayer::time_steps(const Repeat& repeat,
                                                          const LayerBuffers& buffers,
                                                          const Arena& scratch) {
  std::array<std::vector<double>, kSteps> us;
  NVFP4_MOE_TRY(
      repeat_calls(repeat, [&](RandomTokens& tokens, const MoeLayer& layer, bool count) -> Status {
        const Batch batch = tokens.batch();
        const StepContext context{layer.weights(), batch, buffers, layer.executor(), scratch};
        std::array<double, kSteps> of_run{};
        NVFP4_MOE_TRY(walk_steps(*layer.backend().steps, context,
                                 [&](size_t step, const auto& work) -> Status {
                                   const auto begin = Clock::now();
                                   NVFP4_MOE_TRY(work());
                                   of_run[step] += microseconds(begin, Clock::now());
                                   return {};
                                 }));
        for (size_t step = 0; count && step < kSteps; ++step) us[step].push_back(of_run[step]);
        return {};
      }).status());
  std::array<double, kSteps> medians{};
  for (size_t step = 0; step < kSteps; ++step) medians[step] = median(us[step]);
  return medians;
}

// A step's time is the difference between a graph of the calls up to it and one without it.
Result<std::array<double, kSteps>> TimedLayer::time_device_steps(const Repeat& repeat,
                                                                 const LayerBuffers& buffers,
                                                                 const Arena& scratch) const {
  const DeviceMeasures& measures = *layer().backend().measures;
  const int device = layer().weights().device;
  std::array<double, kSteps> us{};
  double before = 0;
  bool all_taken = false;
  for (size_t calls = 1; !all_taken; ++calls) {
    size_t last_step = 0;
    const auto first_calls = [&](void* stream) -> Status {
      for (size_t batch = 0; batch < placed_.size(); ++batch) {
        const MoeLayer& copy = *copies_[batch % copies_.size()];
        const Batch& placed = placed_[batch].batch();
        const LayerSteps& steps = *copy.backend().steps;
        const auto plan =
            steps.plan == nullptr ? nullptr : steps.plan(copy.weights(), copy.plan(), placed);
        const StepContext context{copy.weights(), placed, buffers,   copy.executor(),
                                  scratch,        stream, plan.get()};
        size_t taken = 0;
        all_taken = true;
        NVFP4_MOE_TRY(walk_steps(steps, context, [&](size_t step, const auto& work) -> Status {
          all_taken &= ++taken <= calls;
          if (taken > calls) return {};
          last_step = step;
          return work();
        }));
      }
      return {};
    };
    NVFP4_MOE_ASSIGN(
        const std::vector<double> times,
        measures.time_graph(device, first_calls, repeat.seconds / kSteps, repeat.most_runs));
    const double so_far = median(times) / static_cast<double>(placed_.size());
    us[last_step] += std::max(so_far - before, 0.0);
    before = so_far;
  }
  return us;
}

Result<std::array<double, kSteps>> TimedLayer::time_steps(const Repeat& repeat) {
  const MoeLayer& first = layer();
  const bool on_device = first.backend().memory != nullptr;
  if (first.backend().steps == nullptr || (on_device && first.backend().measures == nullptr))
    return unsupported(std::string("--steps: backend ") + first.backend().name +
                       " does not show its steps");
  Arena arena(workspace_.data());
  const LayerBuffers buffers =
      layer_buffers(first.config(), range_, batches_->tokens.front().tokens, arena);
  return on_device ? time_device_steps(repeat, buffers, arena) : time_steps(repeat, buffers, arena);
}

}  // namespace nvfp4_moe::internal::cli
