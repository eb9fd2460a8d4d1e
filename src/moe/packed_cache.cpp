#include "moe/packed_cache.h"

#define XXH_INLINE_ALL
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "moe/config_json.h"
#include "moe/registry.h"
#include "safetensors/output_file.h"

namespace nvfp4_moe {
namespace {

constexpr size_t kPage = 4096;
constexpr char kMagic[8] = {'N', 'V', 'F', '4', 'P', 'A', 'C', 'K'};
constexpr uint32_t kVersion = 1;

struct Hash {
  uint64_t low = 0;
  uint64_t high = 0;
  bool operator==(const Hash&) const = default;
};

class Hasher {
 public:
  Hasher() { XXH3_128bits_reset(&state_); }
  void bytes(const void* data, size_t size) { XXH3_128bits_update(&state_, data, size); }
  void number(int64_t value) { bytes(&value, sizeof(value)); }
  void text(const std::string& value) {  // with its length, so that neighbours cannot swap characters
    number(static_cast<int64_t>(value.size()));
    bytes(value.data(), value.size());
  }
  Hash digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.low64, hash.high64};
  }

 private:
  XXH3_state_t state_;
};

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;  // sizeof(FileHeader)
  Hash key;
  uint64_t scale_sets;      // rows of the tensor scales
  uint64_t payload_offset;  // multiple of 4096
  uint64_t payload_bytes;
  Hash payload_hash;
  Hash header_hash;  // of all fields above and of the tensor scales
};
static_assert(sizeof(FileHeader) == 88);

size_t page_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Hash header_hash(const FileHeader& header, const std::vector<TensorScales>& scales) {
  Hasher hasher;
  hasher.bytes(&header, offsetof(FileHeader, header_hash));
  hasher.bytes(scales.data(), scales.size() * sizeof(TensorScales));
  return hasher.digest();
}

std::string hex(const Hash& hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint64_t half : {hash.high, hash.low})
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(half >> shift) & 15];
  return text;
}

Status errno_error(const std::string& path, const char* what) {
  return io_error(path + ": " + what + ": " + std::strerror(errno));
}

Result<Hash> cache_key(const Checkpoint& checkpoint, int64_t layer, const MoeConfig& config, const ExpertRange& range,
                       const LayerScales& scales, const IntermediateSlice& slice, const Backend& backend,
                       bool checksum) {
  Hasher hasher;
  hasher.text(NVFP4_MOE_VERSION);
  hasher.number(kVersion);
  hasher.text(backend.name);
  hasher.text(to_json(config.options()));
  for (const int64_t value : {layer, range.first, range.count, slice.first, slice.count, int64_t{checksum}})
    hasher.number(value);
  for (const auto& scale : {scales.hidden, scales.intermediate}) {
    hasher.number(scale.has_value());
    const float value = scale.value_or(0.0f);
    hasher.bytes(&value, sizeof(value));
  }
  for (const auto& file : checkpoint.index().files()) {
    struct stat info {};
    if (stat(file->path().c_str(), &info) != 0) return errno_error(file->path(), "stat");
    hasher.text(std::filesystem::path(file->path()).filename().string());
    hasher.number(static_cast<int64_t>(file->size_bytes()));
    hasher.number(info.st_mtim.tv_sec);
    hasher.number(info.st_mtim.tv_nsec);
    // The mapping begins data_offset bytes before the data section: its header, as it lies in the file.
    const TensorInfo origin;
    const std::byte* start = file->data(origin) - file->header().data_offset;
    hasher.bytes(start, checksum ? file->size_bytes() : file->header().data_offset);
    if (checksum) file->release(start, file->size_bytes());
  }
  return hasher.digest();
}

struct Mapped {
  Buffer bytes;  // the payload, copy-on-write: replacing an expert changes memory, not the file
  std::vector<TensorScales> scales;
};

// The file's content if it is the one that `key` asks for; else the reason why it is not.
Result<Mapped> read_cache(const std::string& path, const Hash& key, size_t scale_sets, size_t payload_bytes,
                          bool checksum) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return errno_error(path, "open");
  struct Closer {
    int file;
    ~Closer() { ::close(file); }
  } closer{file};
  struct stat info {};
  if (fstat(file, &info) != 0) return errno_error(path, "stat");
  if (!S_ISREG(info.st_mode)) return bad_input(path + ": expected a regular file, got something else");

  const size_t scales_bytes = scale_sets * sizeof(TensorScales);
  const size_t payload_offset = kPage + page_up(scales_bytes);
  const size_t file_bytes = payload_offset + payload_bytes;
  if (static_cast<uint64_t>(info.st_size) != file_bytes)
    return bad_input(path + ": expected " + std::to_string(file_bytes) + " bytes, got " + std::to_string(info.st_size));

  const auto read_at = [&](void* to, size_t size, size_t offset) {
    return ::pread(file, to, size, static_cast<off_t>(offset)) == static_cast<ssize_t>(size);
  };
  FileHeader header;
  Mapped mapped;
  mapped.scales.resize(scale_sets);
  if (!read_at(&header, sizeof(header), 0) || !read_at(mapped.scales.data(), scales_bytes, kPage))
    return errno_error(path, "read");
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.version != kVersion ||
      header.header_bytes != sizeof(FileHeader))
    return bad_input(path + ": expected a packed cache of version " + std::to_string(kVersion) + ", got another file");
  if (!(header.key == key)) return bad_input(path + ": expected key " + hex(key) + ", got " + hex(header.key));
  if (header.scale_sets != scale_sets || header.payload_offset != payload_offset ||
      header.payload_bytes != payload_bytes)
    return bad_input(path + ": expected " + std::to_string(payload_bytes) + " packed bytes of " +
                     std::to_string(scale_sets) + " experts, got " + std::to_string(header.payload_bytes) + " of " +
                     std::to_string(header.scale_sets));
  if (!(header_hash(header, mapped.scales) == header.header_hash))
    return bad_input(path + ": header hash: expected " + hex(header.header_hash) + ", got another");
  for (const TensorScales& one : mapped.scales)
    for (const float scale : {one.gate, one.up, one.down})
      if (!std::isfinite(scale) || scale < 0)
        return bad_input(path + ": tensor scale: expected a finite number >= 0, got " + std::to_string(scale));

  void* map = mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  if (map == MAP_FAILED) return errno_error(path, "map");
  mapped.bytes = Buffer(static_cast<std::byte*>(map) + payload_offset, payload_bytes,
                        [map, file_bytes](std::byte*, size_t) { munmap(map, file_bytes); });
  if (checksum) {
    Hasher hasher;
    hasher.bytes(mapped.bytes.data(), payload_bytes);
    if (!(hasher.digest() == header.payload_hash))
      return bad_input(path + ": payload hash: expected " + hex(header.payload_hash) + ", got another");
  }
  return mapped;
}

Status write_cache(const std::string& path, const Hash& key, const PackedWeights& weights) {
  const std::vector<TensorScales>& scales = weights.tensor_scales;
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.header_bytes = sizeof(FileHeader);
  header.key = key;
  header.scale_sets = scales.size();
  header.payload_offset = kPage + page_up(scales.size() * sizeof(TensorScales));
  header.payload_bytes = weights.bytes.size_bytes();
  Hasher payload;
  payload.bytes(weights.bytes.data(), weights.bytes.size_bytes());
  header.payload_hash = payload.digest();
  header.header_hash = header_hash(header, scales);

  std::vector<std::byte> head(header.payload_offset);
  std::memcpy(head.data(), &header, sizeof(header));
  std::memcpy(head.data() + kPage, scales.data(), scales.size() * sizeof(TensorScales));
  std::error_code error;
  // The name is the cache's own, so a link there is replaced and not followed.
  if (std::filesystem::is_symlink(path, error)) NVFP4_MOE_TRY(remove_file(path));
  NVFP4_MOE_ASSIGN(OutputFile file, OutputFile::create(path));
  NVFP4_MOE_TRY(file.write(head));
  NVFP4_MOE_TRY(file.write({weights.bytes.data(), weights.bytes.size_bytes()}));
  return file.finish();
}

// Error findings stop a load; the first is reported.
Status refuse_errors(const Checkpoint& checkpoint, int64_t layer, const ExpertRange& range) {
  NVFP4_MOE_ASSIGN(const std::vector<Finding> findings, checkpoint.validate(layer, range));
  int64_t errors = 0;
  const Finding* first = nullptr;
  for (const Finding& finding : findings) {
    if (finding.severity != Severity::kError) continue;
    if (errors++ == 0) first = &finding;
  }
  if (errors == 0) return {};
  return error_of(*first, errors - 1);
}

}  // namespace

Result<std::unique_ptr<MoeLayer>> PackedCache::open(const Checkpoint& checkpoint, int64_t layer_index,
                                                    const MoeConfig& config, const IntermediateSlice& slice,
                                                    const LayerOptions& options, const CacheOptions& cache,
                                                    const ProgressFn& progress, CacheOutcome* outcome) {
  CacheOutcome unused;
  CacheOutcome& result = outcome == nullptr ? unused : *outcome;
  result = {};
  NVFP4_MOE_ASSIGN(const Env env, read_env());
  NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, layer_index, slice));
  const std::string& forced = options.backend == "auto" && !env.backend.empty() ? env.backend : options.backend;
  NVFP4_MOE_ASSIGN(const DeviceFacts device, device_facts(options.device));
  NVFP4_MOE_ASSIGN(const Backend* backend, choose_backend(config, device, forced));
  NVFP4_MOE_ASSIGN(auto layer, MoeLayer::prepare(*backend, config, source.scales, options, env));
  PackedWeights& weights = *layer->weights_;

  std::optional<Hash> key;
  const bool host = backend->memory == nullptr;  // a device's bytes cannot be mapped from a file
  if (!cache.directory.empty() && host) {
    NVFP4_MOE_ASSIGN(
        key, cache_key(checkpoint, layer_index, config, weights.range, source.scales, slice, *backend, cache.checksum));
    std::error_code error;
    (void)make_directories(cache.directory).ok();  // failing shows when the file is written
    // One file per place in the model, so that a stale one is replaced, not left behind.
    result.path = cache.directory + "/layer" + std::to_string(layer_index) + "-experts" +
                  std::to_string(weights.range.first) + "+" + std::to_string(weights.range.count) + "-slice" +
                  std::to_string(slice.first) + "+" + std::to_string(slice.count) + "-" + backend->name + ".packed";
    auto mapped = read_cache(result.path, *key, weights.tensor_scales.size(),
                             backend->packed_bytes(config, weights.range), cache.checksum);
    if (mapped.ok()) {
      weights.bytes = std::move(mapped->bytes);
      weights.tensor_scales = std::move(mapped->scales);
      result.hit = true;
    } else if (std::filesystem::exists(result.path, error)) {
      result.reason = mapped.status().message();
    }
  }
  if (!result.hit) {  // what a cache holds was judged before it was written
    NVFP4_MOE_TRY(refuse_errors(checkpoint, layer_index, weights.range));
    NVFP4_MOE_TRY(layer->pack(source, progress));
    if (key) {
      const Status written = write_cache(result.path, *key, weights);
      if (!written.ok()) result.reason += (result.reason.empty() ? "" : "; ") + written.message();
    }
  }
  if (!result.reason.empty()) log_line(LogLevel::kWarning, "packed cache not used: " + result.reason);
  NVFP4_MOE_TRY(layer->attach_debug(env, options));
  return layer;
}

Result<MoeOptions> sliced_options(const Checkpoint& checkpoint, int64_t layer, const IntermediateSlice& slice) {
  NVFP4_MOE_ASSIGN(MoeOptions options, checkpoint.layer_options(layer));
  if (slice.count == 0) return options;
  const int64_t whole = options.intermediate_size;
  if (slice.first < 0 || slice.count < 0 || slice.first > whole || slice.count > whole - slice.first)
    return invalid_argument("intermediate slice: expected a part of [0, " + std::to_string(whole) + "), got first " +
                            std::to_string(slice.first) + " count " + std::to_string(slice.count));
  options.shared_intermediate_size = options.shared_intermediate_size * slice.count / whole;
  options.intermediate_size = slice.count;
  return options;
}

Result<std::unique_ptr<MoeLayer>> open_checkpoint_layer(const Checkpoint& checkpoint, int64_t layer,
                                                        const std::optional<MoeOptions>& given,
                                                        const IntermediateSlice& slice, const LayerOptions& options,
                                                        const CacheOptions& cache, const ProgressFn& progress,
                                                        CacheOutcome* outcome) {
  NVFP4_MOE_ASSIGN(const MoeOptions stored, sliced_options(checkpoint, layer, slice));
  NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(given.value_or(stored)));
  ExpertRange range = options.range;
  if (range.count == 0 && range.first == 0) range.count = stored.num_experts;
  if (range.first < 0 || range.count < 1 || range.count > stored.num_experts ||
      range.first > stored.num_experts - range.count)
    return invalid_argument("expert range: expected a part of [0, " + std::to_string(stored.num_experts) +
                            "), got first " + std::to_string(range.first) + " count " + std::to_string(range.count));
  return PackedCache::open(checkpoint, layer, config, slice, options, cache, progress, outcome);
}

}  // namespace nvfp4_moe
