// Rank 0 waits for a greeting of each rank and answers all at once. Then rank r connects to those between 0 and r, and
// waits for those behind it; a greeting says who has come.
#include "exchange/rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace nvfp4_moe {
namespace {

constexpr uint64_t kGreetingMagic = 0x3150435434504656;  // "VFP4TCP1": a rank of this library, in this order of bytes
constexpr Timeout kStragglers{3000};  // once it is clear that they are no world: for the rest to hear of it
constexpr Timeout kAnswer{5000};      // for rank 0 to answer once it has all greetings, or has given up

struct Greeting {
  uint64_t magic = kGreetingMagic;
  int32_t rank = 0, world = 0;
  int32_t port = 0;  // on which this rank listens
  int32_t reserved = 0;
  char address[64] = {};  // of this rank, as rank 0 reaches it
};
// Rank 0's answer; where it is no failure, the (world) greetings follow.
struct Answer {
  int32_t code = 0;
  char message[508] = {};  // cut to fit, ends with 0
};

// Someone who has connected and not said all of its greeting yet.
struct Arrival {
  Socket socket;
  Greeting greeting;
  size_t read = 0;
};

bool is_greeting(const Greeting& greeting) { return greeting.magic == kGreetingMagic && greeting.address[63] == 0; }

class Meeting {
 public:
  Meeting(int rank, int world, Timeout timeout)
      : rank_(rank), world_(world), timeout_(timeout), deadline_(timeout), sockets_(static_cast<size_t>(world)) {}

  Result<std::vector<Socket>> as_first(const std::string& address, int port) {
    NVFP4_MOE_ASSIGN(const Socket listener, listen_on(address, port));
    std::vector<Greeting> greetings(static_cast<size_t>(world_));
    Status refusal;
    int came = 1;
    Status verdict = gather(listener, [&](Arrival& arrival) -> Status {
      const Greeting& who = arrival.greeting;
      ++came;
      if (who.world != world_ || who.rank < 1 || who.rank >= world_ || at(who.rank).open()) {
        extra_.push_back(std::move(arrival.socket));  // it hears of it as well
        if (refusal.ok()) deadline_ = std::min(deadline_, Deadline(kStragglers));
        if (refusal.ok()) refusal = refuse(who);
      } else {
        greetings[static_cast<size_t>(who.rank)] = who;
        at(who.rank) = std::move(arrival.socket);
      }
      return came == world_ ? refusal : Status();
    });
    if (!refusal.ok()) verdict = refusal;
    Answer answer;
    answer.code = static_cast<int32_t>(verdict.code());
    verdict.message().copy(answer.message, sizeof(answer.message) - 1);
    for (std::vector<Socket>* const group : {&sockets_, &extra_})
      for (const Socket& socket : *group) {
        if (!socket.open() || !write_all(socket, bytes_of(std::as_const(answer)), Deadline(kAnswer))) continue;
        if (verdict.ok()) write_all(socket, std::as_bytes(std::span(greetings)), Deadline(kAnswer));
      }
    NVFP4_MOE_TRY(verdict);
    return std::move(sockets_);
  }

  Result<std::vector<Socket>> as_other(const std::string& address, int port) {
    NVFP4_MOE_ASSIGN(Socket first, connect_to(address, port, deadline_));
    NVFP4_MOE_ASSIGN(const std::string own, local_address(first));
    NVFP4_MOE_ASSIGN(const Socket listener, listen_on(own, 0));
    Greeting mine;
    mine.rank = rank_;
    mine.world = world_;
    NVFP4_MOE_ASSIGN(mine.port, local_port(listener));
    own.copy(mine.address, sizeof(mine.address) - 1);
    Answer answer;
    // Rank 0 may have come later than this one, and waits as long as it does.
    const Deadline answered(timeout_ + kAnswer);
    if (!write_all(first, bytes_of(std::as_const(mine)), answered) || !read_all(first, bytes_of(answer), answered))
      return io_error("exchange: expected an answer of rank 0 at " + address + " port " + std::to_string(port) +
                      ", got none: it has ended, or is no rank of this library");
    answer.message[sizeof(answer.message) - 1] = 0;
    if (answer.code != 0) return Status(code_of_failure(answer.code), answer.message);
    std::vector<Greeting> greetings(static_cast<size_t>(world_));
    if (!read_all(first, std::as_writable_bytes(std::span(greetings)), Deadline(kAnswer))) return rank_is_gone(0);
    at(0) = std::move(first);
    deadline_ = Deadline(timeout_);
    for (int r = 1; r < rank_; ++r) {
      const Greeting& other = greetings[static_cast<size_t>(r)];
      if (!is_greeting(other)) return invalid_argument("exchange: expected greetings from rank 0, got other bytes");
      NVFP4_MOE_ASSIGN(at(r), connect_to(other.address, other.port, deadline_));
      if (!write_all(at(r), bytes_of(std::as_const(mine)), deadline_)) return late();
    }
    NVFP4_MOE_TRY(gather(listener, [&](Arrival& arrival) -> Status {
      const Greeting& who = arrival.greeting;
      if (who.rank <= rank_ || who.rank >= world_ || at(who.rank).open()) return refuse(who);
      at(who.rank) = std::move(arrival.socket);
      return {};
    }));
    return std::move(sockets_);
  }

 private:
  Socket& at(int rank) { return sockets_[static_cast<size_t>(rank)]; }

  Status refuse(const Greeting& who) const {
    if (who.world != world_)
      return invalid_argument("exchange: expected ranks of a world of " + std::to_string(world_) + ", got rank " +
                              std::to_string(who.rank) + " of a world of " + std::to_string(who.world));
    if (who.rank < 0 || who.rank >= world_)
      return invalid_argument("exchange: expected ranks 0 to " + std::to_string(world_ - 1) + ", got rank " +
                              std::to_string(who.rank));
    return invalid_argument("exchange: expected every rank once, got rank " + std::to_string(who.rank) + " twice");
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 0; r < world_; ++r)
      if (r != rank_ && !sockets_[static_cast<size_t>(r)].open()) ranks.push_back(r);
    return ranks;
  }
  Status late() const { return late_ranks("join", world_, missing(), timeout_); }

  // Takes arrivals until no rank is missing. take(arrival) keeps its socket; its failure ends the meeting.
  template <class Take>
  Status gather(const Socket& listener, const Take& take) {
    std::vector<Arrival> arrivals;
    std::vector<pollfd> polled;
    while (!missing().empty()) {
      polled.assign(1, {listener.fd(), POLLIN, 0});
      for (const Arrival& arrival : arrivals) polled.push_back({arrival.socket.fd(), POLLIN, 0});
      const int ready = ::poll(polled.data(), polled.size(), deadline_.left_ms());
      if (ready <= 0 && deadline_.passed()) return late();
      for (size_t i = arrivals.size(); i-- > 0;) {
        Arrival& arrival = arrivals[i];
        const Movement read = read_some(arrival.socket, bytes_of(arrival.greeting).subspan(arrival.read));
        arrival.read += read.bytes;
        if (arrival.read == sizeof(Greeting) && is_greeting(arrival.greeting)) NVFP4_MOE_TRY(take(arrival));
        // A stranger: it has gone, or said something else.
        if (arrival.read == sizeof(Greeting) || read.moved == Moved::kEnded)
          arrivals.erase(arrivals.begin() + static_cast<std::ptrdiff_t>(i));
      }
      if ((polled[0].revents & POLLIN) == 0) continue;
      NVFP4_MOE_ASSIGN(Socket socket, accept_from(listener));
      if (socket.open()) {
        arrivals.emplace_back();
        arrivals.back().socket = std::move(socket);
      }
    }
    return {};
  }

  const int rank_, world_;
  const Timeout timeout_;
  Deadline deadline_;
  std::vector<Socket> sockets_;  // (world)
  std::vector<Socket> extra_;    // who came and was refused
};

}  // namespace

Result<std::vector<Socket>> meet(const std::string& address, int port, int rank, int world, Timeout timeout) {
  Meeting meeting(rank, world, timeout);
  if (world == 1) return std::vector<Socket>(1);
  return rank == 0 ? meeting.as_first(address, port) : meeting.as_other(address, port);
}

}  // namespace nvfp4_moe
