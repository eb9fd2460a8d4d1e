// safetensors_copy IN OUT_DIRECTORY MAX_SHARD_BYTES: IN (a file or a directory) through
// TensorIndex, written again by ShardedWriter in the order of its files. The Python tests read the
// copy with the safetensors package.
#include <cstdio>
#include <cstdlib>

#include "safetensors/safetensors.h"
#include "safetensors/sharded_writer.h"

namespace nvfp4_moe::internal {
namespace {

Status copy(const std::string& in, const std::string& out, uint64_t max_shard_bytes) {
  NVFP4_MOE_ASSIGN(const TensorIndex index, TensorIndex::open(in));
  std::vector<TensorInfo> tensors;
  std::map<std::string, std::string> metadata;
  for (const auto& file : index.files()) {
    NVFP4_MOE_ASSIGN(const SafetensorsFile opened, SafetensorsFile::open(file->path()));
    tensors.insert(tensors.end(), opened.tensors().begin(), opened.tensors().end());
    metadata.insert(opened.header().metadata.begin(), opened.header().metadata.end());
  }
  NVFP4_MOE_ASSIGN(ShardedWriter writer,
                   ShardedWriter::create(out, tensors, max_shard_bytes, metadata));
  for (const TensorInfo& info : tensors) {
    if (!writer.needs(info.name)) continue;
    const TensorIndex::Ref ref = index.find(info.name);
    std::vector<std::byte> bytes(ref.info->size_bytes());
    NVFP4_MOE_TRY(ref.file->read(ref.file->offset(*ref.info), bytes.data(), bytes.size()));
    NVFP4_MOE_TRY(writer.write(info.name, bytes));
  }
  return writer.finish();
}

}  // namespace
}  // namespace nvfp4_moe::internal

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: safetensors_copy IN OUT_DIRECTORY MAX_SHARD_BYTES\n");
    return 2;
  }
  const nvfp4_moe::internal::Status status =
      nvfp4_moe::internal::copy(argv[1], argv[2], std::strtoull(argv[3], nullptr, 10));
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 4;
}
