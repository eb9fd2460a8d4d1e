// The folder of a packed cache: which entries are trusted, and who may read new ones.
//
// An entry is trusted if only this user and root can have written it:
//   - The folder belongs to one of them, and others may not write to it. The exception is a folder
//     with the sticky bit (/tmp, an emptyDir): others may add files of their own there, but not
//     touch those of this user.
//   - The file belongs to one of them, and only its owner may write to it.
//
// A group counts as others, since its members cannot be known. Both checks use the descriptors that
// are read from afterwards, and names are resolved in the open folder. So parent folders need no
// check: renaming one only makes this process open another folder, which is checked the same way.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "safetensors/tensor_file.h"

namespace nvfp4_moe::internal {

class CacheFolder {
 public:
  // Creates the folder if it does not exist, with `mode` before the umask. kBadInput, with what to
  // do, if others may have written to it; kIo if it cannot be created or opened.
  static Result<CacheFolder> open(const std::string& path, mode_t mode = 0755);
  CacheFolder(CacheFolder&& other) noexcept;
  CacheFolder& operator=(CacheFolder&&) = delete;
  ~CacheFolder();

  int descriptor() const { return folder_; }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const;  // its path, for messages

 private:
  CacheFolder(std::string path, int folder) : path_(std::move(path)), folder_(folder) {}
  std::string path_;
  int folder_;
};

// kBadInput if others may have written the open entry. shown: its path, printable.
Status check_cache_owner(const std::string& shown, const struct stat& facts);

// Whether everybody may read these files, including search permission on every parent folder. If
// not, entries made from them are readable by this user only. Group permissions cannot be kept,
// since an entry may belong to another group than the files.
bool readable_by_everybody(const std::vector<std::unique_ptr<TensorFile>>& files);

// Part files of the packed cache: entries that are being written, next to their final names.
//
// A writer holds a lock (flock) on its part file until it closes the file. The system releases the
// lock when the process ends, so if the lock is free, the writer is gone, even if its pid is in use
// again. If locks are not visible (a network file system with writers on other hosts, or an earlier
// boot), a part file is kept until nobody has written to it for an hour. If a slow writer's part
// file is removed, that writer loses only its cache entry: its rename fails, and its layer stays
// usable.
class CachePart {
 public:
  // NAME.<boot>-<process>-<count>.part in the folder, which must outlive this object. Created with
  // `mode` before the umask, and locked. The file must not exist before, not even as a link.
  static Result<CachePart> create(const CacheFolder& folder, const std::string& name, mode_t mode);
  CachePart(CachePart&& other) noexcept;
  CachePart& operator=(CachePart&&) = delete;
  ~CachePart();  // removes a part file that has not been renamed

  int descriptor() const { return file_; }
  std::string path() const { return folder_->file(name_); }
  Status rename_to(const std::string& name);  // within the folder; syncs file and folder

 private:
  explicit CachePart(const CacheFolder& folder) : folder_(&folder) {}
  const CacheFolder* folder_;
  std::string name_;
  int file_ = -1;
};

// Removes the folder's part files whose writers are gone, and returns their number. Files that
// cannot be read stay. end: the end of the final names and a point; other part files stay too.
int sweep_cache_parts(const CacheFolder& folder, const std::string& end = ".packed.");

}  // namespace nvfp4_moe::internal
