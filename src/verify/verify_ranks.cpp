#include "verify/verify_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/dequantize.h"
#include "moe/activation_choice.h"
#include "moe/placed_batch.h"

namespace nvfp4_moe::internal {
namespace {

constexpr Timeout kSlowest{30 * 60 * 1000};  // time for rank 0 to run the whole layer by itself

// Tokens [first, end) of a rank.
struct Tokens {
  int64_t first, end;
  static Tokens of(const RanksOptions& options, int64_t tokens, int rank, int world) {
    if (options.combine == CombineBy::kAllReduce) return {0, tokens};
    return {rank * tokens / world, (rank + 1) * tokens / world};
  }
  int64_t count() const { return end - first; }
};

class RankVerifier {
 public:
  RankVerifier(const Checkpoint& checkpoint, const RanksOptions& options,
               std::shared_ptr<Exchange> exchange, std::string device, Executor& executor,
               ProgressFn progress)
      : checkpoint_(checkpoint),
        options_(options),
        exchange_(std::move(exchange)),
        device_(std::move(device)),
        executor_(executor),
        progress_(std::move(progress)) {}

  Status run(std::vector<RanksCheck>& checks) {
    for (const int64_t number : options_.layers) {
      RanksCheck check;
      NVFP4_MOE_TRY(layer(number, check));
      NVFP4_MOE_TRY(exchange_->agree({}, kSlowest));
      if (exchange_->rank() == 0) checks.push_back(std::move(check));
    }
    return {};
  }

 private:
  Status layer(int64_t number, RanksCheck& check) {
    const int rank = exchange_->rank(), world = exchange_->world();
    NVFP4_MOE_ASSIGN(MoeOptions sizes, checkpoint_.layer_options(number));
    if (options_.adjust) options_.adjust(sizes);
    if (device_ != "cpu" && options_.combine == CombineBy::kAllToAll) sizes.batch_invariant = true;
    LayerOptions layer_options;
    layer_options.backend = options_.backend;
    layer_options.device = device_;
    if (options_.choose_format) {
      NVFP4_MOE_ASSIGN(sizes, with_chosen_format(sizes, layer_options));
    }
    const LayerStates states = seeded_states(sizes, number, options_.states);
    layer_options.limits.max_tokens = std::max<int64_t>(states.tokens, 1);
    layer_options.executor = &executor_;
    Parallel parallel{exchange_, {}};
    parallel.options.combine = options_.combine;
    NVFP4_MOE_ASSIGN(const auto opened, open_layer(checkpoint_, number, sizes, {}, layer_options,
                                                   {}, parallel, progress_));
    const int64_t hidden = sizes.hidden_size;
    const Tokens mine = Tokens::of(options_, states.tokens, rank, world);
    std::vector<uint16_t> out(
        static_cast<size_t>(std::max<int64_t>(mine.count() * hidden, 1)));  // bf16
    Batch batch = states.batch();
    batch.tokens = mine.count();
    batch.hidden = states.hidden.data() + mine.first * hidden * bits(states.hidden_dtype) / 8;
    batch.topk_ids = states.topk_ids.data() + mine.first * sizes.top_k;
    batch.topk_weights = states.topk_weights.data() + mine.first * sizes.top_k;
    batch.out = out.data();
    batch.out_dtype = DType::kBf16;
    NVFP4_MOE_TRY(run_from_host(*opened, batch).status());

    // Each rank sends its output to rank 0.
    std::vector<int64_t> send(static_cast<size_t>(world)), recv(static_cast<size_t>(world));
    send[0] = mine.count() * hidden * 2;
    int64_t total = 0;
    for (int r = 0; r < world && rank == 0; ++r)
      total += recv[static_cast<size_t>(r)] =
          Tokens::of(options_, states.tokens, r, world).count() * hidden * 2;
    std::vector<uint16_t> all(static_cast<size_t>(std::max<int64_t>(total / 2, 1)));
    NVFP4_MOE_TRY(exchange_->all_to_all_v(out.data(), send, all.data(), recv));
    if (rank == 0) NVFP4_MOE_TRY(judge(number, sizes, states, layer_options, *opened, all, check));
    return {};
  }

  // all: the outputs of the ranks, one after another.
  Status judge(int64_t number, const MoeOptions& sizes, const LayerStates& states,
               const LayerOptions& options, const MoeLayer& opened,
               const std::vector<uint16_t>& all, RanksCheck& check) const {
    NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(sizes));
    NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint_, number));
    NVFP4_MOE_ASSIGN(const auto whole, MoeLayer::open(config, source, options));
    const auto values = static_cast<size_t>(states.tokens * sizes.hidden_size);
    std::vector<uint16_t> expected(values);
    Batch batch = states.batch();
    batch.out = expected.data();
    batch.out_dtype = DType::kBf16;
    NVFP4_MOE_TRY(nvfp4_moe::internal::run_from_host(*whole, batch).status());
    check.layer = number;
    check.backend = opened.backend().name;
    check.tokens = states.tokens;
    check.batch_invariant = sizes.batch_invariant;
    check.wants_same_bits =
        options_.combine == CombineBy::kAllToAll &&
        (sizes.activation_format != ActivationFormat::kBf16 || sizes.batch_invariant);
    check.same_bits = true;
    std::vector<float> want(values), got(values);
    to_floats(expected.data(), DType::kBf16, static_cast<int64_t>(values), want.data());
    const size_t parts =
        options_.combine == CombineBy::kAllReduce ? static_cast<size_t>(exchange_->world()) : 1;
    for (size_t part = 0; part < parts; ++part) {
      const uint16_t* const one = all.data() + part * values;
      if (parts > 1 && std::memcmp(one, all.data(), values * 2) != 0)
        check.broken = fmt::format("rank {} has other bits than rank 0", part);
      check.same_bits = check.same_bits && std::memcmp(one, expected.data(), values * 2) == 0;
    }
    to_floats(all.data(), DType::kBf16, static_cast<int64_t>(values), got.data());
    check.comparison =
        nvfp4_moe::internal::compare(want.data(), got.data(), states.tokens, sizes.hidden_size);
    if (check.broken.empty())
      check.broken = broken_limit(check.comparison, layer_limits(config, states.tokens));
    if (check.broken.empty() && check.wants_same_bits && !check.same_bits)
      check.broken = "other bits than one rank with all experts";
    return {};
  }

  const Checkpoint& checkpoint_;
  const RanksOptions& options_;
  const std::shared_ptr<Exchange> exchange_;
  const std::string device_;
  Executor& executor_;
  const ProgressFn progress_;
};

// Runs one rank with a checkpoint of its own: ranks share only the exchange.
Status verify_rank(const std::string& path, const RanksOptions& options,
                   std::shared_ptr<Exchange> exchange, const std::string& device, int threads,
                   const ProgressFn& progress, std::vector<RanksCheck>& checks) {
  const Result<Checkpoint> checkpoint = Checkpoint::open(path, options.reading);
  NVFP4_MOE_TRY(exchange->agree(checkpoint.status()));
  const std::unique_ptr<Executor> executor = make_thread_pool(threads);
  return RankVerifier(*checkpoint, options, std::move(exchange), device, *executor, progress)
      .run(checks);
}

}  // namespace

Result<std::vector<RanksCheck>> verify_ranks(const std::string& path, const LocalRanks& ranks,
                                             const RanksOptions& options) {
  std::vector<RanksCheck> checks;
  RanksProgress progress(ranks, options.progress);
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int threads = std::max(1, (options.threads > 0 ? options.threads : cores) / ranks.here());
  NVFP4_MOE_TRY(ranks.each([&](int index) {
    const std::string device = options.device ? options.device(index) : "cpu";
    return verify_rank(path, options, ranks.exchange(index), device, threads,
                       progress.of_rank(index), checks);
  }));
  return checks;
}

}  // namespace nvfp4_moe::internal
