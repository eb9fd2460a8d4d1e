// VerifyReport and Calibration as JSON: one object, a schema number, units in the names. An
// infinite number (an SQNR if nothing was lost) is null.

#include "io/json.h"
#include "verify/calibrate.h"
#include "verify/verify.h"

namespace nvfp4_moe::internal {
namespace {

std::string dump(const Json& json, int indent) { return json.dump(indent); }

Json finding(const Finding& f) {
  return {{"severity", to_string(f.severity)},
          {"id", f.id},
          {"layer", f.layer},
          {"expert", f.expert},
          {"tensor", f.tensor},
          {"expected", f.expected},
          {"actual", f.actual},
          {"count", f.count},
          {"examples", f.examples}};
}

Json findings(const std::vector<Finding>& all) {
  Json array = Json::array();
  for (const Finding& f : all) array.push_back(finding(f));
  return array;
}

Json faults(const std::vector<WeightFault>& all) {
  Json array = Json::array();
  for (const WeightFault& f : all) {
    array.push_back({{"layer", f.layer},
                     {"expert", f.expert},
                     {"projection", f.projection},
                     {"tensor", f.tensor},
                     {"what", f.what},
                     {"row", f.row},
                     {"col", f.col},
                     {"expected", f.expected},
                     {"actual", f.actual}});
  }
  return array;
}

Json packed(const PackedCheck& c) {
  return {{"passed", c.passed()},
          {"experts", c.experts},
          {"compared_bytes", c.bytes_compared},
          {"differing_bytes", c.differing_bytes},
          {"faulty_tensors", c.faulty_tensors},
          {"faults", faults(c.faults)}};
}

Json status(const RunStatus& s) {
  return {{"bad_expert_ids", s.bad_expert_ids},
          {"nonfinite_tokens", s.nonfinite_tokens},
          {"nonfinite_rows", s.nonfinite_rows},
          {"hidden_blocks", s.hidden_blocks},
          {"hidden_saturated", s.hidden_saturated},
          {"hidden_zeroed", s.hidden_zeroed},
          {"intermediate_blocks", s.intermediate_blocks},
          {"intermediate_saturated", s.intermediate_saturated},
          {"intermediate_zeroed", s.intermediate_zeroed},
          {"nonfinite_weights", s.nonfinite_weights},
          {"nonfinite_outputs", s.nonfinite_outputs}};
}

Json run(const RunCheck& c) {
  return {{"passed", c.passed()},
          {"backend", c.backend},
          {"backend_is_reference", c.backend_is_reference},
          {"states", c.states},
          {"tokens", c.tokens},
          {"expert_load", c.expert_load.empty() ? Json() : Json(c.expert_load)},
          {"cosine", c.comparison.cosine},
          {"relative_l2", c.comparison.relative_l2},
          {"worst_token", c.comparison.worst_token},
          {"worst_token_l2", c.comparison.worst_token_l2},
          {"max_abs", c.comparison.max_abs},
          {"max_token", c.comparison.max_token},
          {"max_channel", c.comparison.max_channel},
          {"max_expected", c.comparison.max_expected},
          {"max_actual", c.comparison.max_actual},
          {"nonfinite_mismatches", c.comparison.nonfinite_mismatches},
          {"limit_cosine", c.limits.cosine},
          {"limit_relative_l2", c.limits.relative_l2},
          {"limit_worst_token_l2", c.limits.worst_token_l2},
          {"broken", c.broken},
          {"status", status(c.status)},
          {"reference_status", status(c.reference_status)},
          {"backend_s", c.backend_seconds},
          {"reference_s", c.reference_seconds}};
}

Json experts(const std::vector<ExpertError>& all) {
  Json array = Json::array();
  for (const ExpertError& e : all)
    array.push_back({{"expert", e.expert}, {"relative_l2", e.relative_l2}, {"sqnr_db", e.sqnr_db}});
  return array;
}

Json original(const OriginalCheck& c) {
  return {{"passed", c.passed()},
          {"format", c.format},
          {"weights", c.weights},
          {"sqnr_db", c.sqnr_db},
          {"gate_sqnr_db", c.gate_sqnr_db},
          {"up_sqnr_db", c.up_sqnr_db},
          {"down_sqnr_db", c.down_sqnr_db},
          {"cosine", c.cosine},
          {"relative_l2", c.relative_l2},
          {"experts", experts(c.experts)},
          {"max_abs", c.max_abs},
          {"max_expert", c.max_expert},
          {"max_tensor", c.max_tensor},
          {"max_row", c.max_row},
          {"max_col", c.max_col},
          {"saturated_weights", c.saturated},
          {"clipped_blocks", c.clipped_blocks},
          {"zeroed_blocks", c.zeroed_blocks},
          {"near_ties", c.near_ties},
          {"broken_half_steps", c.broken_half_steps},
          {"faulty_tensors", c.faulty_tensors},
          {"below_limit", c.below_limit},
          {"hint", c.hint},
          {"faults", faults(c.faults)}};
}

template <class T, class F>
Json optional(const std::optional<T>& value, F to) {
  return value ? to(*value) : Json();
}

}  // namespace

std::string to_json(const VerifyReport& report, int indent) {
  Json layers = Json::array();
  for (const LayerVerification& l : report.layers) {
    layers.push_back({{"layer", l.layer},
                      {"passed", l.passed()},
                      {"num_experts", l.options.num_experts},
                      {"top_k", l.options.top_k},
                      {"hidden_size", l.options.hidden_size},
                      {"intermediate_size", l.options.intermediate_size},
                      {"activation", to_string(l.options.activation)},
                      {"activation_format", to_string(l.options.activation_format)},
                      {"activations_because", l.activations_because},
                      {"router_weight", to_string(l.options.router_weight)},
                      {"findings", findings(l.findings)},
                      {"fp8_weights", fp8_weights_json(l.fp8)},
                      {"packed", optional(l.packed, packed)},
                      {"run", optional(l.run, run)},
                      {"original", optional(l.original, original)},
                      {"failures", l.failures},
                      {"seconds", l.seconds}});
  }
  const Json json = {{"schema", 1},
                     {"what", "verify"},
                     {"passed", report.passed()},
                     {"path", report.path},
                     {"against", report.against.empty() ? Json() : Json(report.against)},
                     {"format", report.format},
                     {"family", report.family},
                     {"findings", findings(report.findings)},
                     {"failed_layers", report.failed_layers()},
                     {"layers", std::move(layers)},
                     {"seconds", report.seconds}};
  return dump(json, indent);
}

}  // namespace nvfp4_moe::internal
