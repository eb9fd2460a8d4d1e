#include "support/exact_case.h"

namespace nvfp4_moe::internal::test {

CaseData exact_case(const ExactSizes& sizes, ActivationFormat format, int64_t tokens,
                    bool batch_invariant, Activation activation,
                    const std::function<void(MoeOptions&)>& choices) {
  Case spec;
  spec.options = exact_options(sizes, format, activation, batch_invariant);
  if (choices) choices(spec.options);
  spec.range = {0, sizes.experts};
  spec.tokens = tokens;
  spec.out_dtype = DType::kF32;
  CaseData data = *make_case(spec);
  const auto seed = static_cast<uint64_t>(tokens);
  data.experts = exact_experts(data.config, seed);
  for (size_t e = 0; e < data.experts.size(); ++e) data.tensor_scales[e] = data.experts[e].scales;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < sizes.top_k; ++k) {
      ids.push_back(static_cast<int32_t>((t + k * (1 + t % 3)) % sizes.experts));
      data.set_id(t, k, ids.back());
    }
  const ExactBatch batch = exact_batch(data.config, ids, seed);
  const auto* const hidden = reinterpret_cast<const uint8_t*>(batch.hidden.data());
  data.hidden.assign(hidden, hidden + batch.hidden.size() * sizeof(uint16_t));
  data.topk_weights = batch.topk_weights;
  return data;
}

}  // namespace nvfp4_moe::internal::test
