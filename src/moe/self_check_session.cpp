#include "moe/self_check_session.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "backend/layer_steps.h"
#include "core/float_formats.h"
#include "moe/registry.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kCheckExperts = 4, kCheckTopK = 2;
// K of 1936 is eight k-blocks of 256 and sixteen of 128, both with a rest. The widest tiles are
// split only if that saves six, or twelve, of them.
constexpr int64_t kLongK = 1936;
// The GEMM with the long sums has two tiles of weight rows.
constexpr int64_t kWeightTiles = 2;
constexpr int64_t kManyRowsOfExpert = 1050;

// The kernel that stands for a run.
const std::string& kernel_of_run(const std::vector<StepPlan>& steps) {
  for (const StepPlan& step : steps)
    if (step.step == "gemm1_swiglu") return step.kernel;
  return steps.front().kernel;
}

std::string value_text(float value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.9g", static_cast<double>(value));
  return buffer;
}
std::string value_text(uint16_t bf16) { return value_text(bf16_to_float(bf16)); }
std::string value_text(int64_t value) { return std::to_string(value); }
std::string value_text(int32_t value) { return std::to_string(value); }

// Finds the first difference between the arrays of two runs, in the order of the calls.
class FirstDifference {
 public:
  FirstDifference(const char* plain, const char* own) : plain_(plain), own_(own) {}
  // (rows, cols). col: "channel"; null if a row has one value.
  template <class T>
  void compare(const std::string& step, const char* row, const char* col, const T* plain,
               const T* own, int64_t rows, int64_t cols = 1) {
    if (!step_.empty()) return;
    for (int64_t i = 0; i < rows * cols; ++i) {
      if (std::memcmp(plain + i, own + i, sizeof(T)) == 0) continue;
      step_ = step;
      text_ = step + ", " + row + " " + std::to_string(i / cols) +
              (col == nullptr ? "" : std::string(" ") + col + " " + std::to_string(i % cols)) +
              ": " + plain_ + " has " + value_text(plain[i]) + ", " + own_ + " has " +
              value_text(own[i]);
      return;
    }
  }
  const std::string& step() const { return step_; }
  const std::string& text() const { return text_; }

 private:
  const char *plain_, *own_;
  std::string step_, text_;
};

}  // namespace

void CheckLayer::set(MoeOptions& options) const {
  options.shared_intermediate_size = shared_intermediate;
  options.row_format = row_format;
  options.router_weight = router_weight;
  options.expert_biases = biases;
}

std::array<CheckLayer, 3> check_layers(Activation activation) {
  return {{{.hidden = kLongK, .intermediate = has_gate(activation) ? 80 : 144, .biases = true},
           // Rows in fp32 show every bit of the sums. The shared expert's GEMMs read rows that no
           // route has sorted, as a dense linear does.
           {.hidden = 144,
            .intermediate = kLongK,
            .shared_intermediate = 16,
            .row_format = RowFormat::kFp32,
            .router_weight = RouterWeight::kBeforeDown},
           // With many tokens: rows are quantized by warps, and assignments routed by several CTAs.
           {.hidden = 80, .intermediate = 48}}};
}

int ctas_that_split(int64_t tiles, int most) {
  int64_t best = 1, best_rest = 1;
  for (int64_t ctas = 2; ctas < tiles && ctas <= most; ++ctas)
    if (const int64_t rest = tiles % ctas; rest > 0 && rest * best < best_rest * ctas)
      best = ctas, best_rest = rest;
  return static_cast<int>(best);
}

struct CheckSession::Arrays {
  Buffer bytes;
  LayerBuffers layer;
};

CheckSession::CheckSession(const CheckScope& scope, const DeviceFacts& device,
                           Clock::time_point deadline,
                           std::function<void(const std::string&)> begins)
    : own_(*scope.backend),
      scope_(scope),
      device_(device),
      deadline_(deadline),
      begins_(std::move(begins)) {}

CheckSession::~CheckSession() {
  layers_.clear();
  buffers_.clear();
  if (stream_ != nullptr) streams_->close(stream_);
}

CheckOutcome CheckSession::run() {
  using Verdict = CheckOutcome::Verdict;
  const Status status = run_layers();
  CheckOutcome outcome;
  outcome.step_variants = static_cast<int>(step_variants_.size());
  if (status.ok()) return outcome;
  outcome.verdict = timed_out_                            ? Verdict::kTimedOut
                    : status.code() == Code::kCheckFailed ? Verdict::kFailed
                                                          : Verdict::kError;
  // A lack of memory is not the fault of a kernel.
  if (status.code() != Code::kOutOfMemory) outcome.kernel = kernel_;
  outcome.difference = status.message();
  return outcome;
}

Status CheckSession::run_layers() {
  memory_ = device_memory(device_.kind);
  streams_ = device_streams(device_.kind);
  plain_ = find_backend("cuda");
  if (memory_ == nullptr || streams_ == nullptr || plain_ == nullptr)
    return unsupported("self-check: expected a GPU and a build for it, got " + device_.name);
  NVFP4_MOE_ASSIGN(stream_, streams_->open(device_.index));
  const std::vector<int> tile_rows =
      own_.gemm_tile_rows == nullptr ? std::vector<int>() : own_.gemm_tile_rows(scope_.format);
  // One expert fills a tile of the widest configuration, and so several of the others.
  const std::vector<int64_t> full_rows = {
      tile_rows.empty() ? 64 : *std::max_element(tile_rows.begin(), tile_rows.end()), 41, 1, 0};
  std::vector<CheckedPlan> few, full;
  for (size_t i = 0; i < tile_rows.size(); ++i) {
    few.push_back({static_cast<int>(i), device_.compute_units});
    int64_t tiles = 0;
    for (const int64_t rows : full_rows) tiles += (rows + tile_rows[i] - 1) / tile_rows[i];
    full.push_back(
        {static_cast<int>(i), ctas_that_split(tiles * kWeightTiles, device_.compute_units)});
  }
  few.push_back({-1, device_.compute_units});
  if (full.empty()) full = few;
  const auto [long_gemm1, long_gemm2, tiny] = check_layers(scope_.activation);
  for (const CheckLayer& layer : {long_gemm1, long_gemm2}) {
    NVFP4_MOE_TRY(open(layer));
    NVFP4_MOE_TRY(compare_runs({2, 0, 1, 0}, few));
    NVFP4_MOE_TRY(compare_runs(full_rows, full));
  }
  NVFP4_MOE_TRY(open(tiny));
  const std::vector<int64_t> many(kCheckExperts, kManyRowsOfExpert);
  return compare_runs(many, {{-1, device_.compute_units}});
}

Status CheckSession::open(const CheckLayer& layer) {
  const ExactSizes sizes{kCheckExperts, kCheckTopK, layer.hidden, layer.intermediate};
  MoeOptions options =
      exact_options(sizes, scope_.format, scope_.activation, scope_.batch_invariant);
  layer.set(options);
  NVFP4_MOE_ASSIGN(config_, MoeConfig::make(options));
  const std::vector<ExpertBuffers> experts = exact_experts(config(), 1);
  NVFP4_MOE_ASSIGN(const std::vector<ExpertSource> sources, place(experts));
  for (const Backend* backend : {plain_, &own_}) {
    NVFP4_MOE_TRY(backend->supports(config(), device_));
    layers_.push_back({config(), {0, kCheckExperts}, {}, {}, Buffer()});
    PackedWeights& weights = layers_.back();
    weights.tensor_scales.resize(sources.size());
    weights.device = device_.index;
    NVFP4_MOE_ASSIGN(weights.bytes,
                     backend->allocate(backend->packed_bytes(config(), weights.range),
                                       weights.device, "packed weights of the self-check"));
    begin(*backend, "pack");
    for (size_t e = 0; e < sources.size(); ++e) {
      NVFP4_MOE_TRY(backend->pack_expert(
          weights, e < kCheckExperts ? static_cast<int64_t>(e) : kSharedExpert, sources[e]));
      if (!std::exchange(has_run_kernels_, true)) begins_(kernel_);
    }
    buffers_.push_back(std::move(weights.staging));
  }
  return {};
}

Status CheckSession::compare_runs(const std::vector<int64_t>& rows,
                                  const std::vector<CheckedPlan>& plans) {
  const ExactBatch batch = exact_batch(config(), ids_of_rows(rows, kCheckTopK), 2);
  NVFP4_MOE_ASSIGN(const Batch placed, place(batch));
  NVFP4_MOE_ASSIGN(auto planned, plan(*plain_, batch.tokens, {-1, device_.compute_units}));
  NVFP4_MOE_ASSIGN(const CheckRun plain,
                   run(*plain_, placed, planned.first, std::move(planned.second)));
  if (!std::all_of(plain.out.begin(), plain.out.end(), [](float x) { return std::isfinite(x); }))
    return {Code::kInternal, "cuda: expected finite outputs, got NaN or Inf"};
  int64_t all_rows = 0;
  for (const int64_t of_expert : rows) all_rows += of_expert;
  std::set<std::string> done;
  for (const CheckedPlan& checked : plans) {
    NVFP4_MOE_ASSIGN(auto own_plan, plan(own_, batch.tokens, checked));
    std::string described;
    for (const StepPlan& step : own_plan.second) described += step.step + ": " + step.kernel + "\n";
    // A plan that chooses for itself takes one of the configurations, or one launch.
    if (!done.insert(described).second && checked.configuration < 0) continue;
    NVFP4_MOE_ASSIGN(const CheckRun own,
                     run(own_, placed, own_plan.first, std::move(own_plan.second)));
    NVFP4_MOE_TRY(compare(placed, all_rows, plain, own));
    for (const StepPlan& step : own.steps) step_variants_.emplace(step.step, step.kernel);
  }
  return {};
}

Result<std::pair<Plan, std::vector<StepPlan>>> CheckSession::plan(
    const Backend& backend, int64_t tokens, const CheckedPlan& checked) const {
  Limits limits;
  limits.max_tokens = tokens;
  limits.gemm_config = checked.configuration;
  DeviceFacts device = device_;
  device.compute_units = checked.ctas;
  const ExpertRange range{0, kCheckExperts};
  NVFP4_MOE_ASSIGN(Plan plan, backend.plan(config(), range, {}, limits, device));
  auto steps = backend.describe_run == nullptr
                   ? plan.steps
                   : backend.describe_run(config(), range, plan, tokens);
  return std::pair(std::move(plan), std::move(steps));
}

Result<CheckRun> CheckSession::run(const Backend& backend, const Batch& batch, const Plan& plan,
                                   std::vector<StepPlan> steps) {
  const bool is_own = &backend != plain_;
  const PackedWeights& weights = layers_[layers_.size() - (is_own ? 1 : 2)];
  CheckRun run;
  run.steps = std::move(steps);
  run.out.resize(static_cast<size_t>(batch.tokens * config()->hidden_size));
  begin(backend, kernel_of_run(run.steps));
  // NaN if the run writes nothing, instead of what an earlier one has left there.
  const size_t workspace_bytes = plan.workspace.total_bytes,
               out_bytes = run.out.size() * sizeof(float);
  poison_.resize(std::max({poison_.size(), workspace_bytes, out_bytes}), std::byte{0xFF});
  Workspace& workspace = workspaces_[is_own ? 1 : 0];
  if (workspace.size_bytes < workspace_bytes) {
    NVFP4_MOE_ASSIGN(workspace.data, take(workspace_bytes));
    workspace.size_bytes = workspace_bytes;
  }
  run.workspace = workspace.data;
  NVFP4_MOE_TRY(copy_to(run.workspace, poison_.data(), workspace_bytes));
  NVFP4_MOE_TRY(copy_to(batch.out, poison_.data(), out_bytes));
  NVFP4_MOE_TRY(backend.run(weights, plan, batch, run.workspace, {&serial_executor(), stream_}));
  NVFP4_MOE_TRY(wait());
  NVFP4_MOE_TRY(copy_from(run.out.data(), batch.out, out_bytes));
  return run;
}

Status CheckSession::compare(const Batch& batch, int64_t rows, const CheckRun& plain,
                             const CheckRun& own) {
  const int64_t hidden = config()->hidden_size, inner = config()->intermediate_size;
  if (std::memcmp(plain.out.data(), own.out.data(), own.out.size() * sizeof(float)) == 0) return {};
  FirstDifference found(plain_->name, own_.name);
  // The GEMMs of the routed experts, or of the shared one.
  const auto compare_products = [&](const char* suffix, const PartBuffers& a, const PartBuffers& b,
                                    int64_t part_rows) {
    const auto compare_as = [&](const char* step, const auto* x, const void* y, int64_t cols) {
      found.compare(std::string(step) + suffix, "row", "channel", x, static_cast<decltype(x)>(y),
                    part_rows, cols);
    };
    compare_as("gemm1_swiglu", a.intermediate.bf16, b.intermediate.bf16, a.intermediate_size);
    if (config()->row_format == RowFormat::kBf16)
      compare_as("gemm2", static_cast<const uint16_t*>(a.rows_out), b.rows_out, hidden);
    else
      compare_as("gemm2", static_cast<const float*>(a.rows_out), b.rows_out, hidden);
  };
  if (own.steps.size() > 1) {  // one launch keeps no arrays of its steps
    NVFP4_MOE_ASSIGN(const Arrays plain_arrays, arrays_of(plain, batch.tokens));
    NVFP4_MOE_ASSIGN(const Arrays own_arrays, arrays_of(own, batch.tokens));
    const PartBuffers &a = plain_arrays.layer.routed, &b = own_arrays.layer.routed;
    found.compare("route", "first row of expert", nullptr, a.row_offsets, b.row_offsets,
                  kCheckExperts + 1);
    found.compare("route", "assignment of row", nullptr, a.assignment_of_row, b.assignment_of_row,
                  rows);
    if (a.hidden.row_scale != nullptr)
      found.compare("quantize", "scale of token", nullptr, a.hidden.row_scale, b.hidden.row_scale,
                    batch.tokens);
    compare_products("", a, b, rows);
    if (config()->shared_intermediate_size > 0)
      compare_products("_shared", plain_arrays.layer.shared, own_arrays.layer.shared, batch.tokens);
  }
  found.compare(own.steps.back().step, "token", "channel", plain.out.data(), own.out.data(),
                batch.tokens, hidden);
  for (const StepPlan& step : own.steps)
    if (step.step == found.step()) kernel_ = step.kernel;
  return check_failed(found.text() + " (" + std::to_string(batch.tokens) + " tokens, hidden_size " +
                      std::to_string(hidden) + ", intermediate_size " + std::to_string(inner) +
                      ")");
}

Result<CheckSession::Arrays> CheckSession::arrays_of(const CheckRun& run, int64_t tokens) {
  const ExpertRange range{0, kCheckExperts};
  Arena measured(nullptr);
  layer_buffers(config(), range, tokens, measured);
  Arrays arrays;
  NVFP4_MOE_ASSIGN(arrays.bytes, allocate_pages(measured.size_bytes()));
  NVFP4_MOE_TRY(copy_from(arrays.bytes.data(), run.workspace, measured.size_bytes()));
  Arena placed(arrays.bytes.data());
  arrays.layer = layer_buffers(config(), range, tokens, placed);
  return Result<Arrays>(std::move(arrays));
}

Result<std::vector<ExpertSource>> CheckSession::place(const std::vector<ExpertBuffers>& experts) {
  std::vector<ExpertSource> sources;
  for (const ExpertBuffers& expert : experts) {
    ExpertSource& source = sources.emplace_back(source_of(config(), expert));
    source.on_device = true;
    source.stream = stream_;
    for (const auto& [view, matrix] :
         {std::pair(&source.gate, &expert.gate), std::pair(&source.up, &expert.up),
          std::pair(&source.down, &expert.down)}) {
      if (view->rows == 0) continue;
      NVFP4_MOE_ASSIGN(std::byte* const codes, put(matrix->codes.data(), matrix->codes.size()));
      NVFP4_MOE_ASSIGN(std::byte* const scales,
                       put(matrix->block_scales.data(), matrix->block_scales.size()));
      view->codes = reinterpret_cast<const uint8_t*>(codes);
      view->block_scales = reinterpret_cast<const uint8_t*>(scales);
    }
  }
  return sources;
}

Result<Batch> CheckSession::place(const ExactBatch& batch) {
  const auto put_all = [this](const auto& values) {
    return put(values.data(), values.size() * sizeof(values[0]));
  };
  Batch placed;
  placed.tokens = batch.tokens;
  placed.out_dtype = DType::kF32;
  NVFP4_MOE_ASSIGN(placed.hidden, put_all(batch.hidden));
  NVFP4_MOE_ASSIGN(placed.topk_ids, put_all(batch.topk_ids));
  NVFP4_MOE_ASSIGN(std::byte* const weights, put_all(batch.topk_weights));
  placed.topk_weights = reinterpret_cast<const float*>(weights);
  const auto values = static_cast<size_t>(batch.tokens * config()->hidden_size);
  NVFP4_MOE_ASSIGN(placed.out, take(values * sizeof(float)));
  return placed;
}

Result<std::byte*> CheckSession::take(size_t size_bytes) {
  NVFP4_MOE_ASSIGN(Buffer buffer,
                   plain_->allocate(size_bytes, device_.index, "memory of the self-check"));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

Result<std::byte*> CheckSession::put(const void* from, size_t size_bytes) {
  NVFP4_MOE_ASSIGN(std::byte* const to, take(size_bytes));
  NVFP4_MOE_TRY(copy_to(to, from, size_bytes));
  return to;
}

Status CheckSession::copy_to(void* to, const void* from, size_t size_bytes) {
  return memory_->to_device(device_.index, to, from, size_bytes, stream_);
}

Status CheckSession::copy_from(void* to, const void* from, size_t size_bytes) {
  return memory_->to_host(device_.index, to, from, size_bytes, stream_);
}

Status CheckSession::wait() {
  constexpr std::chrono::microseconds kShortest{10}, kLongest{1000};
  for (auto pause = kShortest;; pause = std::min(2 * pause, kLongest)) {
    NVFP4_MOE_ASSIGN(const bool ended, streams_->has_ended(stream_));
    if (ended) return {};
    if (Clock::now() >= deadline_) {
      timed_out_ = true;
      return {Code::kBusy, "it did not end"};
    }
    std::this_thread::sleep_for(pause);
  }
}

void CheckSession::begin(const Backend& backend, const std::string& kernel) {
  kernel_ = (&backend == plain_ ? CheckOutcome::kPlainKernel : "") + kernel;
  if (has_run_kernels_) begins_(kernel_);
}

}  // namespace nvfp4_moe::internal
