// Writes a checkpoint as shards: model-00001-of-000NN.safetensors in order, then
// model.safetensors.index.json.
//
// The list of tensors and the shard size determine the plan (which tensor goes to which shard, at
// which offset) before a byte is computed. So an interrupted run is resumed by creating the same
// writer again. A shard under its final name with the planned header and size is complete, since
// shards are renamed into place only when complete. needs() returns which tensors still have to be
// computed.
//
// Put everything else that the bytes depend on (options, source) into `metadata`: it is part of the
// header, so a shard made with other options is not taken for complete. A caller that keeps records
// of the shards (ShardRecords) also gets the kept ones read and compared. The index is written last
// and removed first: a directory with an index is complete.
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

// Record of a complete shard, made by the run that wrote it.
struct ShardRecord {
  std::string name;  // "model-00001-of-00004.safetensors"
  ContentHash hash;  // of the whole file
  bool operator==(const ShardRecord&) const = default;
};

// With records, a shard of an earlier run is kept only if it still has the recorded bytes. create()
// reads it completely, which costs the reading but no arithmetic. Without records, its header and
// size decide.
struct ShardRecords {
  std::map<std::string, ShardRecord, std::less<>> finished;  // by name; of earlier runs
  // Called when a shard is on disk, before it gets its name.
  std::function<Status(const ShardRecord&)> record;
  // Called before a shard of an earlier run is read. False cancels.
  std::function<bool(const std::string& name)> checking;
};

class ShardedWriter {
 public:
  // The directory must exist. A tensor larger than max_shard_bytes has a shard of its own. Shards
  // of another plan in the directory stay, and the index does not name them.
  static Result<ShardedWriter> create(const std::string& directory, std::vector<TensorInfo> tensors,
                                      uint64_t max_shard_bytes,
                                      const std::map<std::string, std::string>& metadata,
                                      std::optional<ShardRecords> records = {});

  // False if the tensor's shard is already complete, or there is no such tensor.
  bool needs(std::string_view tensor) const;
  // Writes the next bytes of a tensor. Tensors are written completely, in the order of the list, in
  // any number of calls. Those that are not needed may be left out, and are ignored if given. Empty
  // tensors need no call.
  Status write(std::string_view tensor, std::span<const std::byte> bytes);
  // Checks that every needed byte was written, finishes the last shard and writes the index.
  Status finish();

  size_t shards() const;
  size_t complete_shards() const;  // found by create()
  // Shards in the directory that differ from their records. They are written again.
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
