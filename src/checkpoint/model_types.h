// Table of the supported model types, one row each: how a type's config spells its MoE layers. Also
// the types that are declined by name, with the reason.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/config.h"

namespace nvfp4_moe::internal {

// kSiluAlone: a constant of the model's code that no field names. kStep: with a limit for each
// layer, or without limits. kGelu: gelu or its approximation by tanh, by the field. kKimi:
// silu, or situ with both limits. kSoftCapped: situ, whose two limits are the model's softcaps.
enum class ActRule : uint8_t {
  kSilu,
  kSiluAlone,
  kClamped,
  kOai,
  kGptOss,
  kStep,
  kRelu2,
  kGelu,
  kKimi,
  kSoftCapped
};
enum class LayerRule : uint8_t {
  kAll,
  kFirstDense,
  kDenseLayers,
  kListed,
  kSparseStep,
  kInterval,
  kPeriod,
  kLlama4,
  kStep,
  kBlockTypes
};
// kMaybeCount: the field may be absent. kMlp: as large as the experts. kOwnCount: kCount,
// possibly with a size of its own.
enum class SharedRule : uint8_t {
  kNone,
  kCount,
  kMaybeCount,
  kOwnSize,
  kMinimax,
  kLlama4,
  kGranite,
  kMlp,
  kOwnCount,
  kNemotron
};

struct ModelRow {
  std::string_view model_type;
  std::string_view family;
  const char* intermediate;  // field of the experts' intermediate size
  ActRule activation;
  LayerRule layers;
  SharedRule shared;
  RouterWeight router_weight;
  bool biases = false;  // experts have biases
  const char* layer_count = "num_hidden_layers";
};

std::span<const ModelRow> model_rows();  // all known types
// Null if the type is not known.
const ModelRow* model_row(std::string_view model_type);
// Why a type is declined; empty if it is not.
std::string_view reason_to_decline(std::string_view model_type);

}  // namespace nvfp4_moe::internal
