// A router: computes the experts of each token and their weights from the logits of all experts
// (docs/explanation/numerics.md, section 12).
//
// The step called `route` comes later: it sorts the assignments that are chosen here by expert.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/enum_names.h"
#include "core/host_device.h"
#include "core/status.h"

namespace nvfp4_moe::internal {

enum class Scoring : uint8_t {
  kSoftmax,       // over all experts; with renormalize, over the chosen ones only
  kSigmoid,       // 1 / (1 + e^-x)
  kSqrtSoftplus,  // sqrt(log(1 + e^x))                                               DeepSeek-V4
};
enum class GroupScore : uint8_t {
  kMax,      // the largest selection score of the group                              DeepSeek-V2
  kTop2Sum,  // the sum of the two largest                                            DeepSeek-V3
};

const char* to_string(Scoring);
const char* to_string(GroupScore);

template <>
struct EnumNames<Scoring> {
  static constexpr const char* kWhat = "scoring";
  static constexpr std::array kAll = {"softmax", "sigmoid", "sqrt_softplus"};
};
template <>
struct EnumNames<GroupScore> {
  static constexpr const char* kWhat = "group_score";
  static constexpr std::array kAll = {"max", "top2_sum"};
};

inline constexpr int64_t kMaxRouterExperts = 1024;
inline constexpr int64_t kMaxRouterTopK = 32;
inline constexpr int64_t kMaxExpertGroups = 32;

struct RouterConfig {
  int64_t num_experts = 0;       // E, 1 to kMaxRouterExperts
  int64_t top_k = 0;             // k, 1 to kMaxRouterTopK, at most E
  int64_t num_expert_group = 1;  // divides E, at most kMaxExpertGroups
  // groups that experts are chosen from; together they hold k experts or more
  int64_t topk_group = 1;
  Scoring scoring = Scoring::kSoftmax;
  GroupScore group_score = GroupScore::kMax;
  bool renormalize = false;            // weights are divided by their sum
  float renormalize_epsilon = 0.0f;    // added to that sum; 0 under softmax
  float routed_scaling_factor = 1.0f;  // multiplies every weight, at the end
  // a bias is added to the scores for the selection, and not to the weights
  bool correction_bias = false;
  bool hash_routing = false;  // a table by token id gives experts; scores give only weights
  bool expert_scale = false;  // each expert has a factor of its weights                   Gemma-4
  bool operator==(const RouterConfig&) const = default;

  // kInvalidArgument or kUnsupported names the field, the expected value and the actual one.
  Status check() const;
  // Whether experts are chosen by their scores. If not, they are chosen by their logits, which have
  // the same order.
  NVFP4_MOE_HOST_DEVICE bool selects_by_score() const {
    return correction_bias || (num_expert_group > 1 && group_score == GroupScore::kTop2Sum);
  }
};

// One call. E and k are the config's; T tokens. The arrays are all on the host or all on the
// device.
struct SelectExperts {
  RouterConfig config;
  int64_t tokens = 0;
  const void* logits = nullptr;  // (T, E), rows logits_stride elements apart
  DType logits_dtype = DType::kBf16;
  int64_t logits_stride = 0;
  const float* correction_bias = nullptr;  // (E), with config.correction_bias
  const float* expert_scale = nullptr;     // (E), with config.expert_scale
  // With config.hash_routing: token ids (T), and the experts of each token of the vocabulary
  // (vocab_size, k). Each is I32 or I64.
  const void* token_ids = nullptr;
  DType token_ids_dtype = DType::kI64;
  const void* hash_table = nullptr;
  DType hash_table_dtype = DType::kI64;
  int64_t vocab_size = 0;
  void* topk_ids = nullptr;  // (T, k), best first, I32 or I64
  DType ids_dtype = DType::kI32;
  float* topk_weights = nullptr;  // (T, k)
  // Number of token ids outside the vocabulary and of table entries that name no expert, added to
  // the present value. Null: not counted. Their experts are -1 and their weights 0.
  uint64_t* bad_ids = nullptr;
};

// Selects experts on the host. Precondition: config.check() is ok and the arrays are those that the
// config needs (moe/router.h checks).
void select_experts(const SelectExperts& call);

}  // namespace nvfp4_moe::internal
