// A checkpoint written as shards: model-00001-of-000NN.safetensors in order, then
// model.safetensors.index.json.
//
// The plan (which tensor goes to which shard, at which offset) follows from the list of tensors and
// the shard size alone, before a byte is computed. So a run that was interrupted is resumed by
// creating the same writer again: a shard that is there under its final name, with the planned
// header and size, is complete (shards are renamed into place only when whole), and needs() says
// which tensors still have to be computed. What else the bytes depend on (options, source) belongs
// into `metadata`: it is part of the header, so a shard made otherwise is not taken for complete.
// Whoever keeps records of the shards (ShardRecords) has the kept ones read and compared too.
// The index is written last and removed first: a directory that has one is whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "io/content_hash.h"
#include "safetensors/safetensors.h"

namespace nvfp4_moe::internal {

// A complete shard, as the run that wrote it remembers it.
struct ShardRecord {
  std::string name;  // "model-00001-of-00004.safetensors"
  ContentHash hash;  // of the whole file
  bool operator==(const ShardRecord&) const = default;
};

// With records a shard of an earlier run is kept only if it still has the recorded bytes: create()
// reads it whole, which costs what reading costs, and no arithmetic. Without them its header and
// size decide.
struct ShardRecords {
  std::map<std::string, ShardRecord, std::less<>> finished;  // by name; of earlier runs
  // A shard is on disk, and about to get its name.
  std::function<Status(const ShardRecord&)> record;
  // A shard of an earlier run is about to be read. False cancels.
  std::function<bool(const std::string& name)> checking;
};

class ShardedWriter {
 public:
  // The directory must exist. A tensor larger than max_shard_bytes has a shard of its own. Shards
  // of another plan that lie in the directory stay; the index does not name them.
  static Result<ShardedWriter> create(const std::string& directory, std::vector<TensorInfo> tensors,
                                      uint64_t max_shard_bytes,
                                      const std::map<std::string, std::string>& metadata,
                                      std::optional<ShardRecords> records = {});

  // False if the tensor's shard is complete already (or there is no such tensor).
  bool needs(std::string_view tensor) const;
  // The next bytes of a tensor. Tensors come in the order of the list, whole, in as many calls as
  // the caller likes; those that are not needed may be left out, and are ignored if they are given.
  // Empty tensors need no call.
  Status write(std::string_view tensor, std::span<const std::byte> bytes);
  // Checks that every needed byte came, finishes the last shard and writes the index.
  Status finish();

  size_t shards() const;
  size_t complete_shards() const;  // that create() found
  // Shards that lie in the directory and are not what was recorded: they are written again.
  const std::vector<std::string>& altered_shards() const;
  uint64_t data_bytes() const;  // of all tensors: the index's total_size

  ShardedWriter(ShardedWriter&&) noexcept;
  ShardedWriter& operator=(ShardedWriter&&) noexcept;
  ~ShardedWriter();  // an unfinished shard is removed, complete ones stay

 private:
  ShardedWriter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nvfp4_moe::internal
