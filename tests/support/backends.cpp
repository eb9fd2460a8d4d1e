#include "support/backends.h"

#include <algorithm>

#include "moe/layer.h"
#include "moe/registry.h"

namespace nvfp4_moe::test {

std::string why_not_here(const Backend& backend) {
  MoeOptions plain;
  plain.num_experts = 2;
  plain.top_k = 1;
  plain.hidden_size = 64;
  plain.intermediate_size = 64;
  const auto device = device_facts(backend.memory == nullptr ? "cpu" : "cuda:0");
  return device.ok() ? backend.supports(*MoeConfig::make(plain), *device).message() : device.status().message();
}

bool declines(const Backend& backend, const MoeConfig& config) {
  const auto device = device_facts(backend.memory == nullptr ? "cpu" : "cuda:0");
  return !device.ok() || !backend.supports(config, *device).ok();
}

std::vector<const Backend*> runnable_backends() {
  std::vector<const Backend*> list(backends().begin(), backends().end());
  std::erase_if(list,
                [](const Backend* backend) { return backend->memory != nullptr || !why_not_here(*backend).empty(); });
  return list;
}

std::string backend_test_name(const ::testing::TestParamInfo<const Backend*>& info) {
  std::string name = info.param->name;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

}  // namespace nvfp4_moe::test
