// A caller's decisions about a checkpoint whose files leave them open.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/enum_names.h"

namespace nvfp4_moe::internal {

// The order of rows in a tensor that holds gate and up.
enum class GateUpOrder : uint8_t {
  kGateFirst,   // all of gate, then all of up
  kUpFirst,     // all of up, then all of gate
  kInterleaved  // g0 u0 g1 u1 ...
};
inline const char* to_string(GateUpOrder order) { return name_of(order); }
template <>
struct EnumNames<GateUpOrder> {
  static constexpr const char* kWhat = "gate_up_order";
  static constexpr std::array kAll = {"gate_first", "up_first", "interleaved"};
};

struct CheckpointOptions {
  // A known model type whose rules read a config.json with a model_type that is not known, or a
  // family whose model types all have the same rules. Empty: an unknown model_type is an error.
  std::string family = {};
  // For every tensor that holds gate and up of routed or shared experts. Without it the order comes
  // from the family and the tensor's name, and a layer is refused if they do not determine it.
  std::optional<GateUpOrder> gate_up_order = {};
  // Names of tensors that are allowed in an experts' module although no format has them. '*'
  // matches any characters. They are ignored, so their effect on the experts is not computed.
  std::vector<std::string> accept_tensors = {};
};

}  // namespace nvfp4_moe::internal
