#include "exchange/nccl_library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace nvfp4_moe::internal {
namespace {

constexpr const char* kName = "libnccl.so.2";

std::string text_of_version(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string system_says() {
  const char* const text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

// Path of the library that contains the function.
std::string path_of(void* function, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

class Functions {
 public:
  Functions(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}

  template <class Function>
  Status take(const char* name, Function& function) {
    void* const found = dlsym(handle_, name);
    if (found == nullptr)
      return unsupported("nccl: " + path_ + ": expected function " + name + ", got none");
    function = reinterpret_cast<Function>(found);
    return {};
  }

 private:
  void* handle_;
  std::string path_;
};

Result<NcclLibrary> load(const std::string& asked) {
  const std::string name = asked.empty() ? kName : asked;
  // torch's copy is outside the loader's search path, but has the same name once it is loaded.
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) {
    dlerror();
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr)
    return unsupported(
        "nccl: expected " + name + " " +
        (asked.empty() ? "in this process (import torch brings one) or on the system's library path"
                       : "as the caller names it") +
        ", got none: " + system_says());
  NcclLibrary library;
  Functions functions(handle, name);
  NVFP4_MOE_TRY(functions.take("ncclGetVersion", library.get_version));
  library.path = path_of(reinterpret_cast<void*>(library.get_version), name);
  if (library.get_version(&library.version) != NcclResult::kSuccess)
    return unsupported("nccl: " + library.path + ": expected a version, got none");
  if (library.version < NcclLibrary::kLeastVersion)
    return unsupported("nccl: " + library.path + ": expected version " +
                       text_of_version(NcclLibrary::kLeastVersion) + " or later, got " +
                       text_of_version(library.version));
  functions = Functions(handle, library.path + " (" + text_of_version(library.version) + ")");
  NVFP4_MOE_TRY(functions.take("ncclGetErrorString", library.get_error_string));
  NVFP4_MOE_TRY(functions.take("ncclGetLastError", library.get_last_error));
  NVFP4_MOE_TRY(functions.take("ncclGetUniqueId", library.get_unique_id));
  NVFP4_MOE_TRY(functions.take("ncclCommInitRankConfig", library.init_rank_config));
  NVFP4_MOE_TRY(functions.take("ncclCommDestroy", library.destroy));
  NVFP4_MOE_TRY(functions.take("ncclCommAbort", library.abort));
  NVFP4_MOE_TRY(functions.take("ncclCommGetAsyncError", library.get_async_error));
  NVFP4_MOE_TRY(functions.take("ncclCommCount", library.count));
  NVFP4_MOE_TRY(functions.take("ncclCommUserRank", library.user_rank));
  NVFP4_MOE_TRY(functions.take("ncclGroupStart", library.group_start));
  NVFP4_MOE_TRY(functions.take("ncclGroupEnd", library.group_end));
  NVFP4_MOE_TRY(functions.take("ncclSend", library.send));
  NVFP4_MOE_TRY(functions.take("ncclRecv", library.recv));
  return library;
}

}  // namespace

Result<const NcclLibrary*> NcclLibrary::open(const std::string& path) {
  // Never closed: communicators and threads of NCCL may outlive the caller.
  static std::mutex& mutex = *new std::mutex;
  static auto& opened = *new std::map<std::string, NcclLibrary>;
  const std::lock_guard lock(mutex);
  const auto found = opened.find(path);
  if (found != opened.end()) return &found->second;
  NVFP4_MOE_ASSIGN(NcclLibrary library, load(path));
  return &opened.emplace(path, std::move(library)).first->second;
}

std::string NcclLibrary::version_text() const { return text_of_version(version); }

Status NcclLibrary::failure(const char* function, NcclResult result, NcclCommunicator comm) const {
  std::string text = std::string("nccl: ") + function + ": " + get_error_string(result);
  const char* const last = get_last_error(comm);
  if (last != nullptr && *last != 0) text += std::string(" (") + last + ")";
  return io_error(text);
}

}  // namespace nvfp4_moe::internal
