#include "moe/cache_key.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <set>

#include "moe/config_json.h"
#include "safetensors/files.h"

namespace nvfp4_moe {
namespace {

constexpr int64_t kKeyVersion = 3;
constexpr size_t kSampleBytes = 512;
constexpr size_t kReadAtOnce = size_t{1} << 20;

std::string real_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

Status hash_bytes(const TensorFile& file, uint64_t offset, uint64_t size_bytes, ContentHasher& hasher) {
  std::vector<std::byte> buffer(static_cast<size_t>(std::min<uint64_t>(size_bytes, kReadAtOnce)));
  for (uint64_t at = 0; at < size_bytes; at += buffer.size()) {
    const auto count = static_cast<size_t>(std::min<uint64_t>(buffer.size(), size_bytes - at));
    NVFP4_MOE_TRY(file.read(offset + at, buffer.data(), count));
    hasher.bytes(buffer.data(), count);
  }
  return {};
}

// Small tensors whole; of a matrix the middle, of stacked ones the middle of each.
Status hash_sample(const TensorFile& file, const TensorInfo& info, ContentHasher& hasher) {
  hasher.text(info.name);
  const uint64_t offset = file.offset(info);
  if (info.size_bytes() <= kSampleBytes) return hash_bytes(file, offset, info.size_bytes(), hasher);
  const auto stacked = static_cast<uint64_t>(info.shape.size() == 3 ? std::max<int64_t>(info.shape[0], 1) : 1);
  const uint64_t one = info.size_bytes() / stacked;
  const uint64_t count = std::min<uint64_t>(one, kSampleBytes);
  for (uint64_t i = 0; i < stacked; ++i)
    NVFP4_MOE_TRY(hash_bytes(file, offset + i * one + (one - count) / 2, count, hasher));
  return {};
}

Status hash_place(const TensorFile& file, ContentHasher& hasher) {
  struct stat info {};
  // Of the file that is open: its name may be another file's by now.
  if (::fstat(file.descriptor(), &info) != 0) return errno_status(file.path(), "cannot stat", errno);
  hasher.text(real_path(file.path()));
  for (const int64_t value :
       {static_cast<int64_t>(info.st_dev), static_cast<int64_t>(info.st_ino), static_cast<int64_t>(info.st_size),
        static_cast<int64_t>(info.st_mtim.tv_sec), static_cast<int64_t>(info.st_mtim.tv_nsec),
        static_cast<int64_t>(info.st_ctim.tv_sec), static_cast<int64_t>(info.st_ctim.tv_nsec)})
    hasher.number(value);
  return hash_bytes(file, 0, file.data_offset(), hasher);
}

}  // namespace

Result<ContentHash> cache_sample_hash(const CacheSubject& subject) {
  ContentHasher hasher;
  // Tensors that belong together lie under one module: "...experts.7.up_proj." or, of stacked ones, "...experts.".
  std::set<std::string> modules;
  const auto add = [&](int64_t expert) {
    constexpr const char* kProjections[] = {"gate", "up", "down"};
    for (int p = first_matrix(subject.config->activation); p < 3; ++p) {
      const std::string name = subject.checkpoint.tensor_name(subject.layer, expert, kProjections[p]);
      modules.insert(name.substr(0, name.rfind('.') + 1));
    }
  };
  for (int64_t e = 0; e < subject.range.count; ++e) add(subject.range.global(e));
  if (subject.config->shared_intermediate_size > 0) add(kSharedExpert);
  const auto& tensors = subject.checkpoint.index().tensors();
  for (const std::string& module : modules)
    for (auto found = tensors.lower_bound(module); found != tensors.end() && found->first.starts_with(module); ++found)
      NVFP4_MOE_TRY(hash_sample(*found->second.file, *found->second.info, hasher));
  return hasher.digest();
}

Result<ContentHash> cache_key(const CacheSubject& subject, bool checksum) {
  ContentHasher hasher;
  hasher.text(NVFP4_MOE_VERSION);
  hasher.number(kKeyVersion);
  hasher.number(checksum);
  hasher.text(subject.backend.name);
  hasher.text(to_json(subject.config.options()));
  const ModelInfo& model = subject.checkpoint.model();  // says how the tensors are read
  hasher.text(model.model_type);
  hasher.text(to_string(model.format));
  hasher.text(model.quant_method);
  hasher.text(model.quant_algo);
  const auto& order = subject.checkpoint.options().gate_up_order;
  hasher.text(order ? to_string(*order) : "");
  for (const int64_t value :
       {subject.layer, subject.range.first, subject.range.count, subject.slice.first, subject.slice.count})
    hasher.number(value);
  for (const auto& scale : {subject.scales.hidden, subject.scales.intermediate}) {
    hasher.number(scale.has_value());
    const float value = scale.value_or(0.0f);
    hasher.bytes(&value, sizeof(value));
  }
  for (const auto& file : subject.checkpoint.index().files()) {
    hasher.text(std::filesystem::path(file->path()).filename().string());
    hasher.number(static_cast<int64_t>(file->size_bytes()));
    NVFP4_MOE_TRY(checksum ? hash_bytes(*file, 0, file->size_bytes(), hasher) : hash_place(*file, hasher));
  }
  if (!checksum) {
    NVFP4_MOE_ASSIGN(const ContentHash sample, cache_sample_hash(subject));
    hasher.bytes(&sample, sizeof(sample));
  }
  return hasher.digest();
}

std::string cache_entry_name(const CacheSubject& subject) {
  // A directory may hold several models in GGUF, each with a file of its own.
  const TensorIndex& index = subject.checkpoint.index();
  const std::string place =
      real_path(subject.checkpoint.model().gguf ? index.files().front()->path() : index.directory());
  return "model" + to_string(content_hash(place.data(), place.size())).substr(0, 16) + "-layer" +
         std::to_string(subject.layer) + "-experts" + std::to_string(subject.range.first) + "+" +
         std::to_string(subject.range.count) + "-slice" + std::to_string(subject.slice.first) + "+" +
         std::to_string(subject.slice.count) + "-" + subject.backend.name + ".packed";
}

}  // namespace nvfp4_moe
