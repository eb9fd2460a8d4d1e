// Writes the library's files: each is complete and synced under its name, or does not exist.
//
// A file is written as PATH.nvfp4-moe.partial beside its final name, synced, renamed, and then its
// folder is synced: whatever stops the process or the machine, PATH holds the old content or the
// new. The temporary name is fixed, so that what a killed run leaves is taken by the next and never
// piles up; a lock keeps two writers apart. A failure (disk full, an I/O error) is a kIo with the
// system's reason, and removes the temporary file.
//
// Nothing but a regular file is ever replaced: a device, FIFO, socket, directory or symbolic link
// under the final name is refused before the first byte is written. Paths that a user gives go
// through output_path(), which follows a link.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"

namespace nvfp4_moe::internal {

// Permissions of a new file and of a new folder, less the umask.
inline constexpr unsigned kFileMode = 0666, kPrivateFileMode = 0600, kFolderMode = 0777;

class OutputFile {
 public:
  // kInvalidArgument if there is something that is not a regular file; kBusy while another writer
  // has it open.
  static Result<OutputFile> create(const std::string& path, unsigned mode = kFileMode);
  Status write(
      std::span<const std::byte> bytes);  // through a buffer; after a failure, that failure again
  Status sync();                          // what was written is on disk, under the temporary name
  Status set_mode(unsigned permissions);  // as chmod, also bits that the umask takes
  Status finish();                        // syncs, renames into place, syncs the folder
  OutputFile(OutputFile&&) noexcept;
  OutputFile& operator=(OutputFile&&) noexcept;
  ~OutputFile();  // an unfinished file is removed

 private:
  OutputFile();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The file that is written when a user names `path`: the path itself, or where a symbolic link
// leads, which stays. To be asked before any work: what is no regular file, a link to nothing, and
// a file or folder that may not be written are refused by name.
Result<std::string> output_path(const std::string& path);
// Whether both paths lead to one file (device and inode), or would once it is written.
bool same_file(const std::string& a, const std::string& b);

// The name under which PATH is written until it is complete.
std::string partial_path(const std::string& path);

// Whole files, in one call.
Status write_text_file(const std::string& path, std::string_view text);
Status copy_file(const std::string& from,
                 const std::string& to);  // with its permissions; `from` is not a link

// Removes a file; none there is not an error. It is gone from the disk after sync_directory().
Status remove_file(const std::string& path);
// Makes the folder and those above it; each is on disk in its own parent.
Status make_directories(const std::string& path, unsigned mode = kFolderMode);
// Puts the folder's renames, new names and unlinks on disk. File systems that sync no folders are
// taken as they are.
Status sync_directory(const std::string& directory);
Status sync_directory(int descriptor, const std::string& directory);  // of an open one

}  // namespace nvfp4_moe::internal
