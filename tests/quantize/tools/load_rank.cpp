// load_rank DIR RANKS: what rank 0 of RANKS reads from storage to pack all its layers, with a cold page cache.
//
// The files' cached pages are dropped first (they must be clean), so that read_bytes of /proc/self/io counts what the
// process fetched: its experts' codes and block scales, headers, all experts' scalars, and the kernel's read-ahead.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoint/checkpoint.h"
#include "moe/layer.h"

namespace {

using namespace nvfp4_moe;

uint64_t read_bytes() {
  std::ifstream io("/proc/self/io");
  std::string key;
  uint64_t value = 0;
  while (io >> key >> value)
    if (key == "read_bytes:") return value;
  return 0;
}

uint64_t drop_cache(const std::string& directory) {
  uint64_t total = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const int file = open(entry.path().c_str(), O_RDONLY);
    if (file < 0) continue;
    fdatasync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
    if (entry.path().extension() == ".safetensors") total += entry.file_size();
  }
  return total;
}

Status load(const std::string& directory, int64_t ranks) {
  NVFP4_MOE_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(directory));
  for (const int64_t number : checkpoint.model().layers) {
    NVFP4_MOE_ASSIGN(MoeOptions options, checkpoint.layer_options(number));
    options.shared_intermediate_size = 0;
    NVFP4_MOE_ASSIGN(const MoeConfig config, MoeConfig::make(options));
    NVFP4_MOE_ASSIGN(const LayerSource source, layer_source(checkpoint, number));
    LayerOptions layer_options;
    layer_options.range = {0, options.num_experts / ranks};
    layer_options.limits.max_tokens = 1;
    NVFP4_MOE_TRY(MoeLayer::open(config, source, layer_options).status());
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || std::atoll(argv[2]) < 1) {
    std::fprintf(stderr, "usage: load_rank DIR RANKS\n");
    return 2;
  }
  const uint64_t files_bytes = drop_cache(argv[1]);
  const uint64_t before = read_bytes();
  const Status status = load(argv[1], std::atoll(argv[2]));
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 4;
  }
  std::printf("{\"ranks\": %s, \"checkpoint_bytes\": %llu, \"read_bytes\": %llu}\n", argv[2],
              static_cast<unsigned long long>(files_bytes), static_cast<unsigned long long>(read_bytes() - before));
  return 0;
}
