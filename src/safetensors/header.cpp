// The header of a safetensors file: JSON -> tensors that tile the data section exactly.
//
// {"__metadata__": {string: string}, NAME: {"dtype": D, "shape": [n...], "data_offsets": [begin,
// end]}, ...} Everything is checked before any data is read. safetensors.h lists what is refused.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "io/files.h"
#include "io/json_strict.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint64_t kLengthBytes = 8;  // the little-endian header length in front of the header

Status refuse_field(std::string_view tensor, std::string_view field, std::string_view expected,
                    const Json& actual) {
  return bad_input(fmt::format("tensor '{}': {}: expected {}, got {}", printable(tensor), field,
                               expected, describe_json(actual)));
}

Status parse_metadata(const Json& value, std::map<std::string, std::string>& metadata) {
  if (!value.is_object())
    return bad_input(fmt::format("__metadata__: expected an object, got {}", describe_json(value)));
  for (const auto& [key, text] : value.items()) {
    if (text.is_object() || text.is_array())
      return bad_input(fmt::format("__metadata__: '{}': expected a string, got {}", printable(key),
                                   describe_json(text)));
    // Some writers put numbers and null here. No weight depends on them.
    if (text.is_string()) metadata.emplace(key, text.text());
  }
  return {};
}

Status parse_shape(std::string_view name, const Json& value, std::vector<int64_t>& shape) {
  if (!value.is_array()) return refuse_field(name, "shape", "an array of sizes", value);
  if (value.size() > kMaxRank)
    return refuse_field(name, "shape", fmt::format("at most {} dimensions", kMaxRank), value);
  for (const Json& size : value) {
    const std::optional<int64_t> exact = exact_int64(size);
    if (!exact || *exact < 0)
      return refuse_field(name, "shape", "integers from 0 to 2^63 - 1", size);
    shape.push_back(*exact);
  }
  return {};
}

Status parse_offsets(std::string_view name, const Json& value, uint64_t data_bytes,
                     TensorInfo& info) {
  if (!value.is_array() || value.size() != 2)
    return refuse_field(name, "data_offsets", "[begin, end]", value);
  uint64_t offsets[2] = {};
  for (size_t i = 0; i < 2; ++i) {
    const std::optional<int64_t> exact = exact_int64(value[i]);
    if (!exact || *exact < 0)
      return refuse_field(name, "data_offsets", "integers from 0 to 2^63 - 1", value[i]);
    offsets[i] = static_cast<uint64_t>(*exact);
  }
  info.begin = offsets[0];
  info.end = offsets[1];
  if (info.begin > info.end)
    return bad_input(fmt::format("tensor '{}': data_offsets: expected begin <= end, got [{}, {}]",
                                 printable(name), info.begin, info.end));
  if (info.end > data_bytes)
    return bad_input(fmt::format(
        "tensor '{}': data_offsets: expected an end within the {} bytes of data, got [{}, {}]",
        printable(name), data_bytes, info.begin, info.end));
  return {};
}

Result<TensorInfo> parse_tensor(const std::string& name, const Json& value, uint64_t data_bytes) {
  if (name.empty() || name.size() > kMaxTensorNameBytes)
    return bad_input(fmt::format("tensor '{}': expected a name of 1 to {} bytes, got {}",
                                 printable(name, 40), kMaxTensorNameBytes, name.size()));
  if (!value.is_object())
    return bad_input(
        fmt::format("tensor '{}': expected an object with dtype, shape and data_offsets, got {}",
                    printable(name), describe_json(value)));
  for (const char* field : {"dtype", "shape", "data_offsets"})
    if (!value.contains(field))
      return bad_input(fmt::format("tensor '{}': expected dtype, shape and data_offsets, got no {}",
                                   printable(name), field));
  for (const auto& [key, ignored] : value.items())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      return bad_input(
          fmt::format("tensor '{}': expected dtype, shape and data_offsets only, got '{}' too",
                      printable(name), printable(key)));
  TensorInfo info;
  info.name = name;
  const Json& dtype = value["dtype"];
  if (!dtype.is_string()) return refuse_field(name, "dtype", "a string", dtype);
  const std::optional<DType> known = dtype_from_string(dtype.text());
  if (!known)
    return refuse_field(name, "dtype",
                        "BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F64, F32, F16, BF16, F8_E4M3, "
                        "F8_E5M2, F8_E8M0 "
                        "or F4",
                        dtype);
  info.dtype = *known;
  NVFP4_MOE_TRY(parse_shape(name, value["shape"], info.shape));
  NVFP4_MOE_TRY(parse_offsets(name, value["data_offsets"], data_bytes, info));
  const Result<uint64_t> bytes = tensor_bytes(info.dtype, info.shape);
  if (!bytes.ok()) return bytes.status().in(fmt::format("tensor '{}'", printable(name)));
  if (info.size_bytes() != *bytes)
    return bad_input(fmt::format("tensor '{}': expected {} bytes for {}, got {} ([{}, {}])",
                                 printable(name), *bytes, describe(info), info.size_bytes(),
                                 info.begin, info.end));
  return info;
}

// Checks that the sorted tensors cover [0, data_bytes) without overlap or hole.
Status check_tiling(const std::vector<TensorInfo>& tensors, uint64_t data_bytes) {
  uint64_t covered = 0;
  const TensorInfo* before = nullptr;
  for (const TensorInfo& info : tensors) {
    if (info.begin < covered)
      return bad_input(
          fmt::format("tensor '{}': expected to begin at {}, after '{}', got {}: they overlap",
                      printable(info.name), covered, printable(before->name), info.begin));
    if (info.begin > covered)
      return bad_input(
          fmt::format("tensor '{}': expected to begin at {}, got {}: a hole of {} bytes",
                      printable(info.name), covered, info.begin, info.begin - covered));
    covered = info.end;
    before = &info;
  }
  if (covered != data_bytes)
    return bad_input(fmt::format("data: expected {} bytes (the end of the last tensor), got {}",
                                 covered, data_bytes));
  return {};
}

}  // namespace

Result<uint64_t> tensor_bytes(DType dtype, std::span<const int64_t> shape) {
  if (shape.size() > kMaxRank)
    return bad_input(
        fmt::format("shape: expected at most {} dimensions, got {}", kMaxRank, shape.size()));
  bool empty = false;
  uint64_t bits_total = static_cast<uint64_t>(bits(dtype));
  for (const int64_t size : shape) {
    if (size < 0)
      return bad_input(fmt::format("shape: expected sizes >= 0, got {}", shape_string(shape)));
    if (size == 0) {
      empty = true;
      continue;
    }
    if (bits_total >
        static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / static_cast<uint64_t>(size))
      return bad_input(
          fmt::format("shape: expected a size below 2^63 bits, got {} {}: it overflows",
                      shape_string(shape), to_string(dtype)));
    bits_total *= static_cast<uint64_t>(size);
  }
  if (empty) return uint64_t{0};
  if (bits_total % 8 != 0)
    return bad_input(fmt::format(
        "shape: expected an even number of F4 elements, got {}: half a byte", shape_string(shape)));
  return bits_total / 8;
}

Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> head,
                                                   uint64_t file_size_bytes) {
  if (file_size_bytes < kLengthBytes || head.size() < kLengthBytes)
    return bad_input(fmt::format("file: expected at least {} bytes (the header's length), got {}",
                                 kLengthBytes, std::min<uint64_t>(file_size_bytes, head.size())));
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i)
    header_bytes |= std::to_integer<uint64_t>(head[i]) << (8 * i);
  if (header_bytes < 2 || header_bytes > kMaxHeaderBytes)
    return bad_input(
        fmt::format("header length: expected 2 to {} bytes, got {}: this is not a safetensors file",
                    kMaxHeaderBytes, header_bytes));
  if (header_bytes > std::min<uint64_t>(file_size_bytes, head.size()) - kLengthBytes)
    return bad_input(
        fmt::format("header: expected {} bytes behind the length, got {}: the file is cut off",
                    header_bytes, std::min<uint64_t>(file_size_bytes, head.size()) - kLengthBytes));
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes,
                              static_cast<size_t>(header_bytes));
  if (text.front() != '{')
    return bad_input(fmt::format("header: expected '{{' as its first character, got '{}'",
                                 printable(text.substr(0, 1))));

  // {name: {shape: [...]}} is three levels deep. In a legal header no array is longer than a shape.
  JsonLimits limits;
  limits.max_bytes = kMaxHeaderBytes;
  limits.max_depth = 3;
  limits.max_members = kMaxTensors + 1;
  limits.max_elements = kMaxRank + 1;
  const Result<Json> parsed = parse_json_strict(text, limits);
  if (!parsed.ok()) return parsed.status().in("header");

  SafetensorsHeader header;
  header.data_offset = kLengthBytes + header_bytes;
  const uint64_t data_bytes = file_size_bytes - header.data_offset;
  header.tensors.reserve(parsed->size());
  for (const auto& [name, value] : parsed->items()) {
    if (name == "__metadata__") {
      NVFP4_MOE_TRY(parse_metadata(value, header.metadata));
      continue;
    }
    NVFP4_MOE_ASSIGN(TensorInfo info, parse_tensor(name, value, data_bytes));
    header.tensors.push_back(std::move(info));
  }
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                   });
  NVFP4_MOE_TRY(check_tiling(header.tensors, data_bytes));
  return header;
}

}  // namespace nvfp4_moe::internal
