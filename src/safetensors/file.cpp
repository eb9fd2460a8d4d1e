// Opens a safetensors file: reads and checks the header, and nothing after it.
#include <algorithm>
#include <cstring>

#include "io/files.h"
#include "safetensors/safetensors.h"
#include "safetensors/shape.h"

namespace nvfp4_moe::internal {

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  NVFP4_MOE_TRY(file.open_descriptor(path));
  const std::string shown = printable(path, 4096);
  std::vector<std::byte> head(static_cast<size_t>(std::min<uint64_t>(file.size_bytes(), 8)));
  NVFP4_MOE_TRY(file.read(0, head.data(), head.size()));
  if (head.size() == 8) {
    uint64_t length = 0;
    std::memcpy(&length, head.data(), sizeof length);
    head.resize(static_cast<size_t>(
        std::min<uint64_t>(file.size_bytes(), 8 + std::min(length, kMaxHeaderBytes))));
    NVFP4_MOE_TRY(file.read(8, head.data() + 8, head.size() - 8));
  }
  if (is_git_lfs_pointer({reinterpret_cast<const char*>(head.data()), head.size()}))
    return git_lfs_pointer_status().in(shown);
  Result<SafetensorsHeader> header = parse_safetensors_header(head, file.size_bytes());
  if (!header.ok()) return header.status().in(shown);
  file.header_ = std::move(*header);
  file.index_names();
  return file;
}

}  // namespace nvfp4_moe::internal
