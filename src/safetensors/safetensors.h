// safetensors files: a strict reader by system calls, and a streaming writer.
//
// Format: 8-byte little-endian header length N, N bytes of JSON, then the data. The reader refuses, with one line that
// says what and where: N over 100 MiB or past the file's end, bad UTF-8, duplicate keys, deep nesting, unknown dtypes,
// negative or overflowing shapes, shape x dtype != bytes, overlaps, holes, data that does not end with the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"
#include "safetensors/content_hash.h"

namespace nvfp4_moe {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape = {};  // F4 counts elements
  uint64_t begin = 0;               // bytes from the start of the data section
  uint64_t end = 0;
  uint64_t size_bytes() const { return end - begin; }
};
std::string shape_string(std::span<const int64_t> shape);  // "(1536, 448)"
std::string describe(const TensorInfo& info);              // "(1536, 448) F8_E4M3"

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by begin
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // of the data section in the file
};
// `head` holds at least the first 8 bytes of the file and the header. Errors are kBadInput. The fuzz target.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const std::byte> head, uint64_t file_size_bytes);

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  const TensorInfo* find(std::string_view name) const;
  // Where the tensor's bytes begin in the file.
  uint64_t offset(const TensorInfo& info) const { return header_.data_offset + info.begin; }
  // Copies [offset, offset + size) of the file. kIo where the file has been cut, or the disk gives an error: no signal.
  Status read(uint64_t offset, void* to, size_t size_bytes) const;
  // kIo where the file's size or time of modification is not what it was when it was opened. A file that was replaced
  // under its name is still the one that was opened, and unchanged.
  Status check_unchanged() const;
  int descriptor() const { return fd_; }  // for fstat
  // Asks the system to fetch [offset, offset + size) of the file from storage, because it is about to be read, and does
  // not wait for it. Without this nothing is fetched but what a read asks for, and that while the read waits: read-ahead
  // (megabytes, on servers) around each of the scalars of all experts would fetch the other ranks' experts too. Advice
  // only: reading without it gives the same bytes, one place after the other from a cold cache.
  void prefetch(uint64_t offset, size_t size_bytes) const;
  uint64_t size_bytes() const { return size_bytes_; }

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

 private:
  SafetensorsFile() = default;
  std::string path_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> by_name_;
  uint64_t size_bytes_ = 0;
  int64_t modified_ns_ = 0;
  int fd_ = -1;
};

// Writes one file: all infos first (begin/end are assigned here, in the given order), then the data in that order,
// in as many calls as the caller likes. The file appears under its name only when finish() succeeds.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata);
  Status write(std::span<const std::byte> bytes);  // the next bytes of the data section
  // Checks that all bytes came, syncs, renames into place. `before_name` gets the hash of the whole file once that is
  // on disk, and may still keep it from its name.
  Status finish(const std::function<Status(const ContentHash&)>& before_name = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();  // an unfinished file is removed

 private:
  SafetensorsWriter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A checkpoint directory (model.safetensors.index.json with its shards, or every *.safetensors in it), or one file.
class TensorIndex {
 public:
  struct Ref {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* info = nullptr;
  };
  static Result<TensorIndex> open(const std::string& path);
  // nullptr info where there is no such tensor. Refs stay valid when the index is moved.
  Ref find(std::string_view name) const;
  const std::map<std::string, Ref, std::less<>>& tensors() const { return tensors_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  const std::string& directory() const { return directory_; }
  uint64_t size_bytes() const;

 private:
  std::string directory_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Ref, std::less<>> tensors_;
};

}  // namespace nvfp4_moe
