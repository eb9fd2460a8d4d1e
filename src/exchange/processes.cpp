#include "exchange/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>

#include "core/boot_id.h"

namespace nvfp4_moe::internal {

// Written by its rank, read by the others. `state` is stored last.
struct RankProcesses::Page {
  static constexpr uint32_t kHere = 0x56345045, kWrites = kHere + 1, kGaveUp = kHere + 2,
                            kLeft = kHere + 3;
  std::atomic<uint32_t> state{kHere};
  SentStatus<504> failure;
};

namespace {

// A rank's process, as sent to the other ranks.
struct ProcessIdentity {
  char host[56] = {};       // boot id and the inode of the pid namespace
  uint64_t start_time = 0;  // distinguishes a reused pid
  int32_t pid = 0;
  int32_t page_fd = -1;
};

constexpr Timeout kPollInterval{500};

Status cannot_poll(const std::string& why) { return unsupported("processes: " + why); }

// Reads the start of a small file under /proc with system calls, so that a failure has a reason.
Result<std::string> read_proc(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  char text[1024];
  const ssize_t size = file < 0 ? -1 : ::read(file, text, sizeof(text));
  const int error = errno;
  if (file >= 0) ::close(file);
  if (size < 0) return cannot_poll("expected " + path + ", got " + std::strerror(error));
  return std::string(text, static_cast<size_t>(size));
}

// Returns a field of /proc/PID/stat, from the third on.
Result<std::string> stat_field(int32_t pid, int wanted) {
  NVFP4_MOE_ASSIGN(const std::string text, read_proc("/proc/" + std::to_string(pid) + "/stat"));
  // the process name may contain anything
  std::istringstream fields(text.substr(std::min(text.rfind(')'), text.size() - 1) + 1));
  std::string field;
  for (int number = 3; number <= wanted; ++number) fields >> field;
  return field;
}

// When the process started, in clock ticks.
Result<uint64_t> start_time_of(int32_t pid) {
  NVFP4_MOE_ASSIGN(const std::string field, stat_field(pid, 22));
  return static_cast<uint64_t>(std::strtoull(field.c_str(), nullptr, 10));
}

bool is_stopped(int32_t pid) {
  const Result<std::string> state = stat_field(pid, 3);
  return state.ok() && *state == "T";
}

Result<ProcessIdentity> this_process(int page_fd) {
  ProcessIdentity mine;
  const Result<std::string> boot = boot_id();
  if (!boot.ok()) return cannot_poll(boot.status().message());
  std::string host = *boot;
  struct stat numbers {};
  if (::stat("/proc/self/ns/pid", &numbers) == 0) host += "/" + std::to_string(numbers.st_ino);
  host.copy(mine.host, sizeof(mine.host) - 1);
  mine.pid = ::getpid();
  NVFP4_MOE_ASSIGN(mine.start_time, start_time_of(mine.pid));
  mine.page_fd = page_fd;
  return mine;
}

}  // namespace

Status RankProcesses::make_page() {
  page_fd_ = ::memfd_create("nvfp4_moe_rank", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  void* memory = MAP_FAILED;
  if (page_fd_ >= 0 && ::ftruncate(page_fd_, sizeof(Page)) == 0 &&
      ::fcntl(page_fd_, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
    memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, page_fd_, 0);
  if (memory == MAP_FAILED)
    return cannot_poll(std::string("expected a page of memory, got ") + std::strerror(errno));
  page_ = new (memory) Page;
  return {};
}

Status RankProcesses::open_other(int rank, int32_t pid, uint64_t start_time, int32_t page_fd) {
  const std::string process = "process " + std::to_string(pid) + " of rank " + std::to_string(rank);
  Other other{rank, pid, static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
  if (other.process < 0)
    return cannot_poll("expected " + process + ", got " + std::strerror(errno));
  others_.push_back(other);
  // Check after the pidfd is open: until then the pid could have been reused.
  NVFP4_MOE_ASSIGN(const uint64_t found, start_time_of(pid));
  if (found != start_time)
    return cannot_poll("expected " + process + ", got another process with this number");
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(page_fd);
  const int page = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat size {};
  // If the file could shrink, reading it would crash this process.
  const bool whole = page >= 0 && ::fstat(page, &size) == 0 && size.st_size == sizeof(Page) &&
                     (std::max(::fcntl(page, F_GET_SEALS), 0) & F_SEAL_SHRINK) != 0;
  void* const memory =
      whole ? ::mmap(nullptr, sizeof(Page), PROT_READ, MAP_SHARED, page, 0) : MAP_FAILED;
  const int error = errno;
  if (page >= 0) ::close(page);
  if (memory == MAP_FAILED)
    return cannot_poll("expected the page of " + process + ", got " +
                       (page >= 0 && !whole ? "another file" : std::strerror(error)));
  others_.back().page = static_cast<const Page*>(memory);
  return {};
}

Result<std::unique_ptr<RankProcesses>> RankProcesses::open(Exchange& exchange) {
  std::unique_ptr<RankProcesses> made(new RankProcesses(exchange.timeout()));
  ProcessIdentity mine;
  const auto begin = [&]() -> Status {
    NVFP4_MOE_TRY(made->make_page());
    NVFP4_MOE_ASSIGN(mine, this_process(made->page_fd_));
    return {};
  };
  NVFP4_MOE_TRY(exchange.agree(begin()));
  std::vector<ProcessIdentity> all(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(&mine, sizeof(mine), all.data()));
  const auto open_all = [&]() -> Status {
    for (int rank = 0; rank < exchange.world(); ++rank) {
      const ProcessIdentity& other = all[static_cast<size_t>(rank)];
      if (rank == exchange.rank()) continue;
      if (std::memcmp(other.host, mine.host, sizeof(mine.host)) != 0)
        return cannot_poll("expected rank " + std::to_string(rank) +
                           " on this host, got one on another, or in another container");
      NVFP4_MOE_TRY(made->open_other(rank, other.pid, other.start_time, other.page_fd));
    }
    return {};
  };
  NVFP4_MOE_TRY(exchange.agree(open_all()));
  ::close(std::exchange(made->page_fd_, -1));  // all ranks have opened it
  return made;
}

RankProcesses::~RankProcesses() {
  if (page_ != nullptr) {
    uint32_t here = Page::kHere;
    if (!in_child_) page_->state.compare_exchange_strong(here, Page::kLeft);
    ::munmap(page_, sizeof(Page));
  }
  if (page_fd_ >= 0) ::close(page_fd_);
  for (const Other& other : others_) {
    if (other.page != nullptr) ::munmap(const_cast<Page*>(other.page), sizeof(Page));
    ::close(other.process);
  }
}

Status RankProcesses::poll() {
  const Other* gone = nullptr;
  for (const Other& other : others_) {
    pollfd process{other.process, POLLIN, 0};
    const bool ended = ::poll(&process, 1, 0) > 0;
    // read after checking the process, so that its final state counts
    const uint32_t state = other.page->state.load(std::memory_order_acquire);
    if (state == Page::kGaveUp) return SentStatus(other.page->failure).failure();
    if (gone == nullptr && (ended || state == Page::kLeft)) gone = &other;
  }
  const Status failure = gone == nullptr ? find_stopped() : rank_is_gone(gone->rank);
  if (!failure.ok()) give_up(failure);
  return failure;
}

// A captured collective that waits for a stopped rank has no timeout.
Status RankProcesses::find_stopped() {
  if (!next_poll_.passed()) return {};
  next_poll_ = Deadline(kPollInterval);
  for (Other& other : others_) {
    if (!is_stopped(other.pid)) {
      other.stopped.reset();
    } else if (!other.stopped) {
      other.stopped = Deadline(timeout_);
    } else if (other.stopped->passed()) {
      return io_error("exchange: expected rank " + std::to_string(other.rank) +
                      " to run, got a process that was stopped for " +
                      std::to_string(timeout_.count()) + " ms (SIGSTOP)");
    }
  }
  return {};
}

void RankProcesses::give_up(const Status& why) {
  uint32_t here = Page::kHere;
  if (!page_->state.compare_exchange_strong(here, Page::kWrites)) return;
  page_->failure = SentStatus<504>(why);
  page_->state.store(Page::kGaveUp, std::memory_order_release);
}

}  // namespace nvfp4_moe::internal
