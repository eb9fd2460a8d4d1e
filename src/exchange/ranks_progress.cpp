#include "exchange/ranks_progress.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <system_error>

namespace nvfp4_moe {
namespace {

constexpr uint64_t kBeatMagic = 0x3154414542344656;  // "VF4BEAT1"
constexpr Timeout kSay{1000};                        // for a word to go out
constexpr int64_t kMostCount = int64_t{1} << 52;     // which kMostRanks of them add up to without overflow
constexpr int kLook = 100;                           // ms between two looks at who is silent

// Where the others find rank 0.
struct Place {
  int64_t port = 0;
  uint64_t key = 0;
};

bool is_count(int64_t value) { return value >= 0 && value < kMostCount; }

uint64_t random_key() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

struct RanksProgress::Beat {
  uint64_t magic = kBeatMagic;
  uint64_t key = 0;
  int32_t rank = 0;
  int32_t reserved = 0;
  int64_t done = 0, total = 0, done_bytes = 0, total_bytes = 0;
  char item[104] = {};  // cut to fit, ends with 0
};

// A connection to rank 0, and as much of its next word as has come.
struct RanksProgress::Speaker {
  Socket socket;
  Beat beat;
  size_t read = 0;
  int rank = -1;  // once it has said who it is
};

RanksProgress::RanksProgress(const ProgressFn& progress, const Timing& timing, int first_rank, int ranks)
    : progress_(progress), timing_(timing), first_rank_(first_rank), ranks_(static_cast<size_t>(ranks)) {}

Result<std::unique_ptr<RanksProgress>> RanksProgress::connect(const LocalRanks& ranks, const ProgressFn& progress,
                                                              const Timing& timing) {
  const bool alone = ranks.here() == ranks.world() || ranks.address().empty();
  const int parts = !alone && ranks.has_first() ? ranks.world() : ranks.here();
  std::unique_ptr<RanksProgress> made(new RanksProgress(progress, timing, ranks.first_rank(), parts));
  if (!alone) NVFP4_MOE_TRY(made->connect_to_first(*ranks.exchange(0), ranks.address()));
  return made;
}

Status RanksProgress::connect_to_first(Exchange& exchange, const std::string& address) {
  rank_ = exchange.rank();
  world_ = exchange.world();
  Place mine;
  const auto open = [&]() -> Status {
    if (rank_ != 0) return {};
    NVFP4_MOE_ASSIGN(socket_, listen_on(address, 0));
    NVFP4_MOE_ASSIGN(mine.port, local_port(socket_));
    mine.key = random_key();
    return {};
  };
  NVFP4_MOE_TRY(exchange.agree(open()));
  std::vector<Place> places(static_cast<size_t>(world_));
  NVFP4_MOE_TRY(exchange.all_gather(&mine, sizeof(mine), places.data()));
  key_ = places[0].key;
  const auto reach = [&]() -> Status {
    if (rank_ == 0) return {};
    NVFP4_MOE_ASSIGN(socket_, connect_to(address, static_cast<int>(places[0].port), Deadline(exchange.timeout())));
    return {};
  };
  NVFP4_MOE_TRY(exchange.agree(reach()));
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    ranks_[rank].elsewhere = true;
    ranks_[rank].heard = Clock::now();
  }
  try {
    thread_ = rank_ == 0 ? std::thread([this] { listen(); }) : std::thread([this] { speak(); });
  } catch (const std::system_error&) {  // no thread to spare: this rank is silent, or nobody is heard
  }
  return {};
}

RanksProgress::~RanksProgress() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

ProgressFn RanksProgress::of_rank(int index) {
  return [this, index](const Progress& mine) {
    const std::lock_guard lock(mutex_);
    const std::string item = "rank " + std::to_string(first_rank_ + index) + ": " + std::string(mine.item);
    item_ = mine.item;
    return take(index, {mine.done, mine.total, mine.done_bytes, mine.total_bytes, {}, false}, item);
  };
}

// Under mutex_.
bool RanksProgress::take(int rank, const Part& part, const std::string& item) {
  ranks_[static_cast<size_t>(rank)] = part;
  return report(item);
}

// Under mutex_.
bool RanksProgress::report(const std::string& item) const {
  if (!progress_) return true;
  Progress all;
  for (const Part& part : ranks_) {
    all.done += part.done;
    all.total += part.total;
    all.done_bytes += part.done_bytes;
    all.total_bytes += part.total_bytes;
  }
  const std::string silent = silent_ranks();
  all.what = "load";
  all.item = silent.empty() ? item : silent;
  all.elapsed_s = std::chrono::duration<double>(Clock::now() - start_).count();
  return progress_(all);
}

// Under mutex_: "no word from rank 2 for 7 s", or nothing.
std::string RanksProgress::silent_ranks() const {
  std::vector<int> silent;
  auto longest = Clock::duration::zero();
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const auto since = Clock::now() - ranks_[rank].heard;
    if (!ranks_[rank].elsewhere || since < timing_.silent) continue;
    silent.push_back(static_cast<int>(rank));
    longest = std::max(longest, since);
  }
  if (silent.empty()) return "";
  return "no word from " + name_ranks(silent) + " for " +
         std::to_string(std::chrono::duration_cast<std::chrono::seconds>(longest).count()) + " s";
}

// What a rank but the first does: says how far it is until it leaves, or nobody listens.
void RanksProgress::speak() {
  std::unique_lock lock(mutex_);
  do {
    Beat beat;
    beat.key = key_;
    beat.rank = rank_;
    const Part& mine = ranks_.front();
    beat.done = mine.done;
    beat.total = mine.total;
    beat.done_bytes = mine.done_bytes;
    beat.total_bytes = mine.total_bytes;
    item_.copy(beat.item, sizeof(beat.item) - 1);
    lock.unlock();
    const bool said = write_all(socket_, bytes_of(std::as_const(beat)), Deadline(kSay));
    lock.lock();
    if (!said) return;
  } while (!wake_.wait_for(lock, timing_.beat, [this] { return stop_; }));
}

// Takes what has come from one connection. What says anything but this world's words is closed.
void RanksProgress::hear(Speaker& speaker) {
  while (speaker.socket.open()) {
    const Movement read = read_some(speaker.socket, bytes_of(speaker.beat).subspan(speaker.read));
    if (read.moved == Moved::kNothingYet) return;
    speaker.read += read.bytes;
    const Beat& beat = speaker.beat;
    const bool whole = speaker.read == sizeof(Beat);
    const bool legal = whole && beat.magic == kBeatMagic && beat.key == key_ && beat.rank > 0 && beat.rank < world_ &&
                       (speaker.rank < 0 || speaker.rank == beat.rank) && beat.item[sizeof(beat.item) - 1] == 0 &&
                       is_count(beat.done) && is_count(beat.total) && is_count(beat.done_bytes) &&
                       is_count(beat.total_bytes);
    const std::lock_guard lock(mutex_);
    if (read.moved == Moved::kEnded || (whole && !legal)) {
      if (speaker.rank > 0) ranks_[static_cast<size_t>(speaker.rank)].elsewhere = false;  // it has left
      speaker.socket.close();
    } else if (whole) {
      speaker.rank = beat.rank;
      speaker.read = 0;
      take(beat.rank, {beat.done, beat.total, beat.done_bytes, beat.total_bytes, Clock::now(), true},
           "rank " + std::to_string(beat.rank) + ": " + beat.item);
    }
  }
}

// What rank 0 does.
void RanksProgress::listen() {
  std::vector<Speaker> speakers;
  std::vector<pollfd> polled;
  const auto most = static_cast<size_t>(2 * world_);  // strangers take no more places than that
  while (true) {
    polled.assign(1, {socket_.fd(), static_cast<int16_t>(speakers.size() < most ? POLLIN : 0), 0});
    for (const Speaker& speaker : speakers) polled.push_back({speaker.socket.fd(), POLLIN, 0});
    ::poll(polled.data(), polled.size(), kLook);
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
      if (const std::string silent = silent_ranks(); !silent.empty()) report(silent);
    }
    if ((polled[0].revents & POLLIN) != 0) {
      Result<Socket> came = accept_from(socket_);
      if (came.ok() && came->open()) {
        speakers.emplace_back();
        speakers.back().socket = *std::move(came);
      }
    }
    for (Speaker& speaker : speakers) hear(speaker);
    std::erase_if(speakers, [](const Speaker& speaker) { return !speaker.socket.open(); });
  }
}

}  // namespace nvfp4_moe
