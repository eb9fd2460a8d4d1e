// safetensors files: a strict reader with system calls, and a streaming writer.
//
// Format: 8-byte little-endian header length N, N bytes of JSON, then the data. The reader refuses
// the following, with a message that names the fault and its place: N over 100 MiB or past the
// file's end, bad UTF-8, duplicate keys, deep nesting, unknown dtypes, negative or overflowing
// shapes, shape x dtype != bytes, overlaps, holes, data that does not end with the file.
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
// Parses a header; this is the fuzz target. `head` has at least the first 8 bytes of the file and
// the header. Errors are kBadInput.
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

// Writes one file: first all infos (begin/end are assigned here, in the given order), then the data
// in that order, in any number of calls. The file appears under its name only when finish()
// succeeds.
class SafetensorsWriter {
 public:
  // mode: the file's permissions, before the umask.
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          unsigned mode = kFileMode);
  Status write(std::span<const std::byte> bytes);  // the next bytes of the data section
  // Checks that all bytes were written, syncs, renames into place. `before_name` receives the hash
  // of the whole file once it is on disk, and may still prevent the rename.
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
