// Kernels: PTX from the program's fat binaries, translated and compiled at the first launch, and
// cached by its hash.
// Long because a kernel's text, its translation and its launch share what is known of its module.
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <regex>
#include <sstream>

#include "cudart/device.h"
#include "cudart/limits.h"
#include "cudart/targets.h"
#include "cudart/translator.h"
#include "order/hooks.h"
#include "runtime/memory_map.h"

namespace ptxemu {

struct Kernel {
  Module* module;
  std::string name;
  std::string text = {};                   // the translated part of the module's text
  const KernelInfo* translations[2] = {};  // without and with calls to the checker of order
  uint64_t dynamic_limit = 49152;
  std::optional<KernelFacts> facts = {};  // once they have been read from the text
  bool non_portable_clusters = false;
};

struct Module {
  std::vector<std::string> texts;  // PTX of several architectures
  const std::string* text = nullptr;
  bool compressed = false, chosen = false;
  uint8_t* variables = nullptr;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

namespace {

std::map<const void*, Kernel*>& functions() {
  static auto* all = new std::map<const void*, Kernel*>;
  return *all;
}

struct Wrapper {
  uint32_t magic, version;
  const uint8_t* data;
};
struct EntryHead {
  uint16_t kind, attributes;
  uint32_t head_bytes;
  uint64_t bytes;
};
constexpr uint32_t kWrapperMagic = 0x466243b1, kFatbinMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;
constexpr uint64_t kCompressed = 0x2000 | 0x8000;

// FNV-1a over everything that goes into a translated kernel.
struct Hash {
  uint64_t value = 0xcbf29ce484222325ull;
  void add(const std::string& text) {
    for (const char byte : text) value = (value ^ static_cast<uint8_t>(byte)) * 0x100000001b3ull;
  }
  std::string hex() const {
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
    return text;
  }
};

std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The hash of the translator's and the headers' text: each version of the emulator has its own
// cache.
const std::string& version_hash() {
  static const std::string hash = [] {
    std::vector<std::filesystem::path> files;
    for (const char* folder : {"translator", "runtime"})
      for (const auto& entry :
           std::filesystem::recursive_directory_iterator(source_folder() / folder))
        if (entry.path().extension() == ".py" || entry.path().extension() == ".h")
          files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    Hash all;
    for (const auto& file : files) all.add(file.string() + contents(file));
#ifdef PTXEMU_PLANT
    all.add("planted" + contents(source_folder() / "runtime/planted.def"));
#endif
    return all.hex();
  }();
  return hash;
}

// The newest PTX that the device can run: PTX for one architecture (a) or family (f) runs nowhere
// else.
const std::string* newest_text(const Module& module) {
  const int cc = compute_capability();
  const std::string* newest = nullptr;
  int best = -1;
  for (const std::string& text : module.texts) {
    const Target target = target_of(text);
    const int rank = 2 * target.number + (target.suffix != 0);
    if (runs_on(target, cc) && rank > best) newest = &text, best = rank;
  }
  return newest;
}

// The key of a cached translation: the PTX text without .target, which the translator ignores. nvcc
// generates the same text for 10.0 and 12.0 for most kernels that are not specific to one of them,
// so one translation serves both.
std::string hash_of(const std::string& text) {
  const size_t begin = std::min(text.find("\n.target"), text.size()),
               end = std::min(text.find('\n', begin + 1), text.size());
  Hash hash;
  hash.add(text.substr(0, begin));
  hash.add(text.substr(end));
  hash.add(version_hash());
  return hash.hex();
}

void choose(Module* module) {
  if (module->chosen) return;
  module->chosen = true;
  if (!module->text) module->text = newest_text(*module);
}

// A module's text without its other kernels. A translation depends on nothing else, so it serves
// all architectures for which nvcc generates the same kernel.
std::string part_of_kernel(const std::string& text, const std::string& kernel) {
  std::string part;
  size_t kept = 0, entry = 0;
  while ((entry = text.find(".entry", entry)) != std::string::npos) {
    const size_t name = text.find_first_not_of(" \t\r\n", entry + 6),
                 name_end = text.find_first_of(" \t\r\n({;", name);
    size_t end = text.find_first_of("{;", entry);
    const bool declared = end < text.size() && text[end] == ';';
    // A character at a time: a module has megabytes, and each of its kernels is looked for.
    for (int depth = declared ? 0 : 1; depth > 0 && ++end < text.size();) {
      if (text[end] == '/' && text[end - 1] == '/')
        end = std::min(text.find('\n', end), text.size() - 1);
      depth += (text[end] == '{') - (text[end] == '}');
    }
    if (end >= text.size()) return text;
    if (text.compare(name, name_end - name, kernel) != 0) {
      const size_t begin = std::max(text.rfind('\n', entry) + 1, kept);
      part.append(text, kept, begin - kept);
      kept = end + 1;
    }
    entry = end + 1;
  }
  return part.append(text, kept);
}

void write_once(const std::filesystem::path& path, const std::string& text) {
  if (std::filesystem::exists(path)) return;
  const std::filesystem::path draft = path.string() + "." + std::to_string(getpid());
  std::ofstream(draft, std::ios::binary) << text;
  std::filesystem::rename(draft, path);
}

// A kernel's text as it was, or as the command PTXEMU_EDIT left it: COMMAND KERNEL FILE may edit
// the file in place.
const std::string* edited(const std::string* text, const std::string& kernel,
                          const std::filesystem::path& folder) {
  const char* edit = std::getenv("PTXEMU_EDIT");
  if (!edit || !*edit) return text;
  const std::filesystem::path draft = folder / ("edit-" + std::to_string(getpid()) + ".ptx");
  std::ofstream(draft, std::ios::binary) << *text;
  std::ostringstream command;
  command << "LD_PRELOAD= " << edit << " '" << kernel << "' '" << draft.string() << "'";
  const int status = std::system(command.str().c_str());
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) std::abort();
  const auto* after = new std::string(contents(draft));  // as long-lived as the module
  std::filesystem::remove(draft);
  return after;
}

cudaError_t load(Kernel* kernel, bool checked) {
  if (kernel->translations[checked]) return cudaSuccess;
  Module* module = kernel->module;
  choose(module);
  if (!module->text) {
    std::fprintf(
        stderr, "ptxemu: no PTX for compute capability %d.%d of %s%s\n", compute_capability() / 10,
        compute_capability() % 10, kernel->name.c_str(),
        module->compressed ? ": its fat binary is compressed (compile with --no-compress)" : "");
    return cudaErrorNoKernelImageForDevice;
  }
  const std::filesystem::path folder = cache_folder();
  std::filesystem::create_directories(folder);
  Hash name;
  name.add(kernel->name);
  const std::string* text = edited(module->text, kernel->name, folder);
  if (kernel->text.empty()) kernel->text = part_of_kernel(*text, kernel->name);
  const std::string missing = missing_feature(kernel->text, target_of(kernel->text));
  if (!missing.empty() && !planted(Fault::features_unchecked))
    return refused(cudaErrorInvalidPtx, kernel->name, missing);
  const std::string hash = hash_of(kernel->text);
  const std::filesystem::path base = folder / (hash + "-" + name.hex() + (checked ? "-order" : "")),
                              library = base.string() + ".so";
  if (!std::filesystem::exists(library)) {
    // One process translates, others wait for it.
    const int lock = open((base.string() + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666);
    if (lock < 0 || flock(lock, LOCK_EX) != 0) return cudaErrorInvalidPtx;
    const std::filesystem::path ptx = folder / (hash + ".ptx");
    write_once(ptx, kernel->text);
    const bool done =
        std::filesystem::exists(library) || translate(ptx, kernel->name, library, checked);
    close(lock);
    std::filesystem::remove(base.string() + ".lock");
    if (!done) return cudaErrorInvalidPtx;
  }
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    std::fprintf(stderr, "ptxemu: %s\n", dlerror());
    return cudaErrorInvalidPtx;
  }
  const auto* info = static_cast<const KernelInfo*>(dlsym(handle, "kernel_info"));
  kernel->translations[checked] = info;
  note_source(info, &kernel->text);
  struct ModuleVariables {
    uint64_t bytes;
    const uint8_t* initial;
  };
  const auto* variables = static_cast<const ModuleVariables*>(dlsym(handle, "module_variables"));
  if (variables && variables->bytes && !module->variables) {
    module->variables = static_cast<uint8_t*>(allocate(variables->bytes, "a module's variables"));
    if (!module->variables) return cudaErrorMemoryAllocation;
    std::memcpy(module->variables, variables->initial, variables->bytes);
  }
  return cudaSuccess;
}

uint64_t product(const uint32_t* x) { return uint64_t{x[0]} * x[1] * x[2]; }

}  // namespace

cudaError_t refused(cudaError_t error, const std::string& kernel, const std::string& why) {
  device().failure = "ptxemu: " + why + (kernel.empty() ? "" : ", in kernel " + kernel) + "\n";
  std::fputs(device().failure.c_str(), stderr);
  return error;
}

Module* add_module(const void* fatbin) {
  auto* module = new Module;
  const Wrapper& wrapper = *static_cast<const Wrapper*>(fatbin);
  const uint8_t* data =
      wrapper.magic == kWrapperMagic ? wrapper.data : static_cast<const uint8_t*>(fatbin);
  if (read<uint32_t>(data) != kFatbinMagic) return module;
  const uint64_t end = read<uint16_t>(data + 6) + read<uint64_t>(data + 8);
  for (uint64_t at = read<uint16_t>(data + 6); at + sizeof(EntryHead) <= end;) {
    const EntryHead head = read<EntryHead>(data + at);
    const uint64_t flags = read<uint64_t>(data + at + 40);
    if (head.kind == kPtx && flags & kCompressed) module->compressed = true;
    if (head.kind == kPtx && !(flags & kCompressed)) {
      std::string text(reinterpret_cast<const char*>(data + at + head.head_bytes), head.bytes);
      while (!text.empty() && text.back() == '\0') text.pop_back();
      module->texts.push_back(std::move(text));
    }
    at += head.head_bytes + head.bytes;
  }
  return module;
}

Module* add_module_text(const char* ptx) {
  auto* module = new Module;
  module->texts.emplace_back(ptx);
  module->text = &module->texts.front();
  return module;
}

void add_kernel(Module* module, const void* host_function, const char* name) {
  functions()[host_function] = find_kernel(module, name);
}

Kernel* find_kernel(Module* module, const char* name) {
  auto& kernel = module->kernels[name];
  if (!kernel) kernel = std::make_unique<Kernel>(Kernel{module, name});
  return kernel.get();
}
Kernel* find_kernel(const void* host_function) {
  const auto found = functions().find(host_function);
  return found == functions().end() ? nullptr : found->second;
}

// Read from the PTX text, so that a kernel that is never launched is never compiled.
cudaError_t kernel_facts(Kernel* kernel, KernelFacts* facts) {
  choose(kernel->module);
  if (!kernel->module->text) return cudaErrorNoKernelImageForDevice;
  if (kernel->facts) {
    *facts = *kernel->facts;
    return cudaSuccess;
  }
  const std::string& text = *kernel->module->text;
  const size_t begin = text.find(".entry " + kernel->name + "(");
  if (begin == std::string::npos) return cudaErrorInvalidDeviceFunction;
  const size_t end = std::min(text.find("\n}", begin), text.size());
  *facts = {0, 1024, target_of(text).number};
  static const std::regex threads(R"(\.(max|req)ntid (\d+)(?:, (\d+), (\d+))?)"),
      shared(R"(\.shared \.align (\d+) \.b8 \w+\[(\d+)\])");
  const std::string body = text.substr(begin, end - begin);
  std::smatch match;
  const std::string head = body.substr(0, body.find('{'));
  if (std::regex_search(head, match, threads))
    facts->max_threads =
        static_cast<uint32_t>(std::stoul(match[2]) *
                              (match[3].matched ? std::stoul(match[3]) * std::stoul(match[4]) : 1));
  for (std::sregex_iterator it(body.begin(), body.end(), shared), last; it != last; ++it) {
    const uint32_t align = static_cast<uint32_t>(std::stoul((*it)[1]));
    facts->static_shared_bytes = (facts->static_shared_bytes + align - 1) / align * align +
                                 static_cast<uint32_t>(std::stoul((*it)[2]));
  }
  kernel->facts = *facts;
  return cudaSuccess;
}

cudaError_t set_dynamic_shared(Kernel* kernel, int bytes) {
  if (bytes < 0 || bytes > attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin))
    return cudaErrorInvalidValue;
  kernel->dynamic_limit = static_cast<uint64_t>(bytes);
  return cudaSuccess;
}

void allow_non_portable_clusters(Kernel* kernel, bool allowed) {
  kernel->non_portable_clusters = allowed;
}

cudaError_t launch(Kernel* kernel, const LaunchShape& shape, void** arguments,
                   cudaStream_t stream) {
  if (forked()) return cudaErrorInitializationError;
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  const bool checked = asked_to_check();
  const cudaError_t loaded = load(kernel, checked);
  if (loaded != cudaSuccess) return loaded;
  const KernelInfo& info = *kernel->translations[checked];
  const uint64_t threads = product(shape.block),
                 allowed = info.max_threads[0] ? product(info.max_threads) : 1024;
  if (product(shape.grid) == 0 || threads == 0 || threads > 1024 || shape.block[2] > 64 ||
      threads > allowed || shape.grid[1] > 65535 || shape.grid[2] > 65535 ||
      shape.grid[0] > 0x7fffffffu)
    return cudaErrorInvalidConfiguration;
  const uint64_t shared_bytes = info.static_shared_bytes + shape.dynamic_shared_bytes;
  if (shape.dynamic_shared_bytes > kernel->dynamic_limit ||
      shared_bytes > static_cast<uint64_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)))
    return cudaErrorInvalidValue;
  Launch launch;
  launch.kernel = &info;
  launch.checked = checked;
  for (int axis = 0; axis < 3; ++axis) {
    launch.grid[axis] = shape.grid[axis];
    launch.block[axis] = shape.block[axis];
    launch.cluster[axis] = shape.cluster[0]  ? shape.cluster[axis]
                           : info.cluster[0] ? info.cluster[axis]
                                             : 1;
    if (launch.cluster[axis] == 0 || launch.grid[axis] % launch.cluster[axis])
      return cudaErrorInvalidConfiguration;
  }
  const std::string why =
      launch_refusal({info, kernel->text, kernel->non_portable_clusters}, shape, launch.cluster);
  if (!why.empty())
    return refused(
        product(launch.cluster) > 1 ? cudaErrorInvalidClusterSize : cudaErrorInvalidConfiguration,
        kernel->name, why);
  launch.explicit_cluster = shape.cluster[0] || info.cluster[0];
  launch.dynamic_shared_bytes = static_cast<uint32_t>(shape.dynamic_shared_bytes);
  const uint64_t resident =
      static_cast<uint64_t>(resident_ctas(static_cast<uint32_t>(threads), shared_bytes)) *
      static_cast<uint64_t>(multiprocessors());
  if (shape.cooperative && product(shape.grid) > resident)
    return cudaErrorCooperativeLaunchTooLarge;
  launch.resident_clusters =
      static_cast<uint32_t>(std::max<uint64_t>(1, resident / product(launch.cluster)));
  launch.variables = kernel->module->variables;
  launch.programmatic = shape.programmatic;
  launch.arguments.assign(info.parameter_bytes + 16, 0);
  for (uint32_t i = 0; i < info.parameter_count; ++i)
    std::memcpy(launch.arguments.data() + info.offsets[i], arguments[i], info.sizes[i]);
  return device().enqueue(stream, std::move(launch));
}

}  // namespace ptxemu
