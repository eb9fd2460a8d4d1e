#include "moe/cache_key.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <set>

#include "io/files.h"
#include "moe/config_json.h"

namespace nvfp4_moe::internal {
namespace {

constexpr int64_t kKeyVersion = 3;
constexpr size_t kSampleBytes = 512;
constexpr size_t kReadAtOnce = size_t{1} << 20;

std::string real_path(const std::string& path) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(path, error);
  return error ? path : real.string();
}

Status hash_bytes(const TensorFile& file, uint64_t offset, uint64_t size_bytes,
                  ContentHasher& hasher) {
  std::vector<std::byte> buffer(static_cast<size_t>(std::min<uint64_t>(size_bytes, kReadAtOnce)));
  for (uint64_t at = 0; at < size_bytes; at += buffer.size()) {
    const auto count = static_cast<size_t>(std::min<uint64_t>(buffer.size(), size_bytes - at));
    NVFP4_MOE_TRY(file.read(offset + at, buffer.data(), count));
    hasher.bytes(buffer.data(), count);
  }
  return {};
}

// Hashes small tensors whole; of a matrix the middle; of stacked matrices the middle of each.
Status hash_sample(const TensorFile& file, const TensorInfo& info, bool whole,
                   ContentHasher& hasher) {
  hasher.text(info.name);
  const uint64_t offset = file.offset(info);
  if (whole || info.size_bytes() <= kSampleBytes)
    return hash_bytes(file, offset, info.size_bytes(), hasher);
  const auto stacked =
      static_cast<uint64_t>(info.shape.size() == 3 ? std::max<int64_t>(info.shape[0], 1) : 1);
  const uint64_t one = info.size_bytes() / stacked;
  const uint64_t count = std::min<uint64_t>(one, kSampleBytes);
  for (uint64_t i = 0; i < stacked; ++i)
    NVFP4_MOE_TRY(hash_bytes(file, offset + i * one + (one - count) / 2, count, hasher));
  return {};
}

int64_t nanoseconds(const struct timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Writes dirty pages back, so that they are clean, and reads the metadata of the open file; its
// name may refer to another file by now. Returns false if times do not show every later write,
// because the file system has no clean pages or cannot write.
//
// Times are as coarse as a kernel clock tick, or 2 s if they are whole seconds. A time younger than
// that may be that of an earlier write, so a file that was just written is checked again a little
// later.
Result<bool> settled_facts(const TensorFile& file, struct stat& facts) {
  constexpr int64_t kTickNs = 20'000'000, kCoarseNs = 2'100'000'000;
  constexpr int kAttempts = 5;
  const int fd = file.descriptor();
  bool show_writes = true, settled = false;
  for (int attempt = 0; attempt < kAttempts && !settled; ++attempt) {
    // Unlike fsync this costs nothing if all pages are clean. The disk's own cache does not matter
    // here.
    constexpr unsigned kWriteAndWait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (::sync_file_range(fd, 0, 0, kWriteAndWait) != 0) show_writes = false;
    if (::fstat(fd, &facts) != 0) return errno_status(file.path(), "cannot stat", errno);
    const int64_t changed = std::max(nanoseconds(facts.st_mtim), nanoseconds(facts.st_ctim));
    struct timespec now {};
    ::clock_gettime(CLOCK_REALTIME, &now);
    const int64_t wait =
        changed + (changed % 1'000'000'000 == 0 ? kCoarseNs : kTickNs) - nanoseconds(now);
    settled = wait <= 0 || wait > kCoarseNs;  // old enough, or from another clock
    const struct timespec rest { wait / 1'000'000'000, wait % 1'000'000'000 };
    if (!settled) ::nanosleep(&rest, nullptr);
  }
  show_writes = show_writes && settled;
  struct statvfs mount {};
  if (!show_writes && ::fstatvfs(fd, &mount) == 0 && (mount.f_flag & ST_RDONLY) != 0) return true;
  struct statfs system {};
  if (::fstatfs(fd, &system) != 0)
    return errno_status(file.path(), "cannot stat its file system", errno);
  const auto kind = static_cast<uint32_t>(system.f_type);
  return show_writes && kind != TMPFS_MAGIC && kind != RAMFS_MAGIC && kind != HUGETLBFS_MAGIC;
}

Status hash_place(const TensorFile& file, bool& times_show_writes, ContentHasher& hasher) {
  struct stat info {};
  NVFP4_MOE_ASSIGN(const bool show_writes, settled_facts(file, info));
  times_show_writes = times_show_writes && show_writes;
  hasher.text(real_path(file.path()));
  for (const int64_t value :
       {static_cast<int64_t>(info.st_dev), static_cast<int64_t>(info.st_ino),
        static_cast<int64_t>(info.st_size), static_cast<int64_t>(info.st_mtim.tv_sec),
        static_cast<int64_t>(info.st_mtim.tv_nsec), static_cast<int64_t>(info.st_ctim.tv_sec),
        static_cast<int64_t>(info.st_ctim.tv_nsec)})
    hasher.number(value);
  return hash_bytes(file, 0, file.data_offset(), hasher);
}

}  // namespace

Result<ContentHash> cache_sample_hash(const CacheSubject& subject, bool whole) {
  ContentHasher hasher;
  // Tensors that belong together have one module prefix: "...experts.7.up_proj." or, if stacked,
  // "...experts.".
  std::set<std::string> modules;
  const auto add = [&](int64_t expert) {
    constexpr const char* kProjections[] = {"gate", "up", "down"};
    for (int p = first_matrix(subject.config->activation); p < 3; ++p) {
      const std::string name =
          subject.checkpoint.tensor_name(subject.layer, expert, kProjections[p]);
      modules.insert(name.substr(0, name.rfind('.') + 1));
    }
  };
  for (int64_t e = 0; e < subject.range.count; ++e) add(subject.range.global(e));
  if (subject.config->shared_intermediate_size > 0) add(kSharedExpert);
  const auto& tensors = subject.checkpoint.index().tensors();
  for (const std::string& module : modules)
    for (auto found = tensors.lower_bound(module);
         found != tensors.end() && found->first.starts_with(module); ++found)
      NVFP4_MOE_TRY(hash_sample(*found->second.file, *found->second.info, whole, hasher));
  return hasher.digest();
}

Result<ContentHash> cache_source_state(const CacheSubject& subject) {
  ContentHasher hasher;
  bool times_show_writes = true;
  for (const auto& file : subject.checkpoint.index().files())
    NVFP4_MOE_TRY(hash_place(*file, times_show_writes, hasher));
  NVFP4_MOE_ASSIGN(const ContentHash sample, cache_sample_hash(subject, !times_show_writes));
  hasher.bytes(&sample, sizeof(sample));
  return hasher.digest();
}

Result<ContentHash> cache_key(const CacheSubject& subject, bool checksum,
                              const ContentHash& state) {
  ContentHasher hasher;
  hasher.text(NVFP4_MOE_VERSION);
  hasher.number(kKeyVersion);
  hasher.number(checksum);
  hasher.text(subject.backend.name);
  hasher.text(to_json(subject.config.options()));
  const ModelInfo& model = subject.checkpoint.model();  // determines how the tensors are read
  hasher.text(model.model_type);
  hasher.text(to_string(model.format));
  hasher.text(model.quant_method);
  hasher.text(model.quant_algo);
  if (!model.read_as.empty()) hasher.text("as " + model.read_as);
  const auto& order = subject.checkpoint.options().gate_up_order;
  hasher.text(order ? to_string(*order) : "");
  for (const int64_t value : {subject.layer, subject.range.first, subject.range.count,
                              subject.slice.first, subject.slice.count})
    hasher.number(value);
  for (const auto& scale : {subject.scales.hidden, subject.scales.intermediate}) {
    hasher.number(scale.has_value());
    const float value = scale.value_or(0.0f);
    hasher.bytes(&value, sizeof(value));
  }
  for (const auto& file : subject.checkpoint.index().files()) {
    hasher.text(std::filesystem::path(file->path()).filename().string());
    hasher.number(static_cast<int64_t>(file->size_bytes()));
    if (checksum) NVFP4_MOE_TRY(hash_bytes(*file, 0, file->size_bytes(), hasher));
  }
  if (!checksum) hasher.bytes(&state, sizeof(state));
  return hasher.digest();
}

std::string cache_entry_name(const CacheSubject& subject) {
  // A directory may contain several GGUF models, each in one file.
  const TensorIndex& index = subject.checkpoint.index();
  const std::string place = real_path(
      subject.checkpoint.model().gguf ? index.files().front()->path() : index.directory());
  return "model" + to_string(content_hash(place.data(), place.size())).substr(0, 16) + "-layer" +
         std::to_string(subject.layer) + "-experts" + std::to_string(subject.range.first) + "+" +
         std::to_string(subject.range.count) + "-slice" + std::to_string(subject.slice.first) +
         "+" + std::to_string(subject.slice.count) + "-" + subject.backend.name + ".packed";
}

}  // namespace nvfp4_moe::internal
