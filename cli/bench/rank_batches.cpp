#include "cli/bench/rank_batches.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "backend/device_exchange.h"
#include "core/random.h"

namespace nvfp4_moe::internal::cli {
namespace {

// Draws experts with weight 1 / r, where r is the position in `by_popularity`.
class Zipf {
 public:
  Zipf(int64_t experts, uint64_t seed) : by_popularity_(static_cast<size_t>(experts)) {
    std::iota(by_popularity_.begin(), by_popularity_.end(), 0);
    Random random(seed);
    for (size_t i = by_popularity_.size(); i-- > 1;)
      std::swap(by_popularity_[i],
                by_popularity_[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
  }

  // Draws top_k experts, distinct as long as there are enough.
  void draw(Random& random, int32_t* ids, int64_t top_k) const {
    std::vector<bool> taken(by_popularity_.size());
    double total = 0;
    for (size_t place = 0; place < taken.size(); ++place) total += weight(place);
    for (int64_t k = 0; k < top_k; ++k) {
      double left = random.uniform() * total;
      size_t chosen = taken.size();
      for (size_t place = 0; place < taken.size(); ++place) {
        if (taken[place]) continue;
        chosen = place;  // the last free one, if rounding leaves a remainder
        if ((left -= weight(place)) < 0) break;
      }
      ids[k] = by_popularity_[chosen];
      if (k + 1 >= static_cast<int64_t>(taken.size()))
        continue;  // all but one are taken: it repeats, which is legal
      taken[chosen] = true;
      total -= weight(chosen);
    }
  }

 private:
  static double weight(size_t place) { return 1.0 / static_cast<double>(place + 1); }
  std::vector<int32_t> by_popularity_;  // (experts)
};

ColdBatches zipf_batches(const MoeOptions& options, int64_t tokens, uint64_t seed, size_t copies) {
  const Zipf zipf(options.num_experts, mix64(seed));
  const ExpertRange all{0, options.num_experts};
  ColdBatches batches;
  while (batches.tokens.size() < kLeastBatches || batches.tokens.size() % copies != 0) {
    const uint64_t of_batch = seed + batches.tokens.size();
    RandomTokens& batch =
        batches.tokens.emplace_back(random_tokens(options, all, tokens, of_batch));
    Random random(mix64(of_batch ^ 0x7A697066u));
    for (int64_t t = 0; t < tokens; ++t)
      zipf.draw(random, batch.ids.data() + t * options.top_k, options.top_k);
    batches.experts.push_back(
        static_cast<double>(std::set<int32_t>(batch.ids.begin(), batch.ids.end()).size()));
  }
  return batches;
}

}  // namespace

ColdBatches rank_batches(const MoeOptions& options, const Placement& placement, RankRouting routing,
                         int64_t tokens, uint64_t seed, size_t copies) {
  switch (routing) {
    case RankRouting::kUniform: break;
    case RankRouting::kZipf: return zipf_batches(options, tokens, seed, copies);
    case RankRouting::kHot:
      return cold_batches(options, {0, placement.slots_of_rank(0)}, tokens, seed, copies);
  }
  return cold_batches(options, {0, options.num_experts}, tokens, seed, copies);
}

std::vector<int32_t> slots_of(const RandomTokens& batch, int64_t top_k, const Placement& placement,
                              CombineBy combine) {
  std::vector<int32_t> slots;
  slots.reserve(batch.ids.size());
  const int sources = combine == CombineBy::kAllReduce ? 1 : placement.world();
  for (int source = 0; source < sources; ++source) {
    const int64_t first = first_token(batch.tokens, source, sources),
                  end = first_token(batch.tokens, source + 1, sources);
    for (int64_t token = first; token < end; ++token)
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t id = batch.ids[static_cast<size_t>(token * top_k + k)];
        slots.push_back(
            static_cast<int32_t>(placement.slot_of(id, turn_of(source, token - first, k))));
      }
  }
  return slots;
}

double busiest_over_even(const ColdBatches& batches, int64_t top_k, const Placement& placement,
                         CombineBy combine) {
  double sum = 0;
  for (const RandomTokens& batch : batches.tokens) {
    std::vector<double> rows(static_cast<size_t>(placement.world()));
    for (const int32_t slot : slots_of(batch, top_k, placement, combine))
      ++rows[static_cast<size_t>(placement.rank_of(slot))];
    const auto all = static_cast<double>(batch.ids.size());
    sum += all > 0 ? *std::max_element(rows.begin(), rows.end()) * placement.world() / all : 1;
  }
  return sum / static_cast<double>(batches.tokens.size());
}

std::vector<int> busiest_ranks(const ColdBatches& batches, int64_t top_k,
                               const Placement& placement, CombineBy combine) {
  // The number of rows at which tensor cores take as long for an expert's rows as memory for its
  // weights: roughly, on an H100 and an H200.
  constexpr int64_t kRowsOfARead = 48;
  std::vector<int> ranks;
  for (const RandomTokens& batch : batches.tokens) {
    std::vector<int64_t> rows(static_cast<size_t>(placement.slots()));
    for (const int32_t slot : slots_of(batch, top_k, placement, combine))
      ++rows[static_cast<size_t>(slot)];
    std::vector<int64_t> work(static_cast<size_t>(placement.world()));
    for (size_t slot = 0; slot < rows.size(); ++slot)
      if (rows[slot] > 0)
        work[static_cast<size_t>(placement.rank_of(static_cast<int64_t>(slot)))] +=
            std::max(rows[slot], kRowsOfARead);
    ranks.push_back(static_cast<int>(std::max_element(work.begin(), work.end()) - work.begin()));
  }
  return ranks;
}

std::vector<uint64_t> load_of(const ColdBatches& batches, int64_t num_experts) {
  std::vector<uint64_t> load(static_cast<size_t>(num_experts));
  for (const RandomTokens& batch : batches.tokens)
    for (const int32_t id : batch.ids) ++load[static_cast<size_t>(id)];
  return load;
}

PeerBytes peer_bytes(const RankCombine& ranks, const RandomTokens& batch) {
  const MoeConfig& config = ranks.config();
  const Placement& placement = ranks.placement();
  const int world = placement.world(), self = ranks.exchange().rank();
  const CombineBy combine = ranks.options().combine;
  if (combine == CombineBy::kAllReduce)
    return {0, bytes_of_peer_sum(batch.tokens * config->hidden_size,
                                 ranks.max_tokens() * config->hidden_size, world, DType::kBf16)};
  const PacketFormat packet(config);
  const int64_t top_k = config->top_k,
                none_bytes = 8 * top_k;  // slots and weights of a token without experts on the rank
  const std::vector<int32_t> slots = slots_of(batch, top_k, placement, combine);
  PeerBytes bytes;
  for (int source = 0; source < world; ++source) {
    const int64_t end = first_token(batch.tokens, source + 1, world);
    for (int64_t token = first_token(batch.tokens, source, world); token < end; ++token) {
      std::vector<int64_t> rows(static_cast<size_t>(world));
      for (int64_t k = 0; k < top_k; ++k)
        if (const int32_t slot = slots[static_cast<size_t>(token * top_k + k)]; slot >= 0)
          ++rows[static_cast<size_t>(placement.rank_of(slot))];
      if (source != self) {
        bytes.combine += rows[static_cast<size_t>(self)] * packet.row_bytes;
        continue;
      }
      for (int expert = 0; expert < world; ++expert)
        if (expert != self)
          bytes.dispatch += rows[static_cast<size_t>(expert)] > 0 ? packet.bytes : none_bytes;
    }
  }
  return bytes;
}

}  // namespace nvfp4_moe::internal::cli
