// The plan file of an unfinished quantize, quantize.plan.json in OUT: the inputs that determine its
// bytes, and the finished parts.
//
// Two runs may share shards iff the first part of their plans is equal. The second part grows by
// one record per shard, written before the shard gets its name: a shard without a record was not
// made by this plan. The file is replaced as a whole each time (output_file.h). It is untrusted,
// and errors in it are kBadInput.
//
// A source file is recognized by size, time of modification and a hash. The hash covers its header
// and a sample of its payload: all of it up to 16 MiB; beyond that, 4096 bytes from the middle of
// each 64 MiB of every tensor. That is a page per tensor (some 50 000 for a model of 600 GB), and
// detects every tensor that was trained, requantized or replaced. It does not detect single values
// that change between the samples of a large file whose size and time stay the same.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "convert/expert_quantizer.h"
#include "convert/output_plan.h"
#include "convert/quantize_checkpoint.h"
#include "core/status.h"
#include "io/content_hash.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {

struct SourceFile {
  std::string name;
  uint64_t size_bytes = 0;
  int64_t modified_ns = 0;
  ContentHash sample;
  bool operator==(const SourceFile&) const = default;
};
Result<SourceFile> describe_source(const TensorFile& file);

struct QuantizePlan {
  // Everything that determines the bytes of OUT.
  std::string version;  // version of the library
  std::string source;
  std::vector<SourceFile> files;
  ContentHash config;  // hash of IN's config.json
  std::string format;
  std::set<int64_t> layers;
  std::string family, gate_up_order;  // as given; empty if not given
  std::string search;
  std::string calibration;  // hash of the moments that weight errors; empty without moments
  bool share_gate_up_scale = true;
  std::map<int64_t, std::array<float, 2>> input_scales;  // hidden, intermediate; 0 if not given
  uint64_t max_shard_bytes = 0;
  // Finished parts.
  std::map<std::string, ShardRecord, std::less<>> shards;
  std::map<ExpertId, ExpertQuality> experts;  // at least those of the finished shards
};

Result<QuantizePlan> make_quantize_plan(const std::string& in, const Checkpoint& checkpoint,
                                        const std::string& source_config,
                                        const std::set<int64_t>& layers,
                                        const QuantizeOptions& options,
                                        const std::string& calibration);
// Checks that the source's files have the sizes and times of the plan, so that they were not
// written to meanwhile.
Status check_source_unchanged(const QuantizePlan& plan, const TensorIndex& index);

std::string to_json(const QuantizePlan& plan);
Result<QuantizePlan> parse_quantize_plan(std::string_view text);
// kInvalidArgument with the first part that differs: "another search (expected ..., found ...)".
Status check_same_work(const QuantizePlan& wanted, const QuantizePlan& found);

}  // namespace nvfp4_moe::internal
