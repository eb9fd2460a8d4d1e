// The one case table: shapes x routings x data x named choices of the numeric contract, and the
// inputs of each case.
//
// Used by the step and layer tests, the benchmarks and the command line. Everything follows from a
// seed by integer arithmetic and single IEEE operations: the same bytes on every machine and
// compiler.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/batch.h"
#include "core/config.h"
#include "core/nvfp4_view.h"
#include "core/random.h"

namespace nvfp4_moe::internal {

enum class Routing : uint8_t {
  kUniform,       // distinct experts, any of them
  kZipf,          // expert e with weight 1 / (e + 1): low experts crowded
  kOneExpert,     // the first choice is always the same expert, the others are -1
  kEmptyExperts,  // only every third expert is ever named
  kAllNone,       // every id is -1
  kPartlyNone,    // a quarter of the ids is -1; some tokens have no choice at all
  kDuplicates,    // experts may repeat within a token, and some tokens name one expert top_k times
  kBadIds,  // some ids are outside [-1, num_experts); some of these become valid if narrowed to
            // int32
};
enum class DataKind : uint8_t {
  kNormal,
  kOutliers,    // one channel in 32 is 20 times larger
  kTiny,        // 2^-20 times normal: block scales underflow if the line scale is given
  kZeros,       // zero tokens, zero blocks and negative zeros among normal ones
  kSaturating,  // 64 times normal: beyond what a static scale holds
  kNan,         // NaN, Inf and -Inf in some tokens
  kHuge,        // 2^70 times normal: the intermediate overflows; bf16 and fp32 hidden only
};
const char* to_string(Routing);
const char* to_string(DataKind);

struct Case {
  std::string name;  // "w4a4/e8_k2_h64_i48/uniform_t17/normal"
  MoeOptions options;
  ExpertRange range;
  int64_t tokens = 0;
  Routing routing = Routing::kUniform;
  DataKind data = DataKind::kNormal;
  DType hidden_dtype = DType::kBf16;
  DType out_dtype = DType::kBf16;
  DType ids_dtype = DType::kI32;
  bool shared_weights = false;  // give Batch::shared_weights
  uint64_t seed = 1;
};

inline void set_sizes(MoeOptions& options, int64_t experts, int64_t top_k, int64_t hidden,
                      int64_t intermediate) {
  options.num_experts = experts;
  options.top_k = top_k;
  options.hidden_size = hidden;
  options.intermediate_size = intermediate;
}
// Limits that gate and up reach.
inline void set_situ(MoeOptions& options) {
  options.activation = Activation::kSitu;
  options.situ_gate_limit = 1.5f;
  options.situ_up_limit = 2.5f;
}
// A layer of all its experts.
inline Case sized_case(int64_t experts, int64_t top_k, int64_t hidden, int64_t intermediate,
                       int64_t tokens) {
  Case spec;
  set_sizes(spec.options, experts, top_k, hidden, intermediate);
  spec.range = {0, experts};
  spec.tokens = tokens;
  return spec;
}

// Every named choice with several shapes, routings and data; every routing, data kind and
// tile-sized token count with each activation format. A few hundred small cases: hidden 64 to 256,
// intermediate 48 to 128.
const std::vector<Case>& case_table();
// The cases with `part` in their name.
std::vector<Case> cases_named(const std::string& part);

// A case's inputs, owned. Global expert e's weights and biases depend on the seed and e only, not
// on the range.
struct CaseData {
  Case spec;
  MoeConfig config;
  LayerScales scales;
  std::vector<ExpertBuffers>
      experts;  // (range.count), and the shared expert's at the end if there is one
  std::vector<TensorScales>
      tensor_scales;  // the same order; gate and up differ. Without a gate its arrays are empty
  std::vector<uint8_t> hidden;        // (tokens, hidden_size) of hidden_dtype
  std::vector<uint8_t> topk_ids;      // (tokens, top_k) of ids_dtype
  std::vector<float> topk_weights;    // (tokens, top_k)
  std::vector<float> shared_weights;  // (tokens), or empty

  ExpertSource expert(int64_t local_expert) const;  // kSharedExpert: the shared one
  int64_t id(int64_t token, int64_t k) const;
  void set_id(int64_t token, int64_t k, int64_t id);
  Batch batch(void* out) const;  // out: (tokens, hidden_size) of out_dtype
  size_t out_bytes() const;
};
// Returns kInvalidArgument if the options are not legal.
Result<CaseData> make_case(const Case& spec);

}  // namespace nvfp4_moe::internal
