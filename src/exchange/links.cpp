// Each pair of ranks has a connection, so that what a rank sees depends on no third rank's looking: a ring or a star would
// take fewer sockets, and their news would wait for a rank that is busy, stopped or the next one to be killed. It takes
// world - 1 of them in each process, where there are as many to spare.
//
// Each rank listens, on loopback where all are of one host, else on all of its addresses, and tells each other rank by the
// exchange where, with a secret of that pair's own. The lower rank of a pair connects, to one address after another, with
// the other's secret; the higher one answers with the lower one's, which so knows that the address leads to that rank (two
// hosts may have one address: that of a bridge for containers); then it says which connection it keeps. Nobody listens
// behind that. What does not know the secret is sent away.
#include "exchange/links.h"

#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include "exchange/socket.h"
#include "exchange/tcp.h"

namespace nvfp4_moe {
namespace {

constexpr uint64_t kLinkMagic = 0x314b4e4c34504656;  // "VFP4LNK1": a link of this library, in this order of bytes
constexpr size_t kMostAddresses = 8;
constexpr Timeout kNextAddress{250};   // for one to answer before the next one is tried beside it
constexpr size_t kMostStrangers = 64;  // that have not said a secret yet, beside the ranks
// Of the files that a process may have open: the host's own communication takes its part.
constexpr rlim_t kPartOfFiles = 4;

using Secret = std::array<uint64_t, 2>;

// What a rank says to one other rank by the exchange.
struct LinkOffer {
  Secret secret{};  // to be said by that rank
  int32_t port = 0;
  std::array<std::array<char, 64>, kMostAddresses> addresses{};  // each ends with 0; the first empty one ends them
};

// What goes over a connection before it is a link.
struct LinkWord {
  enum class Step : int32_t { kGreeting = 1, kAnswer, kChosen };
  uint64_t magic = kLinkMagic;
  Step step = Step::kGreeting;
  int32_t rank = 0;  // who says it
  Secret secret{};   // that it was given by whom it says it to

  bool operator==(const LinkWord&) const = default;
};

// The kernel's number of its start, and its network, of which a host may have several.
std::string this_host() {
  std::string host;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), host);
  struct stat network {};
  if (::stat("/proc/self/ns/net", &network) == 0)
    host += "/" + std::to_string(network.st_dev) + "/" + std::to_string(network.st_ino);
  return host;
}

Status no_links(const std::string& why) { return unsupported("links: " + why); }

// (world), one for each rank.
Result<std::vector<Secret>> make_secrets(size_t world) {
  std::vector<Secret> secrets(world);
  for (Secret& secret : secrets)
    if (::getrandom(secret.data(), sizeof(secret), 0) != sizeof(secret))
      return no_links(std::string("expected random numbers, got ") + std::strerror(errno));
  return secrets;
}

Status check_wish(const LinkOptions& options, int world) {
  if (!options.wanted) return no_links("expected none by the caller");
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY) return {};
  const rlim_t most = files.rlim_cur / kPartOfFiles;
  if (static_cast<rlim_t>(world - 1) <= most) return {};
  return no_links("expected room for " + std::to_string(world - 1) + " connections, got a limit of " +
                  std::to_string(files.rlim_cur) + " open files (ulimit -n), of which they take " +
                  std::to_string(most) + " at most");
}

struct Listening {
  std::vector<Secret> secrets;  // (world)
  Socket socket;
  int port = 0;
  std::vector<std::string> addresses;
};

Result<Listening> listen_for_ranks(size_t world, bool one_host) {
  Listening made;
  NVFP4_MOE_ASSIGN(made.secrets, make_secrets(world));
  if (one_host) {
    constexpr const char* kLoopback = "127.0.0.1";
    NVFP4_MOE_ASSIGN(made.socket, listen_on(kLoopback, 0));
    NVFP4_MOE_ASSIGN(const std::string address, local_address(made.socket));
    if (address != kLoopback) return no_links("expected a loopback address, got none");
    made.addresses = {kLoopback};
  } else {
    auto all = listen_on("::", 0);
    if (!all.ok()) all = listen_on("0.0.0.0", 0);  // a kernel without IPv6
    NVFP4_MOE_ASSIGN(made.socket, std::move(all));
    made.addresses = host_addresses(kMostAddresses);
    if (made.addresses.empty()) return no_links("expected an address that other hosts reach, got none");
  }
  NVFP4_MOE_ASSIGN(made.port, local_port(made.socket));
  return made;
}

// A connection that may become a link.
struct Attempt {
  enum class Awaits { kConnection, kGreeting, kAnswer, kChosen };
  Socket socket;
  Awaits awaits = Awaits::kConnection;
  int rank = -1;      // the other end, as far as it is known
  std::string where;  // for whoever connects
  LinkWord word;      // as it comes
  size_t read = 0;
  bool over = false;
};

// A higher rank, to which this one connects.
struct Dialed {
  size_t next = 0;  // of its addresses
  Deadline patience{Timeout{0}};
  std::string failure = "no address";
};

class Linking {
 public:
  // given: (world) what this rank said to each; got: (world) what each said to it.
  Linking(int rank, const Listening& listening, const std::vector<LinkOffer>& given, const std::vector<LinkOffer>& got,
          Timeout within)
      : rank_(rank),
        listener_(listening.socket),
        given_(given),
        got_(got),
        within_(within),
        deadline_(within),
        dialed_(got.size()),
        links_(got.size()) {}

  Result<std::vector<Socket>> run() {
    std::vector<pollfd> polled;
    while (missing() > 0) {
      NVFP4_MOE_TRY(dial());
      if (deadline_.passed()) return late();
      polled.assign(1, {listener_.fd(), POLLIN, 0});
      if (strangers() >= kMostStrangers + links_.size()) polled[0].fd = -1;
      for (const Attempt& attempt : attempts_) {
        const bool connects = attempt.awaits == Attempt::Awaits::kConnection;
        polled.push_back({attempt.socket.fd(), static_cast<int16_t>(connects ? POLLOUT : POLLIN), 0});
      }
      ::poll(polled.data(), polled.size(), std::min(deadline_.left_ms(), until_next_address()));
      for (Attempt& attempt : attempts_) go_on(attempt);
      std::erase_if(attempts_, [](const Attempt& attempt) { return attempt.over; });
      if ((polled[0].revents & POLLIN) == 0) continue;
      NVFP4_MOE_ASSIGN(Socket socket, accept_from(listener_));
      if (!socket.open()) continue;
      attempts_.emplace_back();
      attempts_.back().socket = std::move(socket);
      attempts_.back().awaits = Attempt::Awaits::kGreeting;
    }
    return std::move(links_);
  }

 private:
  static size_t index(int rank) { return static_cast<size_t>(rank); }
  int world() const { return static_cast<int>(links_.size()); }
  bool linked(int rank) const { return links_[index(rank)].open(); }
  size_t missing() const {
    size_t count = 0;
    for (int other = 0; other < world(); ++other) count += other != rank_ && !linked(other) ? 1 : 0;
    return count;
  }
  size_t strangers() const {
    return static_cast<size_t>(std::count_if(attempts_.begin(), attempts_.end(), [](const Attempt& attempt) {
      return attempt.awaits == Attempt::Awaits::kGreeting;
    }));
  }
  bool dialing(int rank) const {
    return std::any_of(attempts_.begin(), attempts_.end(),
                       [&](const Attempt& attempt) { return attempt.rank == rank; });
  }
  // Empty behind the last one.
  std::string address_of(int rank, size_t number) const {
    if (number >= kMostAddresses) return {};
    const auto& text = got_[index(rank)].addresses[number];
    return std::string(text.data(), strnlen(text.data(), text.size()));
  }

  int until_next_address() const {
    int least = deadline_.left_ms();
    for (int other = rank_ + 1; other < world(); ++other) {
      const Dialed& dialed = dialed_[index(other)];
      if (!linked(other) && !address_of(other, dialed.next).empty()) least = std::min(least, dialed.patience.left_ms());
    }
    return least;
  }

  // The next address of each higher rank that has not answered, once the one before has failed or had its time.
  Status dial() {
    for (int other = rank_ + 1; other < world(); ++other) {
      Dialed& dialed = dialed_[index(other)];
      while (!linked(other) && (!dialing(other) || dialed.patience.passed())) {
        const std::string address = address_of(other, dialed.next);
        if (address.empty() && dialing(other)) break;
        if (address.empty()) return unreachable(other);
        ++dialed.next;
        dialed.patience = Deadline(kNextAddress);
        const int port = got_[index(other)].port;
        const std::string where = address + " port " + std::to_string(port);
        auto socket = begin_connect(address, port);
        if (!socket.ok()) {
          dialed.failure = socket.status().message();
          continue;
        }
        attempts_.emplace_back();
        attempts_.back().socket = std::move(*socket);
        attempts_.back().rank = other;
        attempts_.back().where = where;
      }
    }
    return {};
  }

  Status unreachable(int rank) const {
    return no_links("expected a connection with rank " + std::to_string(rank) +
                    ", got none: " + dialed_[index(rank)].failure);
  }
  Status late() const {
    std::vector<int> ranks;
    for (int other = 0; other < world(); ++other)
      if (other != rank_ && !linked(other)) ranks.push_back(other);
    return no_links("expected connections within " + std::to_string(within_.count()) + " ms, got none with " +
                    name_ranks(ranks));
  }

  LinkWord word_for(LinkWord::Step step, int rank) const {
    LinkWord word;
    word.step = step;
    word.rank = rank_;
    word.secret = got_[index(rank)].secret;
    return word;
  }
  LinkWord word_of(LinkWord::Step step, int rank) const {
    LinkWord word;
    word.step = step;
    word.rank = rank;
    word.secret = given_[index(rank)].secret;
    return word;
  }
  // It fits the buffer of a connection that has hardly sent anything.
  static bool say(const Socket& socket, const LinkWord& word) {
    return write_some(socket, bytes_of(word)).bytes == sizeof(word);
  }

  void fail(Attempt& attempt, const char* why) {
    attempt.over = true;
    if (!attempt.where.empty()) dialed_[index(attempt.rank)].failure = attempt.where + ": " + why;
  }
  void keep(Attempt& attempt) {
    links_[index(attempt.rank)] = std::move(attempt.socket);
    attempt.over = true;
  }

  // With whatever has come.
  void go_on(Attempt& attempt) {
    using Awaits = Attempt::Awaits;
    if (attempt.rank >= 0 && linked(attempt.rank)) {
      attempt.over = true;  // by another address
      return;
    }
    if (attempt.awaits == Awaits::kConnection) {
      const int error = connect_error(attempt.socket);
      if (error == EINPROGRESS) return;
      if (error != 0) return fail(attempt, std::strerror(error));
      if (!say(attempt.socket, word_for(LinkWord::Step::kGreeting, attempt.rank)))
        return fail(attempt, "it has closed the connection");
      attempt.awaits = Awaits::kAnswer;
      return;
    }
    const Movement read = read_some(attempt.socket, bytes_of(attempt.word).subspan(attempt.read));
    attempt.read += read.bytes;
    if (read.moved == Moved::kEnded) return fail(attempt, "it has closed the connection");
    if (attempt.read < sizeof(LinkWord)) return;
    attempt.read = 0;
    if (attempt.awaits == Awaits::kAnswer) {
      if (attempt.word != word_of(LinkWord::Step::kAnswer, attempt.rank) ||
          !say(attempt.socket, word_for(LinkWord::Step::kChosen, attempt.rank)))
        return fail(attempt, "it is not that rank");
      return keep(attempt);
    }
    if (attempt.awaits == Awaits::kChosen) {
      if (attempt.word != word_of(LinkWord::Step::kChosen, attempt.rank)) return fail(attempt, "");
      return keep(attempt);
    }
    const int who = attempt.word.rank;
    if (who < 0 || who >= rank_ || linked(who) || attempt.word != word_of(LinkWord::Step::kGreeting, who) ||
        !say(attempt.socket, word_for(LinkWord::Step::kAnswer, who))) {
      attempt.over = true;
      return;
    }
    attempt.rank = who;
    attempt.awaits = Awaits::kChosen;
  }

  const int rank_;
  const Socket& listener_;
  const std::vector<LinkOffer>& given_;
  const std::vector<LinkOffer>& got_;
  const Timeout within_;
  const Deadline deadline_;
  std::vector<Attempt> attempts_;
  std::vector<Dialed> dialed_;  // (world), those behind this rank's own
  std::vector<Socket> links_;   // (world)
};

Result<bool> all_of_one_host(Exchange& exchange, const std::string& host) {
  std::array<char, 128> mine{};
  host.copy(mine.data(), mine.size());
  std::vector<std::array<char, 128>> all(static_cast<size_t>(exchange.world()));
  NVFP4_MOE_TRY(exchange.all_gather(mine.data(), sizeof(mine), all.data()));
  return std::all_of(all.begin(), all.end(), [&](const auto& other) { return other == all[0]; });
}

}  // namespace

Result<std::unique_ptr<Transport>> connect_links(Exchange& exchange, const LinkOptions& options) {
  const int world = exchange.world();
  const auto ranks = static_cast<size_t>(world);
  if (world == 1) return std::unique_ptr<Transport>();
  NVFP4_MOE_TRY(exchange.agree(check_wish(options, world)));
  NVFP4_MOE_ASSIGN(const bool one_host, all_of_one_host(exchange, options.host.empty() ? this_host() : options.host));

  const Result<Listening> listening = listen_for_ranks(ranks, one_host);
  NVFP4_MOE_TRY(exchange.agree(listening.status()));
  std::vector<LinkOffer> given(ranks), got(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    LinkOffer& offer = given[rank];
    offer.secret = listening->secrets[rank];
    offer.port = listening->port;
    for (size_t i = 0; i < listening->addresses.size(); ++i)
      listening->addresses[i].copy(offer.addresses[i].data(), offer.addresses[i].size() - 1);
  }
  const std::vector<int64_t> bytes(ranks, sizeof(LinkOffer));
  NVFP4_MOE_TRY(exchange.all_to_all_v(given.data(), bytes, got.data(), bytes));

  // Half of the time that ranks wait: the slowest of them still comes to where they agree.
  const Timeout within = std::min(options.within, exchange.timeout() / 2);
  const auto link = [&]() -> Result<std::unique_ptr<Transport>> {
    NVFP4_MOE_ASSIGN(std::vector<Socket> links, Linking(exchange.rank(), *listening, given, got, within).run());
    for (const Socket& each : links)
      if (each.open()) end_without_host(each, exchange.timeout());
    return make_tcp_transport(std::move(links), exchange.rank());
  };
  auto transport = link();
  NVFP4_MOE_TRY(exchange.agree(transport.status()));
  return transport;
}

}  // namespace nvfp4_moe
