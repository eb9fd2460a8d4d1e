// Part files of the packed cache: what is being written, beside the name that it will get.
//
// A writer holds a lock (flock) on its part file until the file is closed; the system drops the lock with the process,
// so a lock that can be had means a writer that is gone, whatever process has its number now. Where locks do not reach
// (a network file system that other hosts write, or a boot before this one), a part file is left alone until nobody has
// written to it for an hour. A part file that is removed under a slow writer costs that writer its entry, no more: its
// rename fails, and the layer is used as it was packed.
#pragma once

#include <string>

#include "core/status.h"
#include "moe/cache_folder.h"

namespace nvfp4_moe {

class CachePart {
 public:
  // NAME.<boot>-<process>-<count>.part in the folder, which outlives it; created with `mode` less the umask, and
  // locked. Not there before, not a link.
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

// Removes the part files of the folder whose writers are gone; how many. What cannot be looked at is left.
int sweep_cache_parts(const CacheFolder& folder);

}  // namespace nvfp4_moe
