// safetensors files: a strict reader by system calls, and a streaming writer.
//
// Format: 8-byte little-endian header length N, N bytes of JSON, then the data. The reader refuses,
// with one line that says what and where: N over 100 MiB or past the file's end, bad UTF-8,
// duplicate keys, deep nesting, unknown dtypes, negative or overflowing shapes, shape x dtype !=
// bytes, overlaps, holes, data that does not end with the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "io/content_hash.h"
#include "io/output_file.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

struct SafetensorsHeader : TensorTable {
  std::map<std::string, std::string> metadata;
};
// `head` holds at least the first 8 bytes of the file and the header. Errors are kBadInput. The
// fuzz target.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> head,
                                                   uint64_t file_size_bytes);

class SafetensorsFile : public TensorFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  const SafetensorsHeader& header() const { return header_; }

 private:
  SafetensorsFile() = default;
  const TensorTable& table() const override { return header_; }
  SafetensorsHeader header_;
};

// Writes one file: all infos first (begin/end are assigned here, in the given order), then the data
// in that order, in as many calls as the caller likes. The file appears under its name only when
// finish() succeeds.
class SafetensorsWriter {
 public:
  // mode: the file's permissions, less the umask.
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          unsigned mode = kFileMode);
  Status write(std::span<const std::byte> bytes);  // the next bytes of the data section
  // Checks that all bytes came, syncs, renames into place. `before_name` gets the hash of the whole
  // file once that is on disk, and may still keep it from its name.
  Status finish(const std::function<Status(const ContentHash&)>& before_name = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // an unfinished file is removed

 private:
  SafetensorsWriter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nvfp4_moe::internal
