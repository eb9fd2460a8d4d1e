#include "checkpoint/row_order.h"

#include <fmt/format.h>

namespace nvfp4_moe::internal {
namespace {

// Empty if family and name do not determine the order: engines keep the rows of gpt-oss' activation
// in either order under the name w13, and an unknown model type may have any.
std::optional<GateUpOrder> known_order(const ModelInfo& model, const ExpertNames& names) {
  if (names.gguf)
    return GateUpOrder::kGateFirst;  // as llama.cpp's converter writes ffn_gate_up_exps
  if (!model.read_as.empty()) return std::nullopt;
  const bool w13 = names.words == Words::kW;
  if (w13 && model.options.activation == Activation::kSwigluOai) return std::nullopt;
  const FamilyNames& family = *family_names(model.family);
  const bool interleaved =
      w13 ? family.w13_interleaved : family.interleaved && names.role == TensorRole::kStacked;
  return interleaved ? GateUpOrder::kInterleaved : GateUpOrder::kGateFirst;
}

}  // namespace

Status set_row_order(const CheckpointOptions& options, const ModelInfo& model, int64_t layer,
                     const std::string& tensor, ExpertNames& names, FindingList& findings) {
  if (!names.gate_up_fused) return {};
  const std::optional<GateUpOrder> known = known_order(model, names);
  const std::optional<GateUpOrder>& given = options.gate_up_order;
  names.order = given.value_or(known.value_or(GateUpOrder::kGateFirst));
  if (given && known != given) {
    findings.add(
        {known ? Severity::kWarning : Severity::kNote, "gate_up_order", layer, -1, tensor,
         known ? fmt::format("rows {}, as {} has them", to_string(*known), model.family) : "",
         fmt::format("{}, as gate_up_order says", to_string(*given))});
  }
  if (given || known) return {};
  Finding finding{Severity::kError,
                  "gate_up_order_unknown",
                  layer,
                  -1,
                  tensor,
                  fmt::format("gate and up in an order that {} and the name give", model.family),
                  fmt::format("{}: set gate_up_order (--gate-up-order) to {}",
                              model.read_as.empty() ? "a name under which engines keep either order"
                                                    : "a model type that is not known",
                              legal_names<GateUpOrder>())};
  Status refused = unsupported(describe_place(finding)).of_finding(finding.id);
  findings.add(std::move(finding));
  return refused;
}

}  // namespace nvfp4_moe::internal
