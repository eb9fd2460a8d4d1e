// Bytes as a GGUF file: header parse, the properties of accepted headers, a walk over the file's
// tensors, and the model that its metadata makes of them: findings, statistics, and the first
// expert of each layer.
//
// The data that a header names is appended (up to a limit) as a repeated byte that is valid as a
// code and as a scale, so that the fuzzer need not write it.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"
#include "fuzz/require.h"
#include "gguf/gguf.h"

using namespace nvfp4_moe::internal;

namespace {

constexpr uint64_t kMaxData = uint64_t{1} << 16;

void check_status(const Status& status) {
  REQUIRE(status.code() == Code::kBadInput || status.code() == Code::kUnsupported);
  REQUIRE(!status.message().empty());
  for (const char c : status.message()) REQUIRE(static_cast<unsigned char>(c) >= 0x20);
}

// Tensors follow one another, within the file.
void check_header(const GgufHeader& header, uint64_t file_size) {
  uint64_t covered = 0;
  for (const TensorInfo& info : header.tensors) {
    REQUIRE(info.begin >= covered && info.end >= info.begin && !describe(info).empty());
    covered = info.end;
  }
  REQUIRE(header.data_offset <= file_size && covered <= file_size - header.data_offset);
  for (const auto& [key, value] : header.metadata)
    REQUIRE(!key.empty() && !describe(value).empty());
}

void check_model(const std::string& path) {
  const auto checkpoint = Checkpoint::open(path);
  if (!checkpoint.ok()) return check_status(checkpoint.status());
  for (const int64_t layer : checkpoint->model().layers) {
    REQUIRE(checkpoint->validate(layer, {}).ok());
    REQUIRE(checkpoint->statistics(layer, {}).ok());
    const auto whole = checkpoint->expert(layer, 0);
    if (!whole.ok()) continue;
    REQUIRE(whole->source.gate.rows == checkpoint->model().options.intermediate_size);
    REQUIRE(checkpoint->expert(layer, 0, {0, 16}).ok());
    (void)checkpoint->shared_expert(layer);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(reinterpret_cast<const char*>(data), size);
  // The number of data bytes that the header names: fewer are cut off, more are refused for another
  // reason.
  std::string longer = bytes;
  for (uint64_t low = 0, high = kMaxData; low < high;) {
    const uint64_t middle = (low + high) / 2;
    longer.resize(size + middle, '\x38');
    const auto header = parse_gguf_header(std::as_bytes(std::span(longer)), longer.size());
    if (header.ok()) {
      bytes = longer;
      break;
    }
    const bool cut = header.status().message().find("cut off") != std::string::npos;
    (cut ? low : high) = cut ? middle + 1 : middle;
  }
  const auto header = parse_gguf_header(std::as_bytes(std::span(bytes)), bytes.size());
  if (!header.ok()) {
    check_status(header.status());
    return 0;
  }
  check_header(*header, bytes.size());
  const int fd = memfd_create("gguf_fuzz", MFD_CLOEXEC);
  REQUIRE(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  const auto file = GgufFile::open(path);
  REQUIRE(file.ok());
  for (const TensorInfo& info : file->tensors()) {
    REQUIRE(file->find(info.name) == &info);
    std::string read(info.size_bytes(), '\0');
    REQUIRE(file->read(file->offset(info), read.data(), read.size()).ok());
    REQUIRE(bytes.compare(file->offset(info), read.size(), read) == 0);
  }
  check_model(path);
  close(fd);
  return 0;
}
