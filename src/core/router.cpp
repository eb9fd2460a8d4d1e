// The checks of a router's config, and the selection on the host. The host adds lane by lane, as a
// warp of a GPU does, if the order of additions affects the result.
#include "core/router.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>

#include "core/router_score.h"

namespace nvfp4_moe::internal {
namespace {

using router::key_of;
using router::value_of;

constexpr int kLanes = 32;

Status check_router_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(std::string(name) + ": expected " + std::to_string(low) + ".." +
                          std::to_string(high) + ", got " + std::to_string(value));
}

Status check_router_factor(const char* name, float value, bool zero_is_legal) {
  if (std::isfinite(value) && (value > 0.0f || (zero_is_legal && value == 0.0f))) return {};
  char got[32];
  std::snprintf(got, sizeof got, "%.9g", static_cast<double>(value));
  return invalid_argument(std::string(name) + ": expected finite and " +
                          (zero_is_legal ? ">= 0" : "> 0") + ", got " + got);
}

Status check_groups(const RouterConfig& c) {
  NVFP4_MOE_TRY(check_router_range("num_expert_group", c.num_expert_group, 1, kMaxExpertGroups));
  if (c.num_experts % c.num_expert_group != 0)
    return invalid_argument("num_expert_group: expected a divisor of the " +
                            std::to_string(c.num_experts) + " experts, got " +
                            std::to_string(c.num_expert_group));
  NVFP4_MOE_TRY(check_router_range("topk_group", c.topk_group, 1, c.num_expert_group));
  const int64_t group = c.num_experts / c.num_expert_group;
  if (c.topk_group * group < c.top_k)
    return invalid_argument("topk_group: expected groups that hold top_k " +
                            std::to_string(c.top_k) + " experts together, got " +
                            std::to_string(c.topk_group) + " of " + std::to_string(group));
  if (c.group_score == GroupScore::kTop2Sum && c.num_expert_group > 1 && group < 2)
    return invalid_argument(
        "group_score: expected groups of two experts or more with top2_sum, got groups of one");
  return {};
}

struct TokenSelection {
  std::array<int64_t, kMaxRouterTopK> ids;
  bool nonfinite = false;    // a selection score is NaN
  double denominator = 0.0;  // of softmax over all experts
  float largest = 0.0f;      // the largest logit
};

struct Token {
  const RouterConfig& config;
  const std::byte* logits;
  DType dtype;

  float logit(int64_t expert) const {
    float x;
    to_floats(logits + expert * (bits(dtype) / 8), dtype, 1, &x);
    return x;
  }
};

using Keys = std::array<uint32_t, kMaxRouterExperts>;

// The position of the largest of count keys; the first among equal ones.
int64_t best_of(const uint32_t* keys, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i)
    if (keys[i] > keys[best]) best = i;
  return best;
}

// The sum of e^(x - largest): each lane's experts in their order, then lanes 16, 8, 4, 2 and 1
// apart.
double softmax_denominator(const RouterConfig& config, const Keys& logit_keys, float largest) {
  const int64_t v = router::experts_a_lane(config.num_experts);
  std::array<double, kLanes> sums{};
  for (int64_t e = 0; e < config.num_experts; ++e)
    sums[static_cast<size_t>(e / v)] += static_cast<double>(
        router::score_of(config.scoring, value_of(logit_keys[static_cast<size_t>(e)]), largest));
  for (size_t apart = kLanes / 2; apart > 0; apart /= 2)
    for (size_t lane = 0; lane < apart; ++lane) sums[lane] += sums[lane + apart];
  return sums[0];
}

uint32_t group_key(GroupScore how, const uint32_t* keys, int64_t count) {
  const int64_t first = best_of(keys, count);
  if (how == GroupScore::kMax) return keys[first];
  uint32_t second = router::kRemovedKey;
  for (int64_t i = 0; i < count; ++i)
    if (i != first && keys[i] > second) second = keys[i];
  return key_of(value_of(keys[first]) + value_of(second));
}

// Removes the experts of all groups except the best.
void keep_groups(const RouterConfig& config, Keys& keys) {
  const int64_t size = config.num_experts / config.num_expert_group;
  std::array<uint32_t, kMaxExpertGroups> groups{};
  for (int64_t g = 0; g < config.num_expert_group; ++g)
    groups[static_cast<size_t>(g)] = group_key(config.group_score, keys.data() + g * size, size);
  std::array<bool, kMaxExpertGroups> kept{};
  for (int64_t i = 0; i < config.topk_group; ++i) {
    const auto best = static_cast<size_t>(best_of(groups.data(), config.num_expert_group));
    kept[best] = true;
    groups[best] = router::kRemovedKey;
  }
  for (int64_t e = 0; e < config.num_experts; ++e)
    if (!kept[static_cast<size_t>(e / size)]) keys[static_cast<size_t>(e)] = router::kRemovedKey;
}

// Turns logit keys into those of the selection scores.
void score_keys(const RouterConfig& config, const float* bias, Keys& keys,
                TokenSelection& selection) {
  const double inverse = 1.0 / selection.denominator;  // read by softmax only
  for (int64_t e = 0; e < config.num_experts; ++e) {
    uint32_t& key = keys[static_cast<size_t>(e)];
    float score = router::score_of(config.scoring, value_of(key), selection.largest);
    if (config.scoring == Scoring::kSoftmax)
      score = static_cast<float>(static_cast<double>(score) * inverse);
    if (bias != nullptr) score = score + bias[e];
    key = key_of(score);
    selection.nonfinite = selection.nonfinite || key == router::kNanKey;
  }
}

void select(const Token& token, const float* bias, TokenSelection& selection) {
  const RouterConfig& config = token.config;
  Keys keys{};
  for (int64_t e = 0; e < config.num_experts; ++e) {
    uint32_t& key = keys[static_cast<size_t>(e)];
    key = key_of(token.logit(e));
    selection.nonfinite = selection.nonfinite || key == router::kNanKey;
  }
  const bool by_score = config.selects_by_score();
  if (config.scoring == Scoring::kSoftmax && (by_score || !config.renormalize)) {
    selection.largest =
        value_of(keys[static_cast<size_t>(best_of(keys.data(), config.num_experts))]);
    selection.denominator = softmax_denominator(config, keys, selection.largest);
  }
  if (by_score) score_keys(config, bias, keys, selection);
  if (config.topk_group < config.num_expert_group) keep_groups(config, keys);
  for (int64_t k = 0; k < config.top_k; ++k) {
    const int64_t best = best_of(keys.data(), config.num_experts);
    selection.ids[static_cast<size_t>(k)] = best;
    keys[static_cast<size_t>(best)] = router::kRemovedKey;
  }
}

int64_t index_at(const void* indices, DType dtype, int64_t i) {
  return dtype == DType::kI64 ? static_cast<const int64_t*>(indices)[i]
                              : static_cast<const int32_t*>(indices)[i];
}

// Reads ids from the table; returns the number of bad ones.
uint64_t look_up(const SelectExperts& call, int64_t t, TokenSelection& selection) {
  const int64_t k = call.config.top_k;
  const int64_t token = index_at(call.token_ids, call.token_ids_dtype, t);
  selection.ids.fill(-1);
  if (token < 0 || token >= call.vocab_size) return 1;
  uint64_t bad = 0;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t expert = index_at(call.hash_table, call.hash_table_dtype, token * k + i);
    if (expert < 0 || expert >= call.config.num_experts)
      ++bad;
    else
      selection.ids[static_cast<size_t>(i)] = expert;
  }
  return bad;
}

void write_weights(const Token& token, const TokenSelection& selection, const float* expert_scale,
                   float* weights) {
  const RouterConfig& config = token.config;
  const bool softmax = config.scoring == Scoring::kSoftmax;
  std::array<float, kMaxRouterTopK> values{};  // logits, then scores
  uint32_t largest_key = router::kRemovedKey;
  for (int64_t k = 0; k < config.top_k; ++k) {
    const int64_t expert = selection.ids[static_cast<size_t>(k)];
    if (expert < 0) continue;
    values[static_cast<size_t>(k)] = token.logit(expert);
    largest_key = std::max(largest_key, key_of(values[static_cast<size_t>(k)]));
  }
  const float largest = config.renormalize ? value_of(largest_key) : selection.largest;
  double divisor = 0.0;
  for (int64_t k = 0; k < config.top_k; ++k) {
    if (selection.ids[static_cast<size_t>(k)] < 0) continue;
    float& value = values[static_cast<size_t>(k)];
    value = router::score_of(config.scoring, value, largest);
    divisor += static_cast<double>(value);
  }
  if (config.renormalize)
    divisor += static_cast<double>(config.renormalize_epsilon);
  else
    divisor = selection.denominator;
  const bool divide = config.renormalize || softmax;
  for (int64_t k = 0; k < config.top_k; ++k) {
    const int64_t expert = selection.ids[static_cast<size_t>(k)];
    weights[k] = 0.0f;
    if (expert < 0) continue;
    double factor = static_cast<double>(config.routed_scaling_factor);
    if (expert_scale != nullptr) factor *= static_cast<double>(expert_scale[expert]);
    weights[k] = router::weight_of(values[static_cast<size_t>(k)], divide, divisor, factor,
                                   selection.nonfinite);
  }
}

}  // namespace

const char* to_string(Scoring value) { return name_of(value); }
const char* to_string(GroupScore value) { return name_of(value); }

Status RouterConfig::check() const {
  NVFP4_MOE_TRY(check_router_range("num_experts", num_experts, 1, kMaxRouterExperts));
  NVFP4_MOE_TRY(check_router_range("top_k", top_k, 1, kMaxRouterTopK));
  if (top_k > num_experts)
    return invalid_argument("top_k: expected at most the " + std::to_string(num_experts) +
                            " experts, got " + std::to_string(top_k));
  NVFP4_MOE_TRY(check_named(scoring));
  NVFP4_MOE_TRY(check_named(group_score));
  NVFP4_MOE_TRY(check_groups(*this));
  NVFP4_MOE_TRY(check_router_factor("renormalize_epsilon", renormalize_epsilon, true));
  if (renormalize_epsilon != 0.0f && !renormalize)
    return invalid_argument(
        "renormalize_epsilon: expected 0 without renormalize, since nothing is added up");
  // Only the chosen numerators e^(x - largest) are added, and their sum is at least 1. It is not
  // the softmax over all experts.
  if (renormalize_epsilon != 0.0f && scoring == Scoring::kSoftmax)
    return invalid_argument(
        "renormalize_epsilon: expected 0 with scoring softmax, whose chosen weights add up to 1");
  NVFP4_MOE_TRY(check_router_factor("routed_scaling_factor", routed_scaling_factor, false));
  if (!hash_routing) return {};
  if (scoring == Scoring::kSoftmax)
    return unsupported("scoring: expected sigmoid or sqrt_softplus with hash_routing, got softmax");
  if (correction_bias)
    return invalid_argument(
        "correction_bias: expected none with hash_routing, where nothing is chosen");
  if (num_expert_group != 1)
    return invalid_argument(
        "num_expert_group: expected 1 with hash_routing, where nothing is chosen, got " +
        std::to_string(num_expert_group));
  return {};
}

void select_experts(const SelectExperts& call) {
  const int64_t k = call.config.top_k;
  for (int64_t t = 0; t < call.tokens; ++t) {
    const auto* const row = static_cast<const std::byte*>(call.logits) +
                            t * call.logits_stride * (bits(call.logits_dtype) / 8);
    const Token token{call.config, row, call.logits_dtype};
    TokenSelection selection;
    if (call.config.hash_routing) {
      const uint64_t bad = look_up(call, t, selection);
      if (call.bad_ids != nullptr) *call.bad_ids += bad;
    } else {
      select(token, call.correction_bias, selection);
    }
    write_weights(token, selection, call.expert_scale, call.topk_weights + t * k);
    for (int64_t i = 0; i < k; ++i) {
      const int64_t id = selection.ids[static_cast<size_t>(i)];
      if (call.ids_dtype == DType::kI64)
        static_cast<int64_t*>(call.topk_ids)[t * k + i] = id;
      else
        static_cast<int32_t*>(call.topk_ids)[t * k + i] = static_cast<int32_t>(id);
    }
  }
}

}  // namespace nvfp4_moe::internal
