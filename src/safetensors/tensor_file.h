// A file of tensors of any kind that is open for reading: the location of each tensor, and reads by
// system calls.
//
// Kinds: safetensors (safetensors.h), GGUF (gguf/gguf.h). Files are read by system calls and never
// mapped, so that a truncated file or a failing disk is a Status. Through a mapping it would be a
// SIGBUS, which a library cannot catch without replacing its host's handler.
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

namespace nvfp4_moe::internal {

// A type of ggml: elements are stored in blocks along the last axis, and a block has its scales
// next to its codes.
struct BlockType {
  std::string_view name;   // "NVFP4"
  int64_t elems = 0;       // of one block
  int64_t size_bytes = 0;  // of one block
};

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape = {};  // elements, also of F4 and of blocks
  uint64_t begin = 0;               // bytes from the start of the data section
  uint64_t end = 0;
  const BlockType* blocks = nullptr;  // set if elements are stored in blocks: dtype is then U8
  uint64_t size_bytes() const { return end - begin; }
};
std::string shape_string(std::span<const int64_t> shape);  // "(1536, 448)"
std::string describe(const TensorInfo& info);  // "(1536, 448) F8_E4M3", "(8, 64, 128) NVFP4"

// A header's facts about the data after it.
struct TensorTable {
  std::vector<TensorInfo> tensors;  // by begin
  uint64_t data_offset = 0;         // of the data section in the file
};

class TensorFile {
 public:
  virtual ~TensorFile();
  TensorFile& operator=(const TensorFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return table().tensors; }
  uint64_t data_offset() const { return table().data_offset; }
  const TensorInfo* find(std::string_view name) const;
  // The tensor's offset in the file.
  uint64_t offset(const TensorInfo& info) const { return data_offset() + info.begin; }
  // Copies [offset, offset + size) of the file. kIo if the file was truncated, or the disk reports
  // an error. Raises no signal.
  Status read(uint64_t offset, void* to, size_t size_bytes) const;
  // kIo if the file's size or time of modification has changed since it was opened. If another file
  // has taken its name, the opened one still counts as unchanged.
  Status check_unchanged() const;
  int descriptor() const { return fd_; }  // for fstat
  // Asks the system to fetch [offset, offset + size) of the file from storage, because it will be
  // read soon. Does not wait. Without this, each read fetches only its own bytes, and waits for
  // them. Read-ahead (megabytes, on servers) around each of the scalars of all experts would also
  // fetch the other ranks' experts. This is advice only: without it, reads return the same bytes,
  // one place after the other if the cache is cold.
  void prefetch(uint64_t offset, size_t size_bytes) const;
  uint64_t size_bytes() const { return size_bytes_; }

 protected:
  TensorFile() = default;
  TensorFile(TensorFile&&) noexcept;
  TensorFile& operator=(TensorFile&&) noexcept;
  Status open_descriptor(const std::string& path);
  void index_names();  // call it once the table is set
  virtual const TensorTable& table() const = 0;

 private:
  std::string path_;
  std::map<std::string, size_t, std::less<>> by_name_;
  uint64_t size_bytes_ = 0;
  int64_t modified_ns_ = 0;
  int fd_ = -1;
};

// The tensors of a checkpoint over its files, by name.
class TensorIndex {
 public:
  struct Ref {
    const TensorFile* file = nullptr;
    const TensorInfo* info = nullptr;
  };
  // Names of tensors in the files that model.safetensors.index.json leaves out: copies of those
  // that it has in another shard, and tensors that it does not name. Sorted.
  struct LeftOut {
    std::vector<std::string> superseded;
    std::vector<std::string> unindexed;
  };
  // Opens a directory of safetensors (model.safetensors.index.json with its shards, or every
  // *.safetensors in it), or one file.
  static Result<TensorIndex> open(const std::string& path);
  // Makes an index of files of one kind in `directory`. kBadInput if two of them have a tensor of
  // the same name.
  static Result<TensorIndex> of(std::string directory,
                                std::vector<std::unique_ptr<TensorFile>> files);
  // nullptr info if there is no such tensor. Refs stay valid when the index is moved.
  Ref find(std::string_view name) const;
  const std::map<std::string, Ref, std::less<>>& tensors() const { return tensors_; }
  const std::vector<std::unique_ptr<TensorFile>>& files() const { return files_; }
  const LeftOut& left_out() const { return left_out_; }
  // Why find() returns nothing for this name: "no such tensor", or that the model's index does not
  // name it.
  std::string_view absence(std::string_view name) const;
  const std::string& directory() const { return directory_; }
  uint64_t size_bytes() const;

 private:
  // is_read: which tensors of the file the index has; null: all.
  Status add(std::unique_ptr<TensorFile> file,
             const std::function<bool(const std::string&)>& is_read = nullptr);
  std::string directory_;
  std::vector<std::unique_ptr<TensorFile>> files_;
  std::map<std::string, Ref, std::less<>> tensors_;
  LeftOut left_out_;
};

}  // namespace nvfp4_moe::internal
