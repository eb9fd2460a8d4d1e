#include "cli/bench/timed_ranks.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <utility>

namespace nvfp4_moe::internal::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Timeout kSlowest{30 * 60 * 1000};  // while a rank packs its layers and makes its batches

Status place(const MoeLayer& layer, const Batch& batch, std::vector<PlacedBatch>& placed) {
  NVFP4_MOE_ASSIGN(PlacedBatch one, PlacedBatch::place(layer, batch));
  placed.push_back(std::move(one));
  return {};
}

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// The round of all ranks from their runs, (world, runs).
RanksRound round_of(const std::vector<RankRun>& all, size_t world) {
  const size_t runs = all.size() / world;
  RanksRound round;
  round.us.resize(runs);
  std::vector<double> busiest_us(runs);
  double total_us = 0;
  for (size_t rank = 0; rank < world; ++rank) {
    std::vector<double> us;
    OfParts& sent = round.sent_bytes.emplace_back();
    for (size_t run = 0; run < runs; ++run) {
      const RankRun& one = all[rank * runs + run];
      us.push_back(one.us);
      round.us[run] = std::max(round.us[run], one.us);
      busiest_us[run] += one.as_busiest_us;
      total_us += one.us;
      for (size_t part = 0; part < kWireParts; ++part) {
        sent[part] += one.sent_bytes[part] / static_cast<double>(runs);
        round.shares[part] += one.part_us[part];
      }
    }
    round.rank_us.push_back(median(std::move(us)));
  }
  for (double& share : round.shares) share /= total_us;
  for (size_t run = 0; run < runs; ++run)
    if (busiest_us[run] > 0) round.us[run] = busiest_us[run];
  std::sort(round.us.begin(), round.us.end());
  return round;
}

}  // namespace

void WireRecorder::add(const Transfer& transfer) {
  WirePart part = WirePart::kAgree;
  if (transfer.what == "all_to_all_v") {
    part = dispatched_ ? WirePart::kCombine : WirePart::kDispatch;
    dispatched_ = true;
  } else if (transfer.what == "dispatch") {
    part = WirePart::kDispatch;
  } else if (transfer.on_device || transfer.what == "all_reduce") {
    part = WirePart::kCombine;
  }
  add(part, transfer.sent_bytes, transfer.us);
}

void WireRecorder::add(WirePart part, int64_t sent_bytes, double us) {
  run_.part_us[static_cast<size_t>(part)] += us;
  run_.sent_bytes[static_cast<size_t>(part)] += static_cast<double>(sent_bytes);
}

RankHosts::RankHosts(const LocalRanks& ranks, const std::function<std::string(int index)>& device,
                     int threads)
    : ranks_(ranks), threads_(threads), hosts_(static_cast<size_t>(ranks.here())) {
  for (int index = 0; index < ranks.here(); ++index) {
    Host& host = hosts_[static_cast<size_t>(index)];
    host.device = device(index);
    host.executor = make_thread_pool(threads);
    ranks.exchange(index)->set_observer(
        [&host](const Transfer& transfer) { host.recorder.add(transfer); });
  }
}

RankHosts::~RankHosts() {
  for (int index = 0; index < ranks_.here(); ++index) ranks_.exchange(index)->set_observer({});
}

Result<TimedRanks> TimedRanks::open(RankHosts& hosts, const Subject& subject,
                                    const std::string& backend, const RanksLayer& divided,
                                    const ProgressFn& progress) {
  TimedRanks timed(hosts, subject, divided);
  const LocalRanks& ranks = hosts.ranks();
  for (int index = 0; index < ranks.here(); ++index)
    timed.ranks_.push_back(std::make_unique<Rank>());
  RanksProgress combined(ranks, progress);
  NVFP4_MOE_TRY(ranks.each([&](int index) {
    return timed.open_rank(index, subject, backend, combined.of_rank(index));
  }));
  return timed;
}

Status TimedRanks::open_rank(int index, const Subject& subject, const std::string& backend,
                             const ProgressFn& progress) {
  Rank& rank = *ranks_[static_cast<size_t>(index)];
  const RankHosts::Host& host = hosts_->hosts_[static_cast<size_t>(index)];
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
  Parallel parallel{exchange, {}};
  parallel.options.combine = combine();
  parallel.options.placement = divided_.placement;
  // A graph's messages have a fixed size: room for all tokens of a rank.
  if (combine() == CombineBy::kAllToAll && host.device != "cpu")
    parallel.options.capacity = options.limits.max_tokens;
  for (int64_t copy = 0; copy < divided_.copies; ++copy) {
    NVFP4_MOE_ASSIGN(auto layer, open_layer(*config, subject.source, options, parallel, progress));
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
    rank.parts.clear();
    rank.own.clear();
    rank.own_slots.clear();
    rank.busiest.clear();
    const auto place_all = [&]() -> Status {
      for (RandomTokens& tokens : batches_->tokens)
        NVFP4_MOE_TRY(place(*rank.copies.front(), part_of(tokens, index), rank.parts));
      return own_experts ? prepare_own(index) : Status();
    };
    return exchange(index).agree(place_all(), kSlowest);
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
    NVFP4_MOE_TRY(place(layer, batch, rank.own));
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
             ? layer.run(rank.parts[batch].batch(), workspace, bytes, stream)
             : layer.run_local(rank.own[batch].batch(), workspace, bytes, stream);
}

Status TimedRanks::time_runs(int index, const Repeat& repeat, RanksWork work,
                             std::vector<RankRun>& runs) const {
  const Rank& rank = *ranks_[static_cast<size_t>(index)];
  WireRecorder& recorder = hosts_->hosts_[static_cast<size_t>(index)].recorder;
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
  WireRecorder& recorder = hosts_->hosts_[static_cast<size_t>(index)].recorder;
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
    const auto world = static_cast<size_t>(exchange(index).world());
    std::vector<RankRun> all(world * runs.size());
    NVFP4_MOE_TRY(exchange(index).all_gather(
        runs.data(), static_cast<int64_t>(runs.size() * sizeof(RankRun)), all.data()));
    if (index == 0) round = round_of(all, world);
    return {};
  }));
  return round;
}

Result<std::vector<uint16_t>> TimedRanks::outputs(RandomTokens& batch) {
  std::vector<uint16_t> all;
  NVFP4_MOE_TRY(hosts_->ranks().each([&](int index) -> Status {
    const Rank& rank = *ranks_[static_cast<size_t>(index)];
    const Batch mine = part_of(batch, index);
    NVFP4_MOE_TRY(run_from_host(*rank.copies.front(), mine).status());
    // Rank 0 receives them in the order of the ranks. With all_reduce it already has them.
    Exchange& exchange = this->exchange(index);
    const int64_t token_bytes = options_.hidden_size * 2;
    const bool sends = combine() == CombineBy::kAllToAll || exchange.rank() == 0;
    const int64_t bytes = sends ? mine.tokens * token_bytes : 0;
    std::vector<int64_t> send(static_cast<size_t>(exchange.world())), recv(send.size());
    NVFP4_MOE_TRY(exchange.all_gather(&bytes, sizeof(bytes), recv.data()));
    send[0] = bytes;
    if (exchange.rank() != 0) std::fill(recv.begin(), recv.end(), 0);
    std::vector<uint16_t> received(static_cast<size_t>(std::reduce(recv.begin(), recv.end())) /
                                   sizeof(uint16_t));
    NVFP4_MOE_TRY(exchange.all_to_all_v(rank.out.data(), send, received.data(), recv));
    if (exchange.rank() == 0) all = std::move(received);
    return {};
  }));
  return all;
}

}  // namespace nvfp4_moe::internal::cli
