// The header of a GGUF file: metadata pairs, then tensors that tile the data section. gguf.h lists
// what is refused.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "core/printable.h"
#include "gguf/gguf.h"
#include "safetensors/shape.h"

namespace nvfp4_moe::internal {
namespace {

constexpr uint64_t kMaxPairs = uint64_t{1} << 16;
constexpr uint64_t kMaxKeyBytes = 65535;  // the format's limit
constexpr uint64_t kMaxTextBytes = 4096;  // longest text that is kept
constexpr uint64_t kMaxArrayElems = uint64_t{1}
                                    << 14;  // longest array that is kept: one element per layer
constexpr uint32_t kMaxDimensions = 4;      // ggml's limit
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = uint64_t{1} << 24;
constexpr uint64_t kMaxInt = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kValueTypes
};
constexpr std::string_view kValueNames[] = {"uint8",  "int8",    "uint16", "int16",  "uint32",
                                            "int32",  "float32", "bool",   "string", "array",
                                            "uint64", "int64",   "float64"};
constexpr uint64_t kValueBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // 0: no fixed size

// Reads from the front of the available bytes, and never past them.
class Cursor {
 public:
  Cursor(std::span<const std::byte> head, uint64_t file_size_bytes, bool* more_needed)
      : head_(head.first(static_cast<size_t>(std::min<uint64_t>(head.size(), file_size_bytes)))),
        file_size_bytes_(file_size_bytes),
        more_needed_(more_needed) {}

  uint64_t at() const { return at_; }
  uint64_t left_in_file() const { return file_size_bytes_ - at_; }

  // Takes the next `count` bytes of the file.
  Result<std::span<const std::byte>> take(uint64_t count, std::string_view what) {
    if (count > left_in_file())
      return bad_input(fmt::format("header: {}: expected {} bytes, got {}: the file is cut off",
                                   what, count, left_in_file()));
    if (count > head_.size() - at_) {
      if (more_needed_ != nullptr) *more_needed_ = true;
      return bad_input(
          fmt::format("header: {}: expected {} bytes, got {}", what, count, head_.size() - at_));
    }
    const auto out = head_.subspan(static_cast<size_t>(at_), static_cast<size_t>(count));
    at_ += count;
    return out;
  }

  template <class T>
  Result<T> number(std::string_view what) {
    NVFP4_MOE_ASSIGN(const std::span<const std::byte> bytes, take(sizeof(T), what));
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }

  // The bytes of a text: its length, then its characters.
  Result<std::string_view> text(std::string_view what) {
    NVFP4_MOE_ASSIGN(const uint64_t length, number<uint64_t>(what));
    NVFP4_MOE_ASSIGN(const std::span<const std::byte> bytes, take(length, what));
    return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }

 private:
  std::span<const std::byte> head_;
  uint64_t file_size_bytes_;
  bool* more_needed_;
  uint64_t at_ = 0;
};

template <class T>
T load(std::span<const std::byte> bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

bool is_float(uint32_t type) { return type == kFloat32 || type == kFloat64; }

int64_t integer_at(std::span<const std::byte> bytes, uint32_t type, uint64_t i) {
  switch (type) {
    case kUint8:
    case kBool: return load<uint8_t>(bytes, i);
    case kInt8: return load<int8_t>(bytes, i);
    case kUint16: return load<uint16_t>(bytes, i);
    case kInt16: return load<int16_t>(bytes, i);
    case kUint32: return load<uint32_t>(bytes, i);
    case kInt32: return load<int32_t>(bytes, i);
    // A number past int64 is not a valid size. It becomes the largest int64.
    case kUint64: return static_cast<int64_t>(std::min(load<uint64_t>(bytes, i), kMaxInt));
    default: return load<int64_t>(bytes, i);
  }
}
double float_at(std::span<const std::byte> bytes, uint32_t type, uint64_t i) {
  return type == kFloat32 ? static_cast<double>(load<float>(bytes, i)) : load<double>(bytes, i);
}

Result<GgufValue> parse_array(Cursor& cursor, std::string_view what) {
  NVFP4_MOE_ASSIGN(const uint32_t type, cursor.number<uint32_t>(what));
  NVFP4_MOE_ASSIGN(const uint64_t count, cursor.number<uint64_t>(what));
  if (type >= kValueTypes || type == kArray)
    return bad_input(fmt::format(
        "header: {}: expected an array of numbers, bools or strings, got elements of type {}", what,
        type));
  if (type == kString) {
    // The shortest text takes eight bytes. A count that does not fit in the file is refused before
    // the first text is read.
    if (count > cursor.left_in_file() / 8)
      return bad_input(
          fmt::format("header: {}: expected at most {} strings in what is left of the file, got {}",
                      what, cursor.left_in_file() / 8, count));
    for (uint64_t i = 0; i < count; ++i) NVFP4_MOE_TRY(cursor.text(what).status());
    return GgufValue(GgufSkipped{"array of string", count});
  }
  if (count > cursor.left_in_file() / kValueBytes[type])
    return bad_input(
        fmt::format("header: {}: expected at most {} elements in what is left of the file, got {}",
                    what, cursor.left_in_file() / kValueBytes[type], count));
  NVFP4_MOE_ASSIGN(const std::span<const std::byte> bytes,
                   cursor.take(count * kValueBytes[type], what));
  if (count > kMaxArrayElems) return GgufValue(GgufSkipped{"array of numbers", count});
  if (is_float(type)) {
    std::vector<double> out;
    for (uint64_t i = 0; i < count; ++i) out.push_back(float_at(bytes, type, i));
    return GgufValue(std::move(out));
  }
  std::vector<int64_t> out;
  for (uint64_t i = 0; i < count; ++i) out.push_back(integer_at(bytes, type, i));
  return GgufValue(std::move(out));
}

Result<GgufValue> parse_value(Cursor& cursor, uint32_t type, std::string_view what) {
  if (type >= kValueTypes)
    return bad_input(fmt::format("header: {}: expected a value type from 0 to {}, got {}", what,
                                 kValueTypes - 1, type));
  if (type == kArray) return parse_array(cursor, what);
  if (type == kString) {
    NVFP4_MOE_ASSIGN(const std::string_view text, cursor.text(what));
    if (text.size() > kMaxTextBytes) return GgufValue(GgufSkipped{"string", text.size()});
    return GgufValue(std::string(text));
  }
  NVFP4_MOE_ASSIGN(const std::span<const std::byte> bytes, cursor.take(kValueBytes[type], what));
  if (is_float(type)) return GgufValue(float_at(bytes, type, 0));
  if (type == kBool) return GgufValue(integer_at(bytes, type, 0) != 0);
  return GgufValue(integer_at(bytes, type, 0));
}

Status parse_pair(Cursor& cursor, GgufMetadata& metadata) {
  NVFP4_MOE_ASSIGN(const std::string_view key, cursor.text("key of a metadata pair"));
  if (key.empty() || key.size() > kMaxKeyBytes)
    return bad_input(fmt::format("header: metadata: expected keys of 1 to {} bytes, got {}",
                                 kMaxKeyBytes, key.size()));
  const std::string what = fmt::format("metadata '{}'", printable(key));
  if (find_invalid_utf8(key) != std::string_view::npos)
    return bad_input("header: " + what + ": invalid UTF-8");
  NVFP4_MOE_ASSIGN(const uint32_t type, cursor.number<uint32_t>(what));
  NVFP4_MOE_ASSIGN(GgufValue value, parse_value(cursor, type, what));
  if (!metadata.emplace(std::string(key), std::move(value)).second)
    return bad_input("header: " + what + ": expected once, got it twice");
  return {};
}

Result<uint64_t> alignment_of(const GgufMetadata& metadata) {
  const auto found = metadata.find(std::string_view("general.alignment"));
  if (found == metadata.end()) return kDefaultAlignment;
  const auto* value = std::get_if<int64_t>(&found->second);
  if (value == nullptr || *value < 1 || static_cast<uint64_t>(*value) > kMaxAlignment ||
      !std::has_single_bit(static_cast<uint64_t>(*value)))
    return bad_input(fmt::format(
        "header: metadata 'general.alignment': expected a power of two up to {}, got {}",
        kMaxAlignment, describe(found->second)));
  return static_cast<uint64_t>(*value);
}

// The dtype of a type whose blocks are one element.
std::optional<DType> plain_dtype(const BlockType& type) {
  if (type.elems != 1) return std::nullopt;
  return dtype_from_string(type.name);
}

// Bytes of the shape's elements, in checked arithmetic.
Result<uint64_t> blocks_bytes(const BlockType& type, const std::vector<int64_t>& shape) {
  const int64_t row = shape.empty() ? 1 : shape.back();
  if (row % type.elems != 0)
    return bad_input(fmt::format("expected rows of whole blocks of {} elements for {}, got {}",
                                 type.elems, type.name, shape_string(shape)));
  // With one byte per element, the product is checked against 2^63 bits. No type takes more than
  // eight bytes per element, so the result fits in 64 bits.
  NVFP4_MOE_ASSIGN(const uint64_t elems, tensor_bytes(DType::kU8, shape));
  return elems / static_cast<uint64_t>(type.elems) * static_cast<uint64_t>(type.size_bytes);
}

Result<TensorInfo> parse_tensor(Cursor& cursor, uint64_t alignment) {
  TensorInfo info;
  NVFP4_MOE_ASSIGN(const std::string_view name, cursor.text("name of a tensor"));
  if (name.empty() || name.size() > kMaxTensorNameBytes)
    return bad_input(fmt::format("tensor '{}': expected a name of 1 to {} bytes, got {}",
                                 printable(name, 40), kMaxTensorNameBytes, name.size()));
  info.name = name;
  const std::string what = fmt::format("tensor '{}'", printable(name));
  if (find_invalid_utf8(name) != std::string_view::npos)
    return bad_input(what + ": name: invalid UTF-8");
  NVFP4_MOE_ASSIGN(const uint32_t dimensions, cursor.number<uint32_t>(what));
  if (dimensions > kMaxDimensions)
    return bad_input(fmt::format("{}: expected at most {} dimensions, got {}", what, kMaxDimensions,
                                 dimensions));
  for (uint32_t d = 0; d < dimensions; ++d) {
    NVFP4_MOE_ASSIGN(const uint64_t size, cursor.number<uint64_t>(what));
    if (size > kMaxInt)
      return bad_input(fmt::format("{}: dimensions: expected 0 to 2^63 - 1, got {}", what, size));
    info.shape.insert(info.shape.begin(),
                      static_cast<int64_t>(size));  // ggml stores the contiguous dimension first
  }
  NVFP4_MOE_ASSIGN(const uint32_t number, cursor.number<uint32_t>(what));
  NVFP4_MOE_ASSIGN(info.begin, cursor.number<uint64_t>(what));
  const BlockType* type = ggml_type(number);
  if (type == nullptr)
    return unsupported(
        fmt::format("{}: expected a ggml type with a known size, got {}", what, number));
  if (const std::optional<DType> dtype = plain_dtype(*type)) {
    info.dtype = *dtype;
  } else {
    info.blocks = type;
  }
  const Result<uint64_t> bytes = blocks_bytes(*type, info.shape);
  if (!bytes.ok()) return bytes.status().in(what);
  if (info.begin % alignment != 0)
    return bad_input(fmt::format("{}: offset: expected a multiple of the alignment {}, got {}",
                                 what, alignment, info.begin));
  if (info.begin > kMaxInt || *bytes > kMaxInt - info.begin)
    return bad_input(fmt::format("{}: offset: expected an end below 2^63, got {} and {} bytes",
                                 what, info.begin, *bytes));
  info.end = info.begin + *bytes;
  return info;
}

uint64_t padded(uint64_t size, uint64_t alignment) {
  return (size + alignment - 1) / alignment * alignment;
}

// Checks that the tensors, in the header's order, cover the data section. Each is padded to the
// alignment, except possibly the last.
Status check_tiling(const std::vector<TensorInfo>& tensors, uint64_t data_bytes,
                    uint64_t alignment) {
  uint64_t covered = 0;
  uint64_t end = 0;
  for (const TensorInfo& info : tensors) {
    if (info.begin != covered)
      return bad_input(
          fmt::format("tensor '{}': offset: expected {}, behind the tensor before it, got {}",
                      printable(info.name), covered, info.begin));
    if (info.end > data_bytes)
      return bad_input(fmt::format(
          "tensor '{}': expected an end within the {} bytes of data, got [{}, {}]: the file is "
          "cut off",
          printable(info.name), data_bytes, info.begin, info.end));
    end = info.end;
    covered = padded(info.end, alignment);
  }
  if (data_bytes > covered)
    return bad_input(
        fmt::format("data: expected {} to {} bytes (the end of the last tensor), got {}", end,
                    covered, data_bytes));
  return {};
}

Status check_version(uint32_t version) {
  if (version == 2 || version == 3) return {};
  const bool swapped = (version & 0xFFFF) == 0 && version != 0;
  return unsupported(fmt::format("version: expected GGUF version 2 or 3{}, got {}",
                                 swapped ? " in little-endian order" : "",
                                 swapped ? "a big-endian file" : fmt::to_string(version)));
}

}  // namespace

std::string describe(const GgufValue& value) {
  struct Describer {
    std::string operator()(int64_t v) const { return fmt::to_string(v); }
    std::string operator()(double v) const { return fmt::to_string(v); }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(const std::string& v) const { return "'" + printable(v) + "'"; }
    std::string operator()(const std::vector<int64_t>& v) const {
      return fmt::format("an array of {} integers", v.size());
    }
    std::string operator()(const std::vector<double>& v) const {
      return fmt::format("an array of {} floats", v.size());
    }
    std::string operator()(const GgufSkipped& v) const {
      return fmt::format("{} of {}", v.type, v.count);
    }
  };
  return std::visit(Describer{}, value);
}

Result<GgufHeader> parse_gguf_header(std::span<const std::byte> head, uint64_t file_size_bytes,
                                     bool* more_needed) {
  static_assert(std::endian::native == std::endian::little, "numbers are read as they lie");
  Cursor cursor(head, file_size_bytes, more_needed);
  NVFP4_MOE_ASSIGN(const std::span<const std::byte> magic, cursor.take(4, "magic"));
  if (std::memcmp(magic.data(), "GGUF", 4) != 0)
    return bad_input(
        fmt::format("file: expected 'GGUF' as its first bytes, got '{}'",
                    printable({reinterpret_cast<const char*>(magic.data()), magic.size()})));
  NVFP4_MOE_ASSIGN(const uint32_t version, cursor.number<uint32_t>("version"));
  NVFP4_MOE_TRY(check_version(version));
  NVFP4_MOE_ASSIGN(const uint64_t tensors, cursor.number<uint64_t>("number of tensors"));
  NVFP4_MOE_ASSIGN(const uint64_t pairs, cursor.number<uint64_t>("number of metadata pairs"));
  if (tensors > kMaxTensors)
    return bad_input(
        fmt::format("header: expected at most {} tensors, got {}", kMaxTensors, tensors));
  if (pairs > kMaxPairs)
    return bad_input(
        fmt::format("header: expected at most {} metadata pairs, got {}", kMaxPairs, pairs));
  GgufHeader out;
  for (uint64_t i = 0; i < pairs; ++i) NVFP4_MOE_TRY(parse_pair(cursor, out.metadata));
  NVFP4_MOE_ASSIGN(const uint64_t alignment, alignment_of(out.metadata));
  std::set<std::string> names;
  for (uint64_t i = 0; i < tensors; ++i) {
    NVFP4_MOE_ASSIGN(TensorInfo info, parse_tensor(cursor, alignment));
    if (!names.insert(info.name).second)
      return bad_input(
          fmt::format("tensor '{}': expected once, got it twice", printable(info.name)));
    out.tensors.push_back(std::move(info));
  }
  // A file without tensors, such as the first of a split, need not be padded to the beginning of
  // data.
  out.data_offset = std::min(padded(cursor.at(), alignment), file_size_bytes);
  NVFP4_MOE_TRY(check_tiling(out.tensors, file_size_bytes - out.data_offset, alignment));
  return out;
}

}  // namespace nvfp4_moe::internal
