// Runs every check of a checkpoint's layers.
// Long because one walk over a layer feeds all of them.
#include "verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>

#include "backend/backend.h"
#include "checkpoint/float_experts.h"
#include "core/dequantize.h"
#include "moe/activation_choice.h"
#include "moe/layer.h"
#include "moe/placed_batch.h"
#include "verify/verify_original.h"
#include "verify/verify_packed.h"

namespace nvfp4_moe::internal {
namespace {

double since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Progress in experts: each is packed, unpacked, packed for the reference and compared with the
// original, one unit each. A large layer takes minutes, and users want to see that it moves.
class Meter {
 public:
  Meter(const VerifyOptions& options, int64_t layers, int64_t experts)
      : progress_(options.progress), start_(std::chrono::steady_clock::now()) {
    const bool runs = options.states.tokens > 0 || !options.input.empty();
    units_of_layer_ = experts * (2 + runs + !options.against.empty());
    total_ = layers * units_of_layer_;
  }
  void start_layer(int64_t number) {
    layer_ = number;
    base_ = done_layers_++ * units_of_layer_;
    done_ = 0;
  }
  Status expert(const char* step, int64_t expert) {
    if (!progress_) return {};
    return one(fmt::format("layer {} expert {}: {}", layer_, expert, step));
  }
  Status end_layer() {
    if (!progress_) return {};
    done_ = units_of_layer_;
    return report(fmt::format("layer {}", layer_));
  }
  // Passed to MoeLayer::open, which counts the experts itself.
  ProgressFn packing(const char* step) {
    if (!progress_) return {};
    return
        [this, step](const Progress& p) { return one(fmt::format("{}: {}", p.item, step)).ok(); };
  }
  double seconds() const { return since(start_); }

 private:
  Status one(const std::string& item) {
    done_ = std::min(done_ + 1,
                     units_of_layer_);  // a shared expert is packed too, and has no unit of its own
    return report(item);
  }
  Status report(const std::string& item) {
    const int64_t done = std::min(base_ + done_, total_);
    if (progress_({"verify", item, done, total_, 0, 0, seconds()})) return {};
    return {Code::kCancelled, "verify: cancelled at " + item};
  }

  const ProgressFn& progress_;
  std::chrono::steady_clock::time_point start_;
  int64_t units_of_layer_ = 0, total_ = 0;
  int64_t layer_ = -1, done_layers_ = 0, base_ = 0, done_ = 0;
};

struct RunOutput {
  std::vector<float> out;  // (tokens, hidden_size)
  RunStatus status;
  double seconds = 0;
};

Result<RunOutput> run_layer(const MoeLayer& layer, const LayerStates& states) {
  std::vector<uint16_t> out(
      static_cast<size_t>(states.tokens * layer.config()->hidden_size));  // BF16
  Batch batch = states.batch();
  batch.out = out.data();
  batch.out_dtype = DType::kBf16;
  NVFP4_MOE_ASSIGN(const TimedRun run, run_from_host(layer, batch));
  RunOutput result{std::vector<float>(out.size()), run.status, run.seconds};
  to_floats(out.data(), DType::kBf16, static_cast<int64_t>(out.size()), result.out.data());
  return result;
}

// Counts the assignments of each expert. load_states has checked the ids.
std::vector<int64_t> load_of(const LayerStates& states, int64_t num_experts) {
  std::vector<int64_t> load(static_cast<size_t>(num_experts));
  for (const int32_t id : states.topk_ids) {
    if (id >= 0) ++load[static_cast<size_t>(id)];
  }
  return load;
}

// The rows of one original matrix, from floats in the file or from a decoded copy.
class OriginalExpert {
 public:
  static Result<OriginalExpert> load(const Checkpoint& checkpoint, int64_t layer, int64_t expert) {
    OriginalExpert original;
    if (checkpoint.model().format == SourceFormat::kFloat) {
      NVFP4_MOE_ASSIGN(FloatExpert floats, float_expert(checkpoint, layer, expert));
      original.floats_[0] = std::move(floats.gate);
      original.floats_[1] = std::move(floats.up);
      original.floats_[2] = std::move(floats.down);
      for (FloatWeights& matrix : original.floats_)
        NVFP4_MOE_TRY(matrix.fetch());  // fetches nothing for a gate without rows
      return original;
    }
    NVFP4_MOE_ASSIGN(const LoadedExpert loaded, checkpoint.expert(layer, expert));
    const Nvfp4View* views[] = {&loaded.source.gate, &loaded.source.up, &loaded.source.down};
    for (size_t p = 0; p < 3; ++p) {
      original.cols_[p] = views[p]->cols;
      original.decoded_[p].resize(static_cast<size_t>(views[p]->rows * views[p]->cols));
      NVFP4_MOE_TRY(dequantize(*views[p], DType::kF32, original.decoded_[p].data()));
    }
    return original;
  }

  OriginalRows rows(size_t projection) const {
    if (decoded_[projection].empty())
      return
          [this, projection](int64_t row, float* out) { floats_[projection].read_row(row, out); };
    return [this, projection](int64_t row, float* out) {
      std::copy_n(decoded_[projection].data() + row * cols_[projection], cols_[projection], out);
    };
  }

 private:
  FloatWeights floats_[3];
  std::vector<float> decoded_[3];  // (rows, cols); empty if floats_ is used
  int64_t cols_[3] = {0, 0, 0};
};

constexpr const char* kProjections[] = {"gate", "up", "down"};

// The likely fault of a broken tensor: the first explanation that fits its first rows.
std::string hint_for(const Checkpoint& original, int64_t layer, int64_t expert, int64_t num_experts,
                     size_t p, const Nvfp4View& view) {
  constexpr double kAlike = 0.9;  // NVFP4 keeps a cosine of 0.99; unrelated weights have one near
                                  // 0, transposed scales 0.7
  const auto against = [&](int64_t e, size_t projection) -> Likeness {
    if (e < 0 || e >= num_experts) return {};
    const auto other = OriginalExpert::load(original, layer, e);
    return other.ok() ? likeness(view, other->rows(projection)) : Likeness{};
  };
  const Likeness own = against(expert, p);
  if (own.cosine > kAlike) {
    if (std::fabs(std::log2(own.norm_ratio)) > 0.5) {
      const double s = static_cast<double>(view.tensor_scale);
      const bool reciprocal = std::fabs(std::log2(own.norm_ratio) - 2 * std::log2(s)) < 0.5;
      return fmt::format(
          "the whole tensor is {:.4g} times the original: {}", own.norm_ratio,
          reciprocal ? "its tensor scale seems to be a reciprocal" : "wrong tensor scale");
    }
    return "";
  }
  if (p < 2 && has_gate(original.model().options.activation) &&
      against(expert, 1 - p).cosine > kAlike)
    return fmt::format("it matches the original's {} of the same expert: gate and up seem swapped",
                       kProjections[1 - p]);
  for (const int64_t step : {int64_t{1}, int64_t{-1}}) {
    if (against(expert + step, p).cosine > kAlike)
      return fmt::format("it matches the original's expert {}: experts seem shifted by one",
                         expert + step);
  }
  const auto same = OriginalExpert::load(original, layer, expert);
  if (same.ok() && view.scales_stride == view.cols / 16 &&
      likeness_transposed_scales(view, same->rows(p)).cosine > kAlike)
    return "its block scales seem transposed";
  return fmt::format("cosine with the original {:.3f}", own.cosine);
}

class LayerVerifier {
 public:
  LayerVerifier(const Checkpoint& checkpoint, const Checkpoint* original,
                const VerifyOptions& options, Executor& executor, Meter& meter)
      : checkpoint_(checkpoint),
        original_(original),
        options_(options),
        executor_(executor),
        meter_(meter) {}

  // Returns an error Status if verify itself cannot continue. Faults of the layer are in `out`.
  Status run(int64_t number, LayerVerification& out) {
    const auto start = std::chrono::steady_clock::now();
    out.layer = number;
    meter_.start_layer(number);
    const Status status = steps(number, out);
    out.seconds = since(start);
    if (status.ok()) return status;
    // A fault of the files belongs to the layer that was being read. Any other error ends verify.
    if (status.code() != Code::kBadInput && status.code() != Code::kCheckFailed) return status;
    out.failures.push_back(status.message());
    return {};
  }

 private:
  Status steps(int64_t number, LayerVerification& out) {
    NVFP4_MOE_ASSIGN(out.options, checkpoint_.layer_options(number));
    if (options_.adjust) options_.adjust(out.options);
    if (options_.choose_format) {
      NVFP4_MOE_ASSIGN(
          out.options,
          with_chosen_format(out.options, layer_options({}, 0, options_.backend, options_.device)));
    }
    const Status made = MoeConfig::make(out.options).status();
    if (!made.ok()) return made.in("layer " + std::to_string(number));
    const MoeConfig config = MoeConfig::make(out.options).value();
    ExpertRange range = options_.range;
    if (range.count == 0) range = {0, config->num_experts};
    if (range.first < 0 || range.count < 1 || range.first > config->num_experts - range.count)
      return invalid_argument(
          fmt::format("experts: expected a part of [0, {}), got first {} count {}",
                      config->num_experts, range.first, range.count));

    NVFP4_MOE_ASSIGN(out.findings, checkpoint_.validate(number, range));
    for (const Finding& finding : out.findings) {
      if (finding.severity == Severity::kError) out.failures.push_back(to_string(finding));
    }
    if (!out.failures.empty()) return {};

    LayerStates states;
    const bool runs = options_.states.tokens > 0 || !options_.input.empty();
    if (runs) {
      if (options_.input.empty()) {
        states = seeded_states(out.options, number, options_.states);
      } else {
        NVFP4_MOE_ASSIGN(states, load_states(options_.input, out.options, number, options_.states));
      }
    }
    NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint_, number));
    NVFP4_MOE_TRY(packed_and_run(number, config, range, source, runs ? &states : nullptr, out));
    if (original_ != nullptr) NVFP4_MOE_TRY(against_original(number, config, range, out));
    return {};
  }

  LayerOptions layer_options(const ExpertRange& range, int64_t tokens, const std::string& backend,
                             const std::string& device) const {
    LayerOptions options;
    options.backend = backend;
    options.device = device;
    options.range = range;
    options.limits.max_tokens = std::max<int64_t>(tokens, 1);
    options.executor = &executor_;
    return options;
  }

  // Steps b and c. The backend's layer is closed before the reference's is packed.
  Status packed_and_run(int64_t number, const MoeConfig& config, const ExpertRange& range,
                        const LayerSource& source, const LayerStates* states,
                        LayerVerification& out) {
    const int64_t tokens = states == nullptr ? 0 : states->tokens;
    RunCheck check;
    RunOutput actual;
    {
      NVFP4_MOE_ASSIGN(
          const std::unique_ptr<MoeLayer> layer,
          MoeLayer::open(config, source,
                         layer_options(range, tokens, options_.backend, options_.device),
                         meter_.packing("pack")));
      NVFP4_MOE_ASSIGN(out.packed,
                       check_packed(checkpoint_, number, *layer, [this](int64_t expert) {
                         return meter_.expert("unpack and compare", expert);
                       }));
      out.fp8 = layer->fp8_weights();
      for (const WeightFault& fault : out.packed->faults)
        out.failures.push_back("packed weights: " + to_string(fault));
      check.backend = layer->backend().name;
      out.activations_because =
          reason_of_format(config->activation_format, *source.declared, layer->backend().name);
      check.backend_is_reference = &layer->backend() == &kReferenceBackend;
      if (states == nullptr) return {};
      NVFP4_MOE_ASSIGN(actual, run_layer(*layer, *states));
    }
    NVFP4_MOE_ASSIGN(const std::unique_ptr<MoeLayer> reference,
                     MoeLayer::open_on(kReferenceBackend, config, source,
                                       layer_options(range, tokens, "reference", "cpu"),
                                       meter_.packing("pack for the reference")));
    NVFP4_MOE_ASSIGN(const RunOutput expected, run_layer(*reference, *states));
    check.states = states->source;
    check.tokens = tokens;
    if (states->ids_from_file) check.expert_load = load_of(*states, config->num_experts);
    check.comparison = compare(expected.out.data(), actual.out.data(), tokens, config->hidden_size);
    check.limits = layer_limits(config, tokens);
    check.broken = broken_limit(check.comparison, check.limits);
    check.status = actual.status;
    check.reference_status = expected.status;
    check.backend_seconds = actual.seconds;
    check.reference_seconds = expected.seconds;
    if (!check.passed())
      out.failures.push_back(
          fmt::format("layer {} on {}: {}", number, check.backend, check.broken));
    out.run = std::move(check);
    return {};
  }

  // Step d.
  Status against_original(int64_t number, const MoeConfig& config, const ExpertRange& range,
                          LayerVerification& out) {
    const std::vector<int64_t>& layers = original_->model().layers;
    if (std::find(layers.begin(), layers.end(), number) == layers.end())
      return bad_input(fmt::format("layer {}: the original has no such MoE layer", number));
    NVFP4_MOE_ASSIGN(const MoeOptions theirs, original_->layer_options(number));
    if (has_gate(theirs.activation) != has_gate(config->activation))
      return bad_input(fmt::format("layer {}: expected the original to have {} experts, got {}",
                                   number, to_string(config->activation),
                                   to_string(theirs.activation)));
    if (theirs.num_experts != config->num_experts || theirs.hidden_size != config->hidden_size ||
        theirs.intermediate_size != config->intermediate_size)
      return bad_input(fmt::format(
          "layer {}: expected the original to have {} experts of ({}, {}), got {} of ({}, {})",
          number, config->num_experts, config->intermediate_size, config->hidden_size,
          theirs.num_experts, theirs.intermediate_size, theirs.hidden_size));
    OriginalCheck check;
    check.format = to_string(original_->model().format);
    OriginalComparison all, of[3];
    for (int64_t expert = range.first; expert < range.first + range.count; ++expert) {
      NVFP4_MOE_ASSIGN(const LoadedExpert loaded, checkpoint_.expert(number, expert));
      NVFP4_MOE_ASSIGN(const OriginalExpert original,
                       OriginalExpert::load(*original_, number, expert));
      const Nvfp4View* views[] = {&loaded.source.gate, &loaded.source.up, &loaded.source.down};
      OriginalComparison of_expert;
      for (auto p = static_cast<size_t>(first_matrix(config->activation)); p < 3; ++p) {
        const OriginalComparison c = compare_with_original(*views[p], original.rows(p), executor_);
        all.add_sums(c);
        of[p].add_sums(c);
        of_expert.add_sums(c);
        const std::string tensor = checkpoint_.tensor_name(number, expert, kProjections[p]);
        if (c.max_abs > check.max_abs) {
          check.max_abs = c.max_abs;
          check.max_expert = expert;
          check.max_tensor = tensor;
          check.max_row = c.max_row;
          check.max_col = c.max_col;
        }
        if (c.failures() == 0) continue;
        check.broken_half_steps += c.failures();
        if (check.faulty_tensors++ == 0)
          check.hint = hint_for(*original_, number, expert, config->num_experts, p, *views[p]);
        if (check.faults.size() >= kMaxFaults) continue;
        const WeightPlace place = c.first_failure();
        check.faults.push_back({number, expert, kProjections[p], tensor, "half_step", place.row,
                                place.col, place.expected, place.actual});
      }
      check.experts.push_back({expert, of_expert.relative_l2(), of_expert.sqnr_db()});
      NVFP4_MOE_TRY(meter_.expert("compare with the original", expert));
    }
    check.weights = all.weights;
    check.sqnr_db = all.sqnr_db();
    check.gate_sqnr_db = of[0].sqnr_db();
    check.up_sqnr_db = of[1].sqnr_db();
    check.down_sqnr_db = of[2].sqnr_db();
    check.cosine = all.cosine();
    check.relative_l2 = all.relative_l2();
    check.saturated = all.saturated;
    check.clipped_blocks = all.clipped_blocks;
    check.zeroed_blocks = all.zeroed_blocks;
    check.near_ties = all.near_ties;
    for (const WeightFault& fault : check.faults) {
      std::string failure = "original: " + to_string(fault);
      if (&fault == &check.faults.front() && !check.hint.empty()) failure += "; " + check.hint;
      out.failures.push_back(std::move(failure));
    }
    if (options_.limit_sqnr_db && !(check.sqnr_db >= *options_.limit_sqnr_db)) {
      check.below_limit = true;
      out.failures.push_back(fmt::format(
          "layer {}: SQNR {:.2f} dB against the original is below the limit of {:.2f} dB", number,
          check.sqnr_db, *options_.limit_sqnr_db));
    }
    out.original = std::move(check);
    return {};
  }

  const Checkpoint& checkpoint_;
  const Checkpoint* original_;
  const VerifyOptions& options_;
  Executor& executor_;
  Meter& meter_;
};

}  // namespace

std::string to_string(const WeightFault& fault) {
  std::string place =
      fault.row < 0 ? std::string() : fmt::format(" ({}, {})", fault.row, fault.col);
  return fmt::format("layer {} expert {} {} {}{} {}: expected {}, got {}", fault.layer,
                     fault.expert, fault.projection, fault.tensor, place, fault.what,
                     fault.expected, fault.actual);
}

bool VerifyReport::passed() const { return failed_layers() == 0; }

int64_t VerifyReport::failed_layers() const {
  return std::count_if(layers.begin(), layers.end(),
                       [](const LayerVerification& layer) { return !layer.passed(); });
}

Result<VerifyReport> verify(const std::string& path, const VerifyOptions& options) {
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(path, options.reading));
  std::optional<Checkpoint> original;
  if (!options.against.empty()) {
    auto opened = Checkpoint::open(options.against, options.reading);
    if (!opened.ok()) return opened.status().in("original");
    original = std::move(*opened);
  }
  VerifyReport report;
  report.path = path;
  report.against = options.against;
  report.format = to_string(checkpoint.model().format);
  report.family = checkpoint.model().family;
  report.findings = checkpoint.findings();
  const std::vector<int64_t>& all = checkpoint.model().layers;
  const std::vector<int64_t>& layers = options.layers.empty() ? all : options.layers;
  if (all.empty()) return bad_input(path + ": no MoE layer with expert weights found");
  for (const int64_t layer : layers) {
    if (std::find(all.begin(), all.end(), layer) == all.end())
      return invalid_argument(fmt::format("layer {}: expected one of the MoE layers {} to {}",
                                          layer, all.front(), all.back()));
  }
  Executor& executor = options.executor == nullptr ? serial_executor() : *options.executor;
  const int64_t experts =
      options.range.count > 0 ? options.range.count : checkpoint.model().options.num_experts;
  Meter meter(options, static_cast<int64_t>(layers.size()), experts);
  LayerVerifier verifier(checkpoint, original ? &*original : nullptr, options, executor, meter);
  for (const int64_t layer : layers) {
    LayerVerification verification;
    NVFP4_MOE_TRY(verifier.run(layer, verification));
    report.layers.push_back(std::move(verification));
    NVFP4_MOE_TRY(meter.end_layer());
  }
  report.seconds = meter.seconds();
  return report;
}

}  // namespace nvfp4_moe::internal
