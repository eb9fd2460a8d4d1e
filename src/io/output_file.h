// Writes the library's files: each is complete and synced under its name, or does not exist.
//
// A file is written as PATH.nvfp4-moe.partial next to its final name, synced and renamed, and then
// its folder is synced. If the process or the machine stops at any time, PATH has the old content
// or the new. The temporary name is fixed, so a rerun replaces the file of a killed run and no
// files pile up. A lock keeps two writers apart. A failure (disk full, an I/O error) is a kIo with
// the system's reason, and removes the temporary file.
//
// Only regular files are ever replaced: a device, FIFO, socket, directory or symbolic link under
// the final name is refused before the first byte is written. Paths from a user go through
// output_path(), which follows a link.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"

namespace nvfp4_moe::internal {

// Permissions of a new file and of a new folder, before the umask.
inline constexpr unsigned kFileMode = 0666, kPrivateFileMode = 0600, kFolderMode = 0777;

class OutputFile {
 public:
  // kInvalidArgument if the path exists and is not a regular file; kBusy while another writer has
  // it open.
  static Result<OutputFile> create(const std::string& path, unsigned mode = kFileMode);
  Status write(
      std::span<const std::byte> bytes);  // through a buffer; after a failure, returns it again
  Status sync();                          // makes written bytes durable, under the temporary name
  Status set_mode(unsigned permissions);  // like chmod, not limited by the umask
  Status finish();                        // syncs, renames into place, syncs the folder
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) noexcept;
  ~OutputFile();  // an unfinished file is removed

 private:
  OutputFile();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the file to write if a user names `path`: the path itself, or the target of a symbolic
// link, which is kept. Call it before any work: anything that is not a regular file, a dangling
// link, and a file or folder without write permission are refused by name.
Result<std::string> output_path(const std::string& path);
// Whether both paths lead to one file (device and inode), or will once it is written.
bool same_file(const std::string& a, const std::string& b);

// The name under which PATH is written until it is complete.
std::string partial_path(const std::string& path);

// Write a whole file in one call.
Status write_text_file(const std::string& path, std::string_view text);
Status copy_file(const std::string& from,
                 const std::string& to);  // with its permissions; `from` is not a link

// Removes a file. A missing file is not an error. The removal is durable after sync_directory().
Status remove_file(const std::string& path);
// Makes the folder and its parents. Each is durable in its own parent.
Status make_directories(const std::string& path, unsigned mode = kFolderMode);
// Makes the folder's renames, new names and unlinks durable. File systems that do not sync folders
// are accepted.
Status sync_directory(const std::string& directory);
Status sync_directory(int descriptor, const std::string& directory);  // the same for an open one

}  // namespace nvfp4_moe::internal
