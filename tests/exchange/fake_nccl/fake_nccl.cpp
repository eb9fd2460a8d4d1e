// A test double of NCCL: the functions that src/exchange/nccl_library.h declares, between threads
// and processes, over files in a folder that the unique id names. Pointers are the host's or those
// of the emulator of CUDA. If the program has streams, the double waits for them.
//
// A communicator does not block: a separate thread executes a group, and the state is "in progress"
// until it is done. After fake_nccl_set("async", 1) the state is success at once, as if a device
// were still working. A message is a file, written under another name and then renamed. A rank that
// has left writes none, and the ranks that wait for it wait until they are aborted.
//
// After fake_nccl_set("graphs", 1) there are graphs that have captured the communicators. As in
// NCCL, destroy and abort wait until the graphs are gone; abort first ends the work in flight. A
// group in a stream that is being captured becomes a host function of the graph, and every replay
// calls it.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange/nccl_library.h"

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif

namespace {

using namespace nvfp4_moe::internal;
namespace fs = std::filesystem;
constexpr auto kInternalError = static_cast<NcclResult>(3);
constexpr auto kPoll = std::chrono::microseconds(200);

// Never destroyed: a thread that ends a communicator may outlive the process's exit.
std::mutex& g_mutex = *new std::mutex;
std::string& g_log = *new std::string;                                  // guarded by g_mutex
std::map<std::string, long>& g_set = *new std::map<std::string, long>;  // likewise
std::atomic<int> g_communicators{0};  // neither destroyed nor aborted yet

long setting(const char* name) {
  const std::lock_guard lock(g_mutex);
  const auto found = g_set.find(name);
  return found == g_set.end() ? 0 : found->second;
}
void note(const std::string& text) {
  const std::lock_guard lock(g_mutex);
  g_log += text + "\n";
}

// A function of CUDA's run time; null if the program has none.
template <class Function>
Function cuda(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}
void wait_for_stream(void* stream) {
  if (auto* const wait = cuda<int (*)(void*)>("cudaStreamSynchronize")) wait(stream);
}
bool is_captured(void* stream) {
  int status = 0;
  auto* const ask = cuda<int (*)(void*, int*)>("cudaStreamIsCapturing");
  return ask != nullptr && stream != nullptr && ask(stream, &status) == 0 && status == 1;
}
void copy(void* to, const void* from, size_t bytes) {
  if (auto* const device_copy = cuda<int (*)(void*, const void*, size_t, int)>("cudaMemcpy"))
    device_copy(to, from, bytes, 4);  // cudaMemcpyDefault: the direction follows from the pointers
  else
    std::memcpy(to, from, bytes);
}

// A thread's calls between ncclGroupStart and ncclGroupEnd.
struct Communicator;
struct Group {
  int depth = 0;
  Communicator* comm = nullptr;
  std::vector<std::function<void()>> sends;
  std::vector<std::function<NcclResult()>> receives;
  std::vector<void*> streams;

  NcclResult move() const {
    for (const auto& send : sends) send();
    for (const auto& receive : receives)
      if (const NcclResult result = receive(); result != NcclResult::kSuccess) return result;
    return NcclResult::kSuccess;
  }
};
thread_local Group t_group;

struct Communicator {
  fs::path folder;
  int rank = 0, world = 0;
  bool blocking = true;
  std::atomic<NcclResult> state{NcclResult::kSuccess};
  std::atomic<bool> aborted{false};
  std::vector<uint64_t> sent, received;  // (world) messages so far
  std::thread worker;
  std::deque<Group> captured;  // by graphs, which replay them while the communicator exists

  void join() {
    if (worker.joinable()) worker.join();
  }
  // Runs `work` on a thread, as NCCL would; `state` becomes its result.
  NcclResult begin(std::function<NcclResult()> work) {
    join();
    const bool at_once = setting("async") != 0;
    state = at_once ? NcclResult::kSuccess : NcclResult::kInProgress;
    worker = std::thread([this, work = std::move(work)] { state = work(); });
    if (!blocking) return at_once ? NcclResult::kSuccess : NcclResult::kInProgress;
    join();
    return state;
  }
  bool wait_until(const std::function<bool()>& there) const {
    while (!there()) {
      if (aborted) return false;
      std::this_thread::sleep_for(kPoll);
    }
    return true;
  }
  fs::path message(uint64_t number, int from, int to) const {
    return folder /
           (std::to_string(number) + "." + std::to_string(from) + "." + std::to_string(to));
  }
  void put(int to, const void* data, size_t bytes) {
    std::vector<char> text(bytes);
    copy(text.data(), data, bytes);
    const fs::path at = message(sent[static_cast<size_t>(to)]++, rank, to),
                   hidden = at.string() + ".part";
    std::ofstream(hidden, std::ios::binary).write(text.data(), static_cast<std::streamsize>(bytes));
    std::error_code ignored;
    fs::rename(hidden, at, ignored);
  }
  NcclResult take(int from, void* data, size_t bytes) {
    const fs::path at = message(received[static_cast<size_t>(from)]++, from, rank);
    if (!wait_until([&] { return fs::exists(at); })) return kInternalError;
    std::error_code gone;
    if (fs::file_size(at, gone) != bytes) return NcclResult::kInvalidUsage;
    std::vector<char> text(bytes);
    std::ifstream(at, std::ios::binary).read(text.data(), static_cast<std::streamsize>(bytes));
    if (setting("spoil") != 0) std::memset(text.data(), 0x11, bytes);
    // 4 bytes of each message from other ranks, at "spoil at" - 1.
    const auto at_byte = static_cast<size_t>(setting("spoil at"));
    const auto word = static_cast<uint32_t>(setting("spoil with"));
    if (at_byte > 0 && at_byte + 3 <= bytes && from != rank)
      std::memcpy(text.data() + at_byte - 1, &word, sizeof(word));
    copy(data, text.data(), bytes);
    fs::remove(at, gone);
    return NcclResult::kSuccess;
  }
};

NcclResult end_group() {
  Group group = std::exchange(t_group, {});
  if (group.comm == nullptr) return NcclResult::kSuccess;
  if (is_captured(group.streams.front())) {
    const auto replay = [](void* argument) {
      const auto& captured = *static_cast<Group*>(argument);
      if (captured.move() != NcclResult::kSuccess) captured.comm->state = kInternalError;
    };
    Group& kept = group.comm->captured.emplace_back(group);
    auto* const launch = cuda<int (*)(void*, void (*)(void*), void*)>("cudaLaunchHostFunc");
    return launch(group.streams.front(), replay, &kept) == 0 ? NcclResult::kSuccess
                                                             : kInternalError;
  }
  return group.comm->begin([group] {
    for (void* stream : group.streams) wait_for_stream(stream);
    if (setting("stall") != 0 && !group.comm->wait_until([] { return false; }))
      return kInternalError;
    return group.move();
  });
}

NcclResult add(NcclCommunicator comm, void* stream, std::function<void()> send,
               std::function<NcclResult()> receive) {
  const bool alone = t_group.depth == 0;
  t_group.comm = static_cast<Communicator*>(comm);
  t_group.streams.push_back(stream);
  if (send) t_group.sends.push_back(std::move(send));
  if (receive) t_group.receives.push_back(std::move(receive));
  return alone ? end_group() : NcclResult::kSuccess;
}

void forget(Communicator* comm, bool whole_folder) {
  comm->aborted = true;
  comm->join();
  while (setting("graphs") != 0) std::this_thread::sleep_for(kPoll);
  std::error_code ignored;
  fs::remove(comm->folder / ("rank." + std::to_string(comm->rank)), ignored);
  bool last = true;  // also true if some ranks of the world never got here
  for (int r = 0; r < comm->world; ++r)
    last = last && !fs::exists(comm->folder / ("rank." + std::to_string(r)));
  if (last || whole_folder) fs::remove_all(comm->folder, ignored);
  --g_communicators;
  delete comm;
}

}  // namespace

extern "C" {

// ---- called by tests
void fake_nccl_set(const char* name, long value) {
  const std::lock_guard lock(g_mutex);
  g_set[name] = value;
}
// The calls since the last time, one a line.
const char* fake_nccl_log() {
  static std::string taken;
  const std::lock_guard lock(g_mutex);
  taken = std::exchange(g_log, {});
  return taken.c_str();
}
int fake_nccl_communicators() { return g_communicators; }

// ---- NCCL's
NcclResult ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return NcclResult::kSuccess;
}
const char* ncclGetErrorString(NcclResult result) {
  constexpr const char* kTexts[] = {
      "no error",         "unhandled cuda error", "unhandled system error", "internal error",
      "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
  return kTexts[static_cast<int>(result) & 7];
}
const char* ncclGetLastError(NcclCommunicator) { return "as a test asked for"; }

NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  if (setting("fail id") != 0) return kInternalError;
  std::string path = (fs::temp_directory_path() / "fake_nccl.XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr || path.size() >= sizeof(id->bytes)) return kInternalError;
  std::memset(id->bytes, 0, sizeof(id->bytes));
  path.copy(id->bytes, path.size());
  return NcclResult::kSuccess;
}

NcclResult ncclCommInitRankConfig(NcclCommunicator* comm, int world, NcclUniqueId id, int rank,
                                  NcclConfig* config) {
  if (config->magic != 0xcafebeef || config->size < 24 || rank < 0 || rank >= world)
    return NcclResult::kInvalidArgument;
  auto* const made = new Communicator;
  ++g_communicators;
  made->folder = id.bytes;
  made->rank = rank;
  made->world = world;
  made->blocking = config->blocking != 0;
  made->sent.resize(static_cast<size_t>(world));
  made->received.resize(static_cast<size_t>(world));
  *comm = made;
  return made->begin([made] {
    if (setting("fail init") == made->rank + 1) return kInternalError;
    if (setting("stall init") == made->rank + 1 && !made->wait_until([] { return false; }))
      return kInternalError;
    const fs::path here = made->folder / ("rank." + std::to_string(made->rank));
    const int file = ::open(here.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (file < 0) return NcclResult::kInvalidUsage;  // the rank is taken
    ::close(file);
    for (int r = 0; r < made->world; ++r)
      if (!made->wait_until(
              [&] { return fs::exists(made->folder / ("rank." + std::to_string(r))); }))
        return kInternalError;
    return NcclResult::kSuccess;
  });
}

NcclResult ncclCommDestroy(NcclCommunicator comm) {
  note("destroy");
  static_cast<Communicator*>(comm)->join();
  forget(static_cast<Communicator*>(comm), false);
  return NcclResult::kSuccess;
}
NcclResult ncclCommAbort(NcclCommunicator comm) {
  note("abort");
  forget(static_cast<Communicator*>(comm), static_cast<Communicator*>(comm)->rank == 0);
  return NcclResult::kSuccess;
}
NcclResult ncclCommGetAsyncError(NcclCommunicator comm, NcclResult* state) {
  *state = setting("async error") != 0 ? NcclResult::kRemoteError
                                       : static_cast<Communicator*>(comm)->state.load();
  return NcclResult::kSuccess;
}
NcclResult ncclCommCount(NcclCommunicator comm, int* count) {
  *count = static_cast<Communicator*>(comm)->world;
  return NcclResult::kSuccess;
}
NcclResult ncclCommUserRank(NcclCommunicator comm, int* rank) {
  *rank = static_cast<Communicator*>(comm)->rank;
  return NcclResult::kSuccess;
}
NcclResult ncclGroupStart() {
  note("group start");
  ++t_group.depth;
  return NcclResult::kSuccess;
}
NcclResult ncclGroupEnd() {
  note("group end");
  return --t_group.depth == 0 ? end_group() : NcclResult::kSuccess;
}
NcclResult ncclSend(const void* data, size_t count, NcclType, int peer, NcclCommunicator comm,
                    void* stream) {
  note("send " + std::to_string(count) + " to " + std::to_string(peer));
  if (setting("fail send") != 0) return NcclResult::kInvalidUsage;
  auto* const self = static_cast<Communicator*>(comm);
  return add(comm, stream, [=] { self->put(peer, data, count); }, {});
}
#ifndef FAKE_NCCL_WITHOUT_RECV
NcclResult ncclRecv(void* data, size_t count, NcclType, int peer, NcclCommunicator comm,
                    void* stream) {
  note("recv " + std::to_string(count) + " from " + std::to_string(peer));
  auto* const self = static_cast<Communicator*>(comm);
  return add(comm, stream, {}, [=] { return self->take(peer, data, count); });
}
#endif

}  // extern "C"
