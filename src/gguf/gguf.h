// GGUF files, llama.cpp's: a strict reader of versions 2 and 3, little-endian.
//
// Format: "GGUF", version, numbers of tensors and of metadata pairs; the pairs (key, type, value);
// the tensors (name, dimensions, ggml type, offset); padding; the data, each tensor padded to
// general.alignment.
//
// The reader refuses the following, with a message that names the fault and its place: other
// versions and byte orders, lengths and counts beyond the file, keys or tensors that occur twice,
// bad UTF-8 in names, types of unknown size, dimensions that overflow or are not a multiple of the
// block, overlaps, holes, data that does not end with the file.
//
// A model is one file, or is split into NAME-00001-of-0000N.gguf; the first one has the metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/status.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

// Description of a long text, or of a long or textual array (vocabularies, chat templates). Nothing
// here needs their contents.
struct GgufSkipped {
  std::string_view type;  // "string", "array of string"
  uint64_t count = 0;     // bytes of the text, or elements
};
using GgufValue = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>,
                               std::vector<double>, GgufSkipped>;
std::string describe(const GgufValue& value);  // "an array of 3 integers", "128", for messages

using GgufMetadata = std::map<std::string, GgufValue, std::less<>>;

struct GgufHeader : TensorTable {
  GgufMetadata metadata;
};
// Parses a header; this is the fuzz target. `head` has the file's first bytes. Errors are
// kBadInput, and kUnsupported for another version, byte order or type. If head ends within the
// header and the file does not, *more_needed is set to true, too.
Result<GgufHeader> parse_gguf_header(std::span<const std::byte> head, uint64_t file_size_bytes,
                                     bool* more_needed = nullptr);

class GgufFile : public TensorFile {
 public:
  static Result<GgufFile> open(const std::string& path);
  const GgufHeader& header() const { return header_; }

 private:
  GgufFile() = default;
  const TensorTable& table() const override { return header_; }
  GgufHeader header_;
};

struct GgufModel {
  TensorIndex index;
  GgufMetadata metadata;  // of the first file
};
// Whether to open `path` as GGUF: a file whose first bytes or name are GGUF's, or a directory with
// such names and no safetensors.
Result<bool> is_gguf(const std::string& path);
// Opens a file, with the other parts next to it if its name marks it as one part of several; or a
// directory with one model. Files mmproj*.gguf, which have an image encoder, are left out.
Result<GgufModel> open_gguf(const std::string& path);

// ggml's type of this number; nullptr if its size is not known here. There is one object per type,
// so pointers may be compared. Types of whole elements (F32, I8, ...) are blocks of one.
const BlockType* ggml_type(uint32_t number);
const BlockType*
ggml_nvfp4();  // 64 elements: 4 scales UE4M3, then for each 16 elements 8 bytes of codes
const BlockType* ggml_mxfp4();  // 32 elements: one scale E8M0, then 16 bytes of codes

}  // namespace nvfp4_moe::internal
