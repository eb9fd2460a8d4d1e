#include "cli/bench/timed_ranks.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <utility>

#include "cli/bench/peer_bytes.h"

namespace nvfp4_moe::internal::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Timeout kSlowest{30 * 60 * 1000};  // while a rank packs its layers and makes its batches

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace

double RanksRound::rank_median_us(size_t rank) const {
  std::vector<double> us;
  for (const RankRun& run : ranks[rank]) us.push_back(run.us);
  return median(std::move(us));
}

double RanksRound::sent_bytes(size_t rank) const {
  double sum = 0;
  for (const RankRun& run : ranks[rank]) sum += run.all_sent_bytes();
  return sum / static_cast<double>(ranks[rank].size());
}

double RanksRound::sent_bytes(size_t rank, WirePart part) const {
  double sum = 0;
  for (const RankRun& run : ranks[rank]) sum += run.sent_bytes[static_cast<size_t>(part)];
  return sum / static_cast<double>(ranks[rank].size());
}

double RanksRound::share(WirePart part) const {
  double of_part = 0, all = 0;
  for (const std::vector<RankRun>& runs : ranks)
    for (const RankRun& run : runs) {
      of_part += run.part_us[static_cast<size_t>(part)];
      all += run.us;
    }
  return of_part / all;
}

Result<TimedRanks> TimedRanks::open(RankHosts& hosts, const Subject& subject,
                                    const std::string& backend, const RanksLayer& divided,
                                    const ProgressFn& progress) {
  TimedRanks timed(hosts, subject, divided);
  const LocalRanks& ranks = hosts.ranks();
  for (int index = 0; index < ranks.here(); ++index)
    timed.ranks_.push_back(std::make_unique<Rank>());
  RanksProgress combined(ranks, progress);
  std::vector<Status> opened(timed.ranks_.size());
  NVFP4_MOE_TRY(ranks.each([&](int index) -> Status {
    opened[static_cast<size_t>(index)] =
        timed.open_rank(index, subject, backend, combined.of_rank(index));
    return {};  // collective as well
  }));
  NVFP4_MOE_TRY(opened.front());
  return timed;
}

Status TimedRanks::open_rank(int index, const Subject& subject, const std::string& backend,
                             const ProgressFn& progress) {
  Rank& rank = *ranks_[static_cast<size_t>(index)];
  const RankHosts::Host& host = *hosts_->hosts_[static_cast<size_t>(index)];
  const std::shared_ptr<Exchange>& exchange = hosts_->ranks().exchange(index);
  const int world = exchange->world();
  const Result<MoeConfig> config = MoeConfig::make(subject.options);
  NVFP4_MOE_TRY(exchange->agree(config.status()));
  LayerOptions options;
  options.backend = backend;
  options.device = host.device;
  options.executor = host.executor.get();
  // all_to_all: the most of these tokens that one rank has.
  options.limits.max_tokens =
      combine() == CombineBy::kAllReduce ? max_tokens() : (max_tokens() + world - 1) / world;
  ExpertParallelOptions parallel;
  parallel.combine = combine();
  parallel.placement = divided_.placement;
  // A graph's messages have a fixed size: room for all tokens of a rank.
  if (combine() == CombineBy::kAllToAll && host.device != "cpu")
    parallel.capacity = options.limits.max_tokens;
  for (int64_t copy = 0; copy < divided_.copies; ++copy) {
    NVFP4_MOE_ASSIGN(auto layer, open_over_ranks(*config, subject.source, options, parallel,
                                                 exchange, progress));
    rank.copies.push_back(std::move(layer));
  }
  const auto allocate = [&]() -> Status {
    const MoeLayer& first = *rank.copies.front();
    const size_t bytes =
        std::max(first.workspace_bytes(), first.local_workspace_bytes(max_tokens()));
    NVFP4_MOE_ASSIGN(rank.workspace,
                     first.backend().allocate(bytes, first.weights().device, "workspace"));
    rank.out.resize(static_cast<size_t>(max_tokens() * subject.options.hidden_size));
    return {};
  };
  return exchange->agree(allocate(), kSlowest);
}

Batch TimedRanks::part_of(RandomTokens& tokens, int index) const {
  Batch batch = tokens.batch();
  batch.out = ranks_[static_cast<size_t>(index)]->out.data();
  if (combine() == CombineBy::kAllReduce) return batch;
  const Exchange& exchange = this->exchange(index);
  const int64_t first = first_token(tokens.tokens, exchange.rank(), exchange.world());
  batch.tokens = first_token(tokens.tokens, exchange.rank() + 1, exchange.world()) - first;
  batch.hidden = tokens.hidden.data() + first * options_.hidden_size;
  batch.topk_ids = tokens.ids.data() + first * options_.top_k;
  batch.topk_weights = tokens.weights.data() + first * options_.top_k;
  return batch;
}

Status TimedRanks::Prepared::add(const MoeLayer& layer, const Batch& batch) {
  if (layer.backend().memory == nullptr) {
    batches.push_back(batch);
    return {};
  }
  NVFP4_MOE_ASSIGN(PlacedBatch in_memory, PlacedBatch::place(layer, batch));
  batches.push_back(in_memory.batch());
  placed.push_back(std::move(in_memory));
  return {};
}

Status TimedRanks::rearrange(const Placement& placement, const LayerSource& source) {
  return hosts_->ranks().each([&](int index) -> Status {
    for (const auto& copy : ranks_[static_cast<size_t>(index)]->copies)
      NVFP4_MOE_TRY(ranks_of(*copy).rearrange(placement, source));
    return {};
  });
}

Status TimedRanks::prepare(const std::shared_ptr<ColdBatches>& batches, bool own_experts) {
  batches_ = batches;
  return hosts_->ranks().each([&](int index) -> Status {
    Rank& rank = *ranks_[static_cast<size_t>(index)];
    rank.parts = {};
    rank.own = {};
    rank.own_slots.clear();
    rank.busiest.clear();
    const auto place = [&]() -> Status {
      for (RandomTokens& tokens : batches_->tokens)
        NVFP4_MOE_TRY(rank.parts.add(*rank.copies.front(), part_of(tokens, index)));
      return own_experts ? prepare_own(index) : Status();
    };
    return exchange(index).agree(place(), kSlowest);
  });
}

Status TimedRanks::prepare_own(int index) {
  Rank& rank = *ranks_[static_cast<size_t>(index)];
  const MoeLayer& layer = *rank.copies.front();
  const Placement& placement = this->placement();
  for (RandomTokens& tokens : batches_->tokens) {
    std::vector<int32_t>& slots =
        rank.own_slots.emplace_back(slots_of(tokens, options_.top_k, placement, combine()));
    for (int32_t& slot : slots)
      if (placement.rank_of(slot) != exchange(index).rank()) slot = -1;
    Batch batch = tokens.batch();
    batch.topk_ids = slots.data();
    batch.out = rank.out.data();
    NVFP4_MOE_TRY(rank.own.add(layer, batch));
  }
  const std::vector<int> busiest = busiest_ranks(*batches_, options_.top_k, placement, combine());
  for (size_t batch = 0; batch < busiest.size(); ++batch)
    if (busiest[batch] == exchange(index).rank()) rank.busiest.push_back(batch);
  return {};
}

Status TimedRanks::run(const Rank& rank, RanksWork work, size_t batch, void* stream) const {
  const MoeLayer& layer = *rank.copies[batch % rank.copies.size()];
  void* const workspace = rank.workspace.data();
  const size_t bytes = rank.workspace.size_bytes();
  return work == RanksWork::kLayer
             ? layer.run(rank.parts.batches[batch], workspace, bytes, stream)
             : layer.run_local(rank.own.batches[batch], workspace, bytes, stream);
}

Status TimedRanks::time_runs(int index, const Repeat& repeat, RanksWork work,
                             std::vector<RankRun>& runs) const {
  const Rank& rank = *ranks_[static_cast<size_t>(index)];
  WireRecorder& recorder = hosts_->hosts_[static_cast<size_t>(index)]->recorder;
  Exchange& exchange = this->exchange(index);
  std::vector<uint8_t> goes_on(static_cast<size_t>(exchange.world()));
  const auto begin = Clock::now();
  for (int64_t run = -kUntimedRuns;; ++run) {
    // All ranks begin together, and rank 0 decides whether there is another run.
    const auto mine = static_cast<uint8_t>(
        run < repeat.most_runs &&
        (run < kLeastRuns || microseconds_since(begin) <= repeat.seconds * 1e6));
    NVFP4_MOE_TRY(exchange.all_gather(&mine, 1, goes_on.data()));
    if (goes_on[0] == 0) return {};
    const size_t batch = static_cast<size_t>(run + kUntimedRuns) % batches_->tokens.size();
    recorder.clear();
    recorder.begin_run();
    const auto start = Clock::now();
    NVFP4_MOE_TRY(this->run(rank, work, batch, nullptr));
    const double us = microseconds_since(start);
    if (run < 0) continue;
    runs.push_back(recorder.run());
    runs.back().us = us;
  }
}

Status TimedRanks::time_replays(int index, const Repeat& repeat, RanksWork work,
                                std::vector<RankRun>& runs) const {
  const Rank& rank = *ranks_[static_cast<size_t>(index)];
  WireRecorder& recorder = hosts_->hosts_[static_cast<size_t>(index)]->recorder;
  Exchange& exchange = this->exchange(index);
  const MoeLayer& layer = *rank.copies.front();
  const DeviceMeasures* const measures = layer.backend().measures;
  const Status measured = measures != nullptr
                              ? Status()
                              : unsupported(std::string("bench: backend ") + layer.backend().name +
                                            " has no clock for its device");
  NVFP4_MOE_TRY(exchange.agree(measured));
  const auto count = static_cast<double>(batches_->tokens.size());
  const auto replay = [&](const std::vector<size_t>& batches,
                          int64_t times) -> Result<std::vector<double>> {
    const auto all = [&](void* stream) -> Status {
      recorder.clear();
      for (const size_t batch : batches) {
        recorder.begin_run();
        NVFP4_MOE_TRY(run(rank, work, batch, stream));
      }
      return {};
    };
    // The same number on all ranks, so the clock must not decide.
    return measures->time_graph(layer.weights().device, all, std::numeric_limits<double>::max(),
                                times);
  };
  std::vector<size_t> all(batches_->tokens.size());
  std::iota(all.begin(), all.end(), size_t{0});
  NVFP4_MOE_TRY(exchange.barrier());  // own experts have no other synchronization at the begin
  NVFP4_MOE_ASSIGN(std::vector<double> us, replay(all, kLeastRuns));
  // Rank 0's times determine how many replays fill the time.
  const double wanted = repeat.seconds * 1e6 / std::max(median(us), 1.0);
  const auto most = static_cast<double>(repeat.most_runs) / count;
  int64_t times = std::max(kLeastRuns, static_cast<int64_t>(std::min(wanted, most)));
  std::vector<int64_t> of_ranks(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(&times, sizeof(times), of_ranks.data()));
  times = of_ranks[0];
  if (times > kLeastRuns) {
    NVFP4_MOE_ASSIGN(us, replay(all, times));
  }
  if (work == RanksWork::kLayer && exchange.peers() != nullptr)
    for (const RandomTokens& batch : batches_->tokens) {
      const PeerBytes bytes = peer_bytes(ranks_of(*rank.copies.front()), batch);
      recorder.add(WirePart::kDispatch, bytes.dispatch);
      recorder.add(WirePart::kCombine, bytes.combine);
    }
  RankRun recorded = recorder.run();
  for (double& sent : recorded.sent_bytes) sent /= count;
  recorded.part_us = {};
  std::vector<double> busiest_us(us.size());
  if (work == RanksWork::kOwnExperts && !rank.busiest.empty()) {
    // About as many batches as in the graph of all, so that the cost of starting a replay is
    // divided by the same number.
    std::vector<size_t> again;
    const size_t repeats = all.size() / rank.busiest.size();
    for (size_t i = 0; i < repeats; ++i)
      again.insert(again.end(), rank.busiest.begin(), rank.busiest.end());
    NVFP4_MOE_ASSIGN(busiest_us, replay(again, times));
    for (double& replay_us : busiest_us) replay_us /= static_cast<double>(repeats);
  }
  for (size_t at = 0; at < us.size(); ++at) {
    recorded.us = us[at] / count;
    recorded.as_busiest_us = busiest_us[at] / count;
    runs.push_back(recorded);
  }
  return {};
}

Result<RanksRound> TimedRanks::time(const Repeat& repeat, RanksWork work) {
  const bool on_device = layer().backend().memory != nullptr;
  RanksRound round;
  NVFP4_MOE_TRY(hosts_->ranks().each([&](int index) -> Status {
    std::vector<RankRun> runs;
    NVFP4_MOE_TRY(on_device ? time_replays(index, repeat, work, runs)
                            : time_runs(index, repeat, work, runs));
    Exchange& exchange = this->exchange(index);
    const auto world = static_cast<size_t>(exchange.world());
    std::vector<RankRun> all(world * runs.size());
    NVFP4_MOE_TRY(exchange.all_gather(
        runs.data(), static_cast<int64_t>(runs.size() * sizeof(RankRun)), all.data()));
    if (index != 0) return {};
    for (size_t rank = 0; rank < world; ++rank)
      round.ranks.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(rank * runs.size()),
                               all.begin() + static_cast<std::ptrdiff_t>((rank + 1) * runs.size()));
    return {};
  }));
  for (size_t run = 0; run < round.ranks.front().size(); ++run) {
    double slowest = 0, busiest = 0;
    for (const std::vector<RankRun>& runs : round.ranks) {
      slowest = std::max(slowest, runs[run].us);
      busiest += runs[run].as_busiest_us;
    }
    round.slowest_us.push_back(busiest > 0 ? busiest : slowest);
  }
  std::sort(round.slowest_us.begin(), round.slowest_us.end());
  return round;
}

Result<std::vector<uint16_t>> TimedRanks::outputs(RandomTokens& batch) {
  std::vector<uint16_t> all;
  NVFP4_MOE_TRY(hosts_->ranks().each([&](int index) -> Status {
    const Rank& rank = *ranks_[static_cast<size_t>(index)];
    const MoeLayer& layer = *rank.copies.front();
    Exchange& exchange = this->exchange(index);
    const Batch mine = part_of(batch, index);
    NVFP4_MOE_ASSIGN(const PlacedBatch placed, PlacedBatch::place(layer, mine));
    NVFP4_MOE_TRY(layer.run(placed.batch(), rank.workspace.data(), rank.workspace.size_bytes()));
    if (const DeviceMemory* const memory = layer.backend().memory; memory != nullptr)
      NVFP4_MOE_TRY(memory->synchronize(layer.weights().device));
    NVFP4_MOE_TRY(placed.fetch());
    // Rank 0 receives them in the order of the ranks. With all_reduce it already has them.
    const int world = exchange.world();
    const auto sends = [&](int r) {
      if (combine() == CombineBy::kAllReduce) return r == 0 ? batch.tokens : int64_t{0};
      return first_token(batch.tokens, r + 1, world) - first_token(batch.tokens, r, world);
    };
    const int64_t token_bytes = options_.hidden_size * 2;
    std::vector<int64_t> send(static_cast<size_t>(world)), recv(static_cast<size_t>(world));
    send[0] = sends(exchange.rank()) * token_bytes;
    std::vector<uint16_t> received;
    if (exchange.rank() == 0) {
      for (int r = 0; r < world; ++r) recv[static_cast<size_t>(r)] = sends(r) * token_bytes;
      received.resize(static_cast<size_t>(batch.tokens * options_.hidden_size));
    }
    NVFP4_MOE_TRY(exchange.all_to_all_v(rank.out.data(), send, received.data(), recv));
    if (exchange.rank() == 0) all = std::move(received);
    return {};
  }));
  return all;
}

}  // namespace nvfp4_moe::internal::cli
