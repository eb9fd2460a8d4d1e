// Writes one safetensors file in the given order: length, header padded with spaces so that the
// data begins at a multiple of 8, data. See output_file.h for how the file gets its name.
#include <fmt/format.h>

#include <optional>
#include <set>

#include "io/files.h"
#include "io/json.h"
#include "io/output_file.h"
#include "safetensors/plan.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

namespace nvfp4_moe::internal {
namespace {

std::string quoted(const std::string& text) { return Json(text).dump(); }

}  // namespace

Status assign_offsets(std::vector<TensorInfo>& tensors) {
  std::set<std::string_view> names;
  uint64_t offset = 0;
  for (TensorInfo& info : tensors) {
    if (info.name.empty() || info.name.size() > kMaxTensorNameBytes ||
        info.name == "__metadata__" || find_invalid_utf8(info.name) != std::string::npos)
      return invalid_argument(
          fmt::format("tensor '{}': expected a UTF-8 name of 1 to {} bytes other than __metadata__",
                      printable(info.name), kMaxTensorNameBytes));
    if (!names.insert(info.name).second)
      return invalid_argument(fmt::format("tensor '{}': named twice", printable(info.name)));
    const Result<uint64_t> bytes = tensor_bytes(info.dtype, info.shape);
    if (!bytes.ok())
      return invalid_argument(
          fmt::format("tensor '{}': {}", printable(info.name), bytes.status().message()));
    if (*bytes > (uint64_t{1} << 62) - offset)
      return invalid_argument(
          fmt::format("tensor '{}': expected less than 2^62 bytes in all", printable(info.name)));
    info.begin = offset;
    info.end = offset += *bytes;
  }
  if (tensors.size() > kMaxTensors)
    return invalid_argument(
        fmt::format("expected at most {} tensors, got {}", kMaxTensors, tensors.size()));
  return {};
}

Result<std::string> header_bytes(const std::vector<TensorInfo>& tensors,
                                 const std::map<std::string, std::string>& metadata) {
  std::string text(8, '\0');
  text += '{';
  if (!metadata.empty()) {
    for (const auto& [key, value] : metadata)
      if (find_invalid_utf8(key) != std::string::npos ||
          find_invalid_utf8(value) != std::string::npos)
        return invalid_argument(fmt::format("__metadata__: '{}': expected UTF-8", printable(key)));
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      text += fmt::format("{}:{},", quoted(key), quoted(value));
    text.back() = '}';
    text += ',';
  }
  for (const TensorInfo& info : tensors)
    text += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                        quoted(info.name), to_string(info.dtype), fmt::join(info.shape, ","),
                        info.begin, info.end);
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size() - 8;
  if (length > kMaxWrittenHeaderBytes)
    return invalid_argument(
        fmt::format("header: expected at most {} bytes, got {}", kMaxWrittenHeaderBytes, length));
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(length >> (8 * i) & 0xFF);
  return text;
}

struct SafetensorsWriter::Impl {
  std::string path;
  std::optional<OutputFile> file;
  ContentHasher hasher;
  uint64_t expected = 0;  // bytes of the data section
  uint64_t received = 0;
};

Result<SafetensorsWriter> SafetensorsWriter::create(
    const std::string& path, std::vector<TensorInfo> tensors,
    const std::map<std::string, std::string>& metadata, unsigned mode) {
  const Status assigned = assign_offsets(tensors);
  if (!assigned.ok()) return assigned.in(printable(path, 4096));
  const Result<std::string> header = header_bytes(tensors, metadata);
  if (!header.ok()) return header.status().in(printable(path, 4096));

  SafetensorsWriter writer;
  Impl& impl = *writer.impl_;
  impl.path = path;
  impl.expected = tensors.empty() ? 0 : tensors.back().end;
  NVFP4_MOE_ASSIGN(impl.file, OutputFile::create(path, mode));
  impl.hasher.bytes(header->data(), header->size());
  NVFP4_MOE_TRY(impl.file->write(std::as_bytes(std::span(*header))));
  return writer;
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  if (bytes.size() > impl.expected - impl.received)
    return invalid_argument(fmt::format("{}: expected {} bytes of data, got {} or more",
                                        printable(impl.path, 4096), impl.expected,
                                        impl.received + bytes.size()));
  NVFP4_MOE_TRY(impl.file->write(bytes));
  impl.hasher.bytes(bytes.data(), bytes.size());
  impl.received += bytes.size();
  return {};
}

Status SafetensorsWriter::finish(const std::function<Status(const ContentHash&)>& before_name) {
  Impl& impl = *impl_;
  if (impl.received != impl.expected)
    return invalid_argument(fmt::format("{}: expected {} bytes of data, got {}",
                                        printable(impl.path, 4096), impl.expected, impl.received));
  if (before_name) {
    NVFP4_MOE_TRY(impl.file->sync());
    NVFP4_MOE_TRY(before_name(impl.hasher.digest()));
  }
  return impl.file->finish();
}

SafetensorsWriter::SafetensorsWriter() : impl_(std::make_unique<Impl>()) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

}  // namespace nvfp4_moe::internal
