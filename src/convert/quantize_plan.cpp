#include "convert/quantize_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>

#include "io/files.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint64_t kWholeBytes = uint64_t{16} << 20;    // a file up to this size is hashed whole
constexpr uint64_t kStretchBytes = uint64_t{64} << 20;  // part of a tensor that gives one sample
constexpr uint64_t kSampleBytes = 4096;

int64_t modified_ns(const struct stat& facts) {
  return int64_t{facts.st_mtim.tv_sec} * 1000000000 + facts.st_mtim.tv_nsec;
}

std::string file_name(const TensorFile& file) {
  return printable(std::filesystem::path(file.path()).filename().string(), 4096);
}

struct Sample {
  uint64_t offset;  // in the file
  uint64_t size_bytes;
};

// The samples of a file that are hashed, in order.
std::vector<Sample> samples(const TensorFile& file) {
  if (file.size_bytes() <= kWholeBytes) return {{0, file.size_bytes()}};
  std::vector<Sample> places = {{0, file.data_offset()}};
  for (const TensorInfo& info : file.tensors()) {
    for (uint64_t at = 0; at < info.size_bytes(); at += kStretchBytes) {
      const uint64_t stretch = std::min(kStretchBytes, info.size_bytes() - at);
      const uint64_t count = std::min(kSampleBytes, stretch);
      places.push_back({file.offset(info) + at + (stretch - count) / 2, count});
    }
  }
  return places;
}

}  // namespace

Result<SourceFile> describe_source(const TensorFile& file) {
  struct stat facts {};
  if (::stat(file.path().c_str(), &facts) != 0)
    return errno_status(file.path(), "cannot stat", errno);
  SourceFile source;
  source.name = file_name(file);
  source.size_bytes = file.size_bytes();
  source.modified_ns = modified_ns(facts);
  const std::vector<Sample> places = samples(file);
  for (const Sample& place : places)  // starts all reads before waiting for the first
    file.prefetch(place.offset, static_cast<size_t>(place.size_bytes));
  ContentHasher hasher;
  std::vector<std::byte> bytes;
  for (const Sample& place : places) {
    bytes.resize(static_cast<size_t>(place.size_bytes));
    NVFP4_MOE_TRY(file.read(place.offset, bytes.data(), bytes.size()));
    hasher.bytes(bytes.data(), bytes.size());
  }
  source.sample = hasher.digest();
  return source;
}

Result<QuantizePlan> make_quantize_plan(const std::string& in, const Checkpoint& checkpoint,
                                        const std::string& source_config,
                                        const std::set<int64_t>& layers,
                                        const QuantizeOptions& options,
                                        const std::string& calibration) {
  QuantizePlan plan;
  plan.version = NVFP4_MOE_VERSION;
  std::error_code error;
  plan.source = printable(std::filesystem::weakly_canonical(in, error).string(), 4096);
  if (error) return errno_status(in, "cannot resolve", error.value());
  for (const auto& file : checkpoint.index().files()) {
    NVFP4_MOE_ASSIGN(SourceFile source, describe_source(*file));
    plan.files.push_back(std::move(source));
  }
  ContentHasher config;
  config.text(source_config);
  plan.config = config.digest();
  plan.format = to_string(options.format);
  plan.layers = layers;
  plan.family = options.reading.family;
  if (options.reading.gate_up_order) plan.gate_up_order = to_string(*options.reading.gate_up_order);
  plan.search = to_string(options.search);
  plan.calibration = calibration;
  plan.share_gate_up_scale = options.share_gate_up_scale;
  for (const auto& [layer, s] : options.input_scales)
    plan.input_scales[layer] = {s.hidden.value_or(0.0f), s.intermediate.value_or(0.0f)};
  plan.max_shard_bytes = options.max_shard_bytes;
  return plan;
}

Status check_source_unchanged(const QuantizePlan& plan, const TensorIndex& index) {
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const std::string& path = index.files()[i]->path();
    struct stat facts {};
    if (::stat(path.c_str(), &facts) != 0) return errno_status(path, "cannot stat", errno);
    if (static_cast<uint64_t>(facts.st_size) != plan.files[i].size_bytes ||
        modified_ns(facts) != plan.files[i].modified_ns)
      return bad_input(
          fmt::format("{}: was changed while it was read; what was written is of neither version",
                      printable(path, 4096)));
  }
  return {};
}

Status check_same_work(const QuantizePlan& wanted, const QuantizePlan& found) {
  const auto differ = [](const char* what, const auto& expected, const auto& got) {
    return invalid_argument(fmt::format("another {} (expected {}, found {})", what, expected, got));
  };
  if (wanted.version != found.version)
    return differ("version", wanted.version, printable(found.version));
  if (wanted.source != found.source)
    return differ("source", wanted.source, printable(found.source, 4096));
  if (wanted.files.size() != found.files.size())
    return differ("files", wanted.files.size(), found.files.size());
  for (size_t i = 0; i < wanted.files.size(); ++i) {
    const SourceFile &now = wanted.files[i], &then = found.files[i];
    const std::string what = "files: " + now.name;
    if (now.name != then.name) return differ("files", now.name, printable(then.name));
    if (now.size_bytes != then.size_bytes)
      return differ((what + ", bytes").c_str(), now.size_bytes, then.size_bytes);
    if (now.modified_ns != then.modified_ns)
      return differ((what + ", time of modification in ns").c_str(), now.modified_ns,
                    then.modified_ns);
    if (now.sample != then.sample)
      return differ((what + ", content").c_str(), to_string(now.sample), to_string(then.sample));
  }
  if (wanted.config != found.config)
    return differ("config.json", to_string(wanted.config), to_string(found.config));
  if (wanted.format != found.format)
    return differ("format", wanted.format, printable(found.format));
  if (wanted.layers != found.layers)
    return differ("layers", fmt::format("{}", fmt::join(wanted.layers, ",")),
                  printable(fmt::format("{}", fmt::join(found.layers, ","))));
  if (wanted.family != found.family)
    return differ("family", wanted.family.empty() ? "none" : wanted.family,
                  found.family.empty() ? "none" : printable(found.family));
  if (wanted.gate_up_order != found.gate_up_order)
    return differ("gate_up_order", wanted.gate_up_order.empty() ? "none" : wanted.gate_up_order,
                  found.gate_up_order.empty() ? "none" : printable(found.gate_up_order));
  if (wanted.search != found.search)
    return differ("search", wanted.search, printable(found.search));
  if (wanted.calibration != found.calibration)
    return differ("calibration", wanted.calibration.empty() ? "none" : wanted.calibration,
                  found.calibration.empty() ? "none" : printable(found.calibration));
  if (wanted.share_gate_up_scale != found.share_gate_up_scale)
    return differ("share_gate_up_scale", wanted.share_gate_up_scale, found.share_gate_up_scale);
  if (wanted.input_scales != found.input_scales)
    return invalid_argument("another input_scales (" + std::to_string(wanted.input_scales.size()) +
                            " layers, found " + std::to_string(found.input_scales.size()) +
                            ", or other values)");
  if (wanted.max_shard_bytes != found.max_shard_bytes)
    return differ("max_shard_bytes", wanted.max_shard_bytes, found.max_shard_bytes);
  return {};
}

}  // namespace nvfp4_moe::internal
