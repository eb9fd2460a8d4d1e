// Plans shards greedily in the order of the tensors, then streams through one SafetensorsWriter at
// a time.
#include "safetensors/sharded_writer.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "safetensors/plan.h"

namespace nvfp4_moe::internal {
namespace {

namespace fs = std::filesystem;

struct Shard {
  std::string name;
  std::vector<TensorInfo> tensors;  // offsets within the shard
  bool found_complete = false;      // by create()
  uint64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
};

std::vector<Shard> plan_shards(std::vector<TensorInfo> tensors, uint64_t max_shard_bytes) {
  std::vector<Shard> shards(1);
  uint64_t filled = 0;
  for (TensorInfo& info : tensors) {
    const uint64_t bytes = info.size_bytes();
    if (!shards.back().tensors.empty() &&
        (filled > max_shard_bytes || bytes > max_shard_bytes - filled)) {
      shards.emplace_back();
      filled = 0;
    }
    info.begin = filled;
    info.end = filled += bytes;
    shards.back().tensors.push_back(std::move(info));
  }
  for (size_t i = 0; i < shards.size(); ++i)
    shards[i].name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  return shards;
}

// Whether the file begins with exactly `header` and has exactly the planned size.
bool is_complete(const std::string& path, const std::string& header, uint64_t data_bytes) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) ||
      fs::file_size(path, error) != header.size() + data_bytes || error)
    return false;
  std::ifstream file(path, std::ios::binary);
  std::string found(header.size(), '\0');
  return file.read(found.data(), static_cast<std::streamsize>(found.size())) && found == header;
}

}  // namespace

struct ShardedWriter::Impl {
  fs::path directory;
  std::map<std::string, std::string> metadata;
  std::vector<Shard> shards;
  std::map<std::string, size_t, std::less<>> shard_of;  // tensor -> shard
  // Position of the next byte. Complete shards and empty tensors are skipped.
  size_t shard = 0;
  size_t tensor = 0;
  uint64_t received = 0;  // bytes of that tensor
  std::optional<SafetensorsWriter> writer;
  size_t found_complete = 0;
  std::optional<ShardRecords> records;
  std::vector<std::string> altered;
  uint64_t total_bytes = 0;

  std::string path(const std::string& name) const { return (directory / name).string(); }
  std::string index_path() const { return path("model.safetensors.index.json"); }

  Status finish_shard(const std::string& name) {
    if (!records || !records->record) return writer->finish();
    return writer->finish([&](const ContentHash& hash) { return records->record({name, hash}); });
  }

  // Whether the shard of an earlier run is complete and matches its record.
  Result<bool> is_kept(const Shard& current, const std::string& header) {
    const std::string file = path(current.name);
    const bool planned = is_complete(file, header, current.data_bytes());
    if (!records) return planned;
    std::error_code error;
    if (!fs::is_regular_file(fs::symlink_status(file, error)))
      return false;  // missing; or not a regular file, which the writer refuses
    const auto record = records->finished.find(current.name);
    if (planned && record != records->finished.end()) {
      if (records->checking && !records->checking(current.name))
        return Status(Code::kCancelled, "cancelled before reading " + current.name);
      NVFP4_MOE_ASSIGN(const ContentHash hash, hash_file(file));
      if (hash == record->second.hash) return true;
    }
    altered.push_back(current.name);
    return false;
  }

  // Moves to the next tensor that needs bytes, opening and finishing shards on the way.
  Status advance() {
    while (shard < shards.size()) {
      Shard& current = shards[shard];
      if (current.found_complete) {
        ++shard;
        continue;
      }
      if (!writer) {
        NVFP4_MOE_ASSIGN(SafetensorsWriter opened,
                         SafetensorsWriter::create(path(current.name), current.tensors, metadata));
        writer = std::move(opened);
      }
      while (tensor < current.tensors.size() && received == current.tensors[tensor].size_bytes()) {
        ++tensor;
        received = 0;
      }
      if (tensor < current.tensors.size()) return {};
      NVFP4_MOE_TRY(finish_shard(current.name));
      writer.reset();
      ++shard;
      tensor = 0;
    }
    return {};
  }
};

Result<ShardedWriter> ShardedWriter::create(const std::string& directory,
                                            std::vector<TensorInfo> tensors,
                                            uint64_t max_shard_bytes,
                                            const std::map<std::string, std::string>& metadata,
                                            std::optional<ShardRecords> records) {
  const std::string shown = printable(directory, 4096);
  if (max_shard_bytes == 0)
    return invalid_argument(fmt::format("{}: expected a shard size above 0, got 0", shown));
  const Status assigned = assign_offsets(tensors);  // sizes, and that no name occurs twice
  if (!assigned.ok()) return assigned.in(shown);

  ShardedWriter writer;
  Impl& impl = *writer.impl_;
  impl.directory = directory;
  impl.metadata = metadata;
  impl.records = std::move(records);
  impl.total_bytes = tensors.empty() ? 0 : tensors.back().end;
  impl.shards = plan_shards(std::move(tensors), max_shard_bytes);
  for (size_t i = 0; i < impl.shards.size(); ++i) {
    Shard& shard = impl.shards[i];
    for (const TensorInfo& info : shard.tensors) impl.shard_of.emplace(info.name, i);
    const Result<std::string> header = header_bytes(shard.tensors, metadata);
    if (!header.ok()) return header.status().in(impl.path(shard.name));
    NVFP4_MOE_ASSIGN(shard.found_complete, impl.is_kept(shard, *header));
    if (shard.found_complete) ++impl.found_complete;
  }
  if (impl.found_complete < impl.shards.size()) NVFP4_MOE_TRY(remove_file(impl.index_path()));
  return writer;
}

bool ShardedWriter::needs(std::string_view tensor) const {
  const auto found = impl_->shard_of.find(tensor);
  return found != impl_->shard_of.end() && !impl_->shards[found->second].found_complete;
}

Status ShardedWriter::write(std::string_view tensor, std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  const auto found = impl.shard_of.find(tensor);
  if (found == impl.shard_of.end())
    return invalid_argument(
        fmt::format("tensor '{}': not in the list of tensors to write", printable(tensor)));
  if (bytes.empty()) return {};
  if (impl.shards[found->second].found_complete) return {};
  NVFP4_MOE_TRY(impl.advance());
  if (impl.shard == impl.shards.size())
    return invalid_argument(
        fmt::format("tensor '{}': all tensors are written already", printable(tensor)));
  const TensorInfo& next = impl.shards[impl.shard].tensors[impl.tensor];
  if (next.name != tensor)
    return invalid_argument(fmt::format("expected bytes of tensor '{}' next, got '{}'",
                                        printable(next.name), printable(tensor)));
  if (bytes.size() > next.size_bytes() - impl.received)
    return invalid_argument(fmt::format("tensor '{}': expected {} bytes for {}, got {} or more",
                                        printable(tensor), next.size_bytes(), describe(next),
                                        impl.received + bytes.size()));
  NVFP4_MOE_TRY(impl.writer->write(bytes));
  impl.received += bytes.size();
  return impl.advance();
}

Status ShardedWriter::finish() {
  Impl& impl = *impl_;
  NVFP4_MOE_TRY(impl.advance());
  if (impl.shard < impl.shards.size()) {
    const TensorInfo& next = impl.shards[impl.shard].tensors[impl.tensor];
    return invalid_argument(fmt::format("tensor '{}': expected {} bytes for {}, got {}",
                                        printable(next.name), next.size_bytes(), describe(next),
                                        impl.received));
  }
  Json index;
  index["metadata"]["total_size"] = impl.total_bytes;
  Json& map = index["weight_map"] = Json::object();
  for (const auto& [tensor, shard] : impl.shard_of) map[tensor] = impl.shards[shard].name;
  return write_text_file(impl.index_path(), index.dump(2) + "\n");
}

size_t ShardedWriter::shards() const { return impl_->shards.size(); }
size_t ShardedWriter::complete_shards() const { return impl_->found_complete; }
const std::vector<std::string>& ShardedWriter::altered_shards() const { return impl_->altered; }
uint64_t ShardedWriter::data_bytes() const { return impl_->total_bytes; }

ShardedWriter::ShardedWriter() : impl_(std::make_unique<Impl>()) {}
ShardedWriter::ShardedWriter(ShardedWriter&&) noexcept = default;
ShardedWriter& ShardedWriter::operator=(ShardedWriter&&) noexcept = default;
ShardedWriter::~ShardedWriter() = default;

}  // namespace nvfp4_moe::internal
