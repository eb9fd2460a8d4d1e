// The folder of a packed cache: whose entries are believed, and who may read those that are
// written.
//
// An entry is believed if nobody but this user and root can have written it:
//   - The folder belongs to one of them, and others may not write to it. The exception is a folder
//     with the sticky bit (/tmp, an emptyDir): others may add files of their own there, but not
//     touch those of this user.
//   - The file belongs to one of them, and its owner only may write it.
// A group counts as others, since nobody can tell who is in it. Both checks read the descriptors
// that are used afterwards, and names are looked up in the open folder. So the folders above need
// no check: whoever renames them gives this process another folder, which is checked in the same
// way.
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
  // Makes the folder if it is not there, with `mode` less the umask. kBadInput, with what to do, if
  // others may have written to it; kIo if it cannot be made or opened.
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

// kBadInput if the open entry can have been written by others. shown: its path, printable.
Status check_cache_owner(const std::string& shown, const struct stat& facts);

// Whether everybody may read these files, which includes searching every folder above. Entries that
// are made from others are this user's only: a group's rights cannot be kept, since an entry may
// get another group than the files have.
bool readable_by_everybody(const std::vector<std::unique_ptr<TensorFile>>& files);

// Part files of the packed cache: entries that are being written, next to their final names.
//
// A writer holds a lock (flock) on its part file until the file is closed; the system drops the
// lock with the process, so a lock that can be had means a writer that is gone, whatever process
// has its number now. If locks do not reach (a network file system that other hosts write, or a
// boot before this one), a part file is left alone until nobody has written to it for an hour. A
// part file that is removed under a slow writer costs that writer its entry, no more: its rename
// fails, and the layer is used as it was packed.
class CachePart {
 public:
  // NAME.<boot>-<process>-<count>.part in the folder, which outlives it; created with `mode` less
  // the umask, and locked. Not there before, not a link.
  static Result<CachePart> create(const CacheFolder& folder, const std::string& name, mode_t mode);
  CachePart(CachePart&& other) noexcept;
  CachePart& operator=(CachePart&&) = delete;
  ~CachePart();  // removes a part that has not been renamed

  int descriptor() const { return file_; }
  std::string path() const { return folder_->file(name_); }
  Status rename_to(const std::string& name);  // within the folder; syncs file and folder

 private:
  explicit CachePart(const CacheFolder& folder) : folder_(&folder) {}
  const CacheFolder* folder_;
  std::string name_;
  int file_ = -1;
};

// Removes the part files of the folder whose writers are gone; how many. What cannot be read is
// left.
int sweep_cache_parts(const CacheFolder& folder);

}  // namespace nvfp4_moe::internal
