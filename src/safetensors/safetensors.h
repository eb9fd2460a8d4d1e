// safetensors files: a strict reader over a memory map, and a streaming writer.
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
  // Borrowed until the file is destroyed. For tools: a byte that is gone when it is touched is a SIGBUS. Reading faults pages in; nothing is read before. Any alignment: the format
  // asks for none, so wider elements are read with memcpy.
  const std::byte* data(const TensorInfo& info) const;
  // Asks the system to fetch [data, data + size) from storage, because it is about to be read. Nothing is read ahead of
  // the pages touched without it: read-ahead (megabytes, on servers) around each of the scalars of all experts would
  // fetch the other ranks' experts too. Reading without it is correct, and slow from a cold cache.
  void prefetch(const std::byte* data, size_t size_bytes) const;
  // Tells the system that [data, data + size) will not be needed again, so that its pages leave this process. Pages
  // at the edges go too: the mapping is read-only, so a neighbour that is still read only faults its page in again.
  void release(const std::byte* data, size_t size_bytes) const;
  uint64_t size_bytes() const { return size_bytes_; }
  // Bytes of the mapping that are resident in this process now: its Rss in /proc/self/smaps (mincore tells about the
  // page cache that all processes share). The kernel maps up to 16 pages around a fault, so this may count a little
  // more than what was read. For tests and reports: reading smaps takes the longer the more the process has mapped.
  uint64_t resident_bytes() const;

  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

 private:
  SafetensorsFile() = default;
  std::string path_;
  SafetensorsHeader header_;
  std::map<std::string, size_t, std::less<>> by_name_;
  std::byte* map_ = nullptr;
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
    const std::byte* data() const { return file->data(*info); }
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
