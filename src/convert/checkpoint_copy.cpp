#include "convert/checkpoint_copy.h"

#include <algorithm>
#include <filesystem>

#include "safetensors/output_file.h"

namespace nvfp4_moe {

namespace fs = std::filesystem;

Status check_apart(const std::string& in, const std::string& out) {
  std::error_code error;
  const fs::path a = fs::weakly_canonical(in, error), b = fs::weakly_canonical(out, error);
  const auto contains = [](const fs::path& outer, const fs::path& inner) {
    return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
  };
  if (contains(a, b) || contains(b, a))
    return invalid_argument(out + ": expected a directory apart from the source " + in);
  return {};
}

Status copy_tensor(const TensorIndex::Ref& from, ShardedWriter& writer) {
  constexpr uint64_t kBytesAtOnce = 16ull << 20;
  const std::byte* data = from.data();
  const uint64_t size = from.info->size_bytes();
  for (uint64_t at = 0; at < size; at += kBytesAtOnce) {
    const auto count = static_cast<size_t>(std::min(kBytesAtOnce, size - at));
    from.file->prefetch(data + at, count);
    NVFP4_MOE_TRY(writer.write(from.info->name, {data + at, count}));
    from.file->release(data + at, count);
  }
  return {};
}

Result<std::vector<std::string>> copy_other_files(const std::string& in, const std::string& out) {
  // Weights in any format would contradict the new ones, or double the directory's size.
  constexpr const char* kWeights[] = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"};
  std::vector<std::string> copied;
  std::error_code error;
  for (auto it = fs::recursive_directory_iterator(in, fs::directory_options::skip_permission_denied, error);
       !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const fs::path relative = it->path().lexically_relative(in);
    const std::string name = it->path().filename().string();
    if (name.starts_with('.')) {
      if (it->is_directory(error)) it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file(error)) continue;
    if (name == "config.json" && !relative.has_parent_path()) continue;
    if (name == "hf_quant_config.json" || name.ends_with(".index.json")) continue;
    const std::string extension = it->path().extension().string();
    if (std::find(std::begin(kWeights), std::end(kWeights), extension) != std::end(kWeights)) continue;
    const fs::path target = fs::path(out) / relative;
    NVFP4_MOE_TRY(make_directories(target.parent_path().string()));
    NVFP4_MOE_TRY(copy_file(it->path().string(), target.string()));
    copied.push_back(relative.string());
  }
  if (error) return io_error(in + ": " + error.message());
  std::sort(copied.begin(), copied.end());
  return copied;
}

}  // namespace nvfp4_moe
