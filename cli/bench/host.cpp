#include "cli/bench/host.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string_view>
#include <thread>

#include "io/files.h"

namespace nvfp4_moe::internal::cli {
namespace {

// Names in /proc/cpuinfo: x86 flags and aarch64 features.
constexpr std::array<std::string_view, 22> kInstructionSets = {
    "sse4_2",      "avx",      "f16c",     "fma",        "avx2",        "avx_vnni",
    "avx512f",     "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",   "asimd",       "asimddp",
    "i8mm",        "bf16",     "sve",      "sve2"};

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return trimmed(line);
}

// The value of the first "key : value" line of a file.
std::string value_of(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon != std::string::npos && trimmed(line.substr(0, colon)) == key)
      return trimmed(line.substr(colon + 1));
  }
  return "";
}

void read_limits(HostFacts& host) {
  const std::string memory = first_line("/sys/fs/cgroup/memory.max");
  if (!memory.empty() && memory != "max")
    host.memory_limit_bytes = std::strtoull(memory.c_str(), nullptr, 10);
  std::istringstream cpu(first_line("/sys/fs/cgroup/cpu.max"));  // "200000 100000" or "max 100000"
  double quota = 0, period = 0;
  if (cpu >> quota >> period && period > 0) host.cpu_limit_cores = quota / period;
}

}  // namespace

bool on_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (!folder.empty() && access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

HostFacts read_host() {
  HostFacts host;
  host.cpu = value_of("/proc/cpuinfo", "model name");
  utsname names{};
  if (uname(&names) == 0) {
    host.system = fmt::format("{} {} {}", names.sysname, names.release, names.machine);
    if (host.cpu.empty()) host.cpu = names.machine;  // aarch64 kernels list part numbers, no models
  }
  cpu_set_t set;
  CPU_ZERO(&set);
  host.threads = sched_getaffinity(0, sizeof set, &set) == 0
                     ? CPU_COUNT(&set)
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page_bytes > 0)
    host.memory_bytes = static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes);
  std::istringstream available(value_of("/proc/meminfo", "MemAvailable"));  // "23518092 kB"
  if (uint64_t kilobytes = 0; available >> kilobytes) host.memory_available_bytes = kilobytes << 10;
  read_limits(host);

  std::string flags = value_of("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = value_of("/proc/cpuinfo", "Features");
  std::istringstream words(flags);
  std::vector<std::string> seen;
  for (std::string word; words >> word;) seen.push_back(word);
  for (const std::string_view name : kInstructionSets) {
    if (std::find(seen.begin(), seen.end(), name) != seen.end())
      host.instruction_sets.emplace_back(name);
  }
  return host;
}

std::vector<GpuFacts> read_gpus() {
  std::vector<GpuFacts> gpus;
  // Tries the driver's tool first, because it reports the memory. It may hang if the driver is
  // broken, hence `timeout`.
  if (on_path("nvidia-smi") && on_path("timeout")) {
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(
        popen("timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total "
              "--format=csv,noheader 2>/dev/null",
              "r"),
        pclose);
    std::array<char, 512> line{};
    while (pipe != nullptr &&
           std::fgets(line.data(), static_cast<int>(line.size()), pipe.get()) != nullptr) {
      std::istringstream fields(line.data());
      GpuFacts gpu;
      std::getline(fields, gpu.name, ',');
      std::getline(fields, gpu.driver, ',');
      std::getline(fields, gpu.memory, ',');
      gpu = {trimmed(gpu.name), trimmed(gpu.driver), trimmed(gpu.memory)};
      if (!gpu.driver.empty()) gpus.push_back(gpu);
    }
  }
  if (!gpus.empty()) return gpus;
  const std::string version = value_of("/proc/driver/nvidia/version", "NVRM version");
  const std::string folder = "/proc/driver/nvidia/gpus";
  const Result<std::vector<std::string>> names = list_directory(folder);  // none without the driver
  for (const std::string& name : names.ok() ? *names : std::vector<std::string>())
    gpus.push_back({value_of(folder + "/" + name + "/information", "Model"), version, ""});
  return gpus;
}

}  // namespace nvfp4_moe::internal::cli
