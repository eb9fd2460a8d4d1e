// A case's experts as a LayerSource.
#pragma once

#include "cases/cases.h"
#include "moe/layer.h"

namespace nvfp4_moe::internal::test {

// data must outlive it.
inline LayerSource source_of(const CaseData& data) {
  LayerSource source;
  source.scales = data.scales;
  const auto give = [&data](int64_t local) -> Result<LoadedExpert> {
    LoadedExpert loaded;
    loaded.source = data.expert(local);
    return loaded;
  };
  source.expert = [give, first = data.spec.range.first](int64_t global) {
    return give(global - first);
  };
  if (data.spec.options.shared_intermediate_size > 0)
    source.shared_expert = [give] { return give(kSharedExpert); };
  return source;
}

}  // namespace nvfp4_moe::internal::test
