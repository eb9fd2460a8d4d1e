// QuantizeResult as JSON: one object, a schema number, units in the names; an infinite SQNR is
// null.

#include "convert/quantize_checkpoint.h"
#include "io/json.h"

namespace nvfp4_moe::internal {
namespace {

Json quality(const QuantizationQuality& q) {
  return {{"sqnr_db", q.sqnr_db()},
          {"relative_error", q.relative_error()},
          {"blocks", q.counts.blocks},
          {"saturated_scales", q.counts.saturated_scales},
          {"zero_scales", q.counts.zero_scales},
          {"saturated_codes", q.counts.saturated_codes}};
}

}  // namespace

std::string to_json(const QuantizeResult& result, int indent) {
  Json layers = Json::array();
  for (const QuantizedLayer& layer : result.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"experts", layer.experts},
                      {"total", quality(layer.total())},
                      {"gate", quality(layer.gate)},
                      {"up", quality(layer.up)},
                      {"down", quality(layer.down)}});
  }
  const Json json = {{"schema", 1},
                     {"what", "quantize"},
                     {"format", to_string(result.format)},
                     {"scale_coding", to_string(result.scale_coding)},
                     {"layers", std::move(layers)},
                     {"mean_sqnr_db", result.mean_sqnr_db()},
                     {"quantized_tensors", result.quantized_tensors},
                     {"copied_tensors", result.copied_tensors},
                     {"shards", result.shards},
                     {"resumed_shards", result.resumed_shards},
                     {"source_bytes", result.source_bytes},
                     {"expert_source_bytes", result.expert_source_bytes},
                     {"written_bytes", result.written_bytes},
                     {"copied_files", result.copied_files},
                     {"notes", result.notes},
                     {"seconds", result.seconds}};
  return json.dump(indent);
}

}  // namespace nvfp4_moe::internal
