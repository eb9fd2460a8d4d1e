// Text as config.json and hf_quant_config.json, split at the first line "---"; and as plain JSON,
// against nlohmann.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "fuzz/require.h"
#include "io/json_strict.h"

using namespace nvfp4_moe::internal;

namespace {

void check_status(const Status& status) {
  REQUIRE(status.code() == Code::kBadInput || status.code() == Code::kUnsupported);
  REQUIRE(!status.message().empty());
  for (const char c : status.message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
}

// Strict JSON is a subset of JSON, with the same values.
void compare_with_nlohmann(std::string_view text) {
  JsonLimits limits;
  limits.max_depth = 16;
  const auto strict = parse_json_strict(text, limits);
  if (!strict.ok()) {
    REQUIRE(strict.status().code() == Code::kBadInput);
    return;
  }
  const auto loose = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  REQUIRE(!loose.is_discarded());
  REQUIRE(loose.dump() == strict->dump());  // both have their members sorted
  REQUIRE(!describe_json(*strict).empty());
}

// With Python's numbers enabled, the same texts are accepted, and more: no other text changes its
// value, and the output is JSON.
void compare_with_python_numbers(std::string_view text) {
  JsonLimits limits;
  limits.max_depth = 16;
  const auto without = parse_json_strict(text, limits);
  limits.non_finite = true;
  const auto with = parse_json_strict(text, limits);
  REQUIRE(with.ok() || !without.ok());
  if (!with.ok()) return;
  REQUIRE(!without.ok() || without->dump() == with->dump());
  REQUIRE(nlohmann::json::accept(with->dump()));
  const auto again = parse_json_strict(with->dump(-1, false, true), limits);
  REQUIRE(again.ok() && again->dump(-1, false, true) == with->dump(-1, false, true));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t cut = text.find("\n---\n");
  const std::string_view config = text.substr(0, cut);
  const std::string_view quant = cut == text.npos ? std::string_view() : text.substr(cut + 5);
  compare_with_nlohmann(config);
  compare_with_python_numbers(config);
  const auto info = parse_model_config(config, quant);
  if (!info.ok()) {
    check_status(info.status());
    return 0;
  }
  // An accepted config can be made into a layer's config, or is refused there with a reason: no
  // wrong value gets through.
  REQUIRE(!info->family.empty() && !info->model_type.empty());
  REQUIRE(info->options.num_experts > 0 && info->options.top_k > 0 &&
          info->options.hidden_size > 0 && info->options.intermediate_size > 0);
  int64_t before = -1;
  for (const int64_t layer : info->layers) {
    REQUIRE(layer > before);
    before = layer;
  }
  // The file's targets and globs are matched against names: in bounded time, with a result or a
  // reason.
  for (const char* module :
       {"model.layers.3.mlp.experts.17.down_proj", "layers.0.ffn.shared_experts.w1"}) {
    const auto scheme = info->quantization->of(module);
    if (!scheme.ok()) check_status(scheme.status());
    if (scheme.ok() && !scheme->refusal.ok()) check_status(scheme->refusal);
    if (const Status rotated = info->quantization->rotation_of(module); !rotated.ok())
      check_status(rotated);
  }
  const auto made = MoeConfig::make(info->options);
  REQUIRE(made.ok() || !made.status().message().empty());
  return 0;
}
