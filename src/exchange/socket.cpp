#include "exchange/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

namespace nvfp4_moe {
namespace {

constexpr std::chrono::milliseconds kRetry{20};  // between attempts to reach a rank that does not listen yet
constexpr int kBacklog = 1024;

Status failure(const std::string& what) { return io_error("exchange: " + what + ": " + std::strerror(errno)); }

std::string place(const std::string& address, int port) { return address + " port " + std::to_string(port); }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;
Result<Addresses> resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0)
    return io_error("exchange: expected a host's name or address, got " + address + ": " + gai_strerror(error));
  return Addresses(found, &freeaddrinfo);
}

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof(value)); }

Socket new_socket(int family) { return Socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

bool bind_and_listen(const Socket& socket, const sockaddr* address, socklen_t size) {
  set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) set_option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  return ::bind(socket.fd(), address, size) == 0 && ::listen(socket.fd(), kBacklog) == 0;
}

// A connection that is begun. Not open: the system has no socket of the kind, and errno says why.
Socket begin(const addrinfo& to) {
  Socket socket = new_socket(to.ai_family);
  if (!socket.open()) return socket;
  set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (::connect(socket.fd(), to.ai_addr, to.ai_addrlen) != 0 && errno != EINPROGRESS) socket.close();
  return socket;
}

// Without the time that TCP keeps the port of a connection that has ended.
void drop_at_once(Socket& socket) {
  const linger at_once{1, 0};
  setsockopt(socket.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  socket.close();
}

bool wait_for(int fd, int16_t events, const Deadline& deadline) {
  pollfd waited{fd, events, 0};
  int ready = 0;
  do ready = ::poll(&waited, 1, deadline.left_ms());
  while (ready < 0 && errno == EINTR);
  return ready > 0;
}

Movement movement(ssize_t bytes) {
  if (bytes > 0) return {Moved::kSome, static_cast<size_t>(bytes)};
  const bool again = bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return {again ? Moved::kNothingYet : Moved::kEnded, 0};
}

}  // namespace

int Deadline::left_ms() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60 * 60 * 1000));
}

void Socket::close() {
  // In this order: a child that is forked in between has a copy too many, and does not close a number that is another's.
  if (const int fd = std::exchange(fd_, -1); fd >= 0) ::close(fd);
}

Result<Socket> listen_on(const std::string& address, int port) {
  NVFP4_MOE_ASSIGN(const Addresses found, resolve(address, port));
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    Socket socket = new_socket(each->ai_family);
    if (socket.open() && bind_and_listen(socket, each->ai_addr, each->ai_addrlen)) return socket;
    if (errno != EADDRNOTAVAIL) continue;
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(port));
    socket = new_socket(AF_INET);
    if (socket.open() && bind_and_listen(socket, reinterpret_cast<const sockaddr*>(&any), sizeof(any))) return socket;
  }
  const bool taken = errno == EADDRINUSE;
  return failure("expected to listen on " + place(address, port) + " as rank 0" +
                 (taken ? " (is another job running, or rank 0 there twice? MASTER_PORT chooses)" : ""));
}

bool connected_to_itself(const Socket& socket) {
  sockaddr_storage here{}, there{};
  socklen_t size = sizeof(here), other = sizeof(there);
  return getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&here), &size) == 0 &&
         getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&there), &other) == 0 && size == other &&
         std::memcmp(&here, &there, size) == 0;
}

Result<Socket> connect_to(const std::string& address, int port, const Deadline& deadline) {
  NVFP4_MOE_ASSIGN(const Addresses found, resolve(address, port));
  int last = ETIMEDOUT;
  do {
    for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
      Socket socket = begin(*each);
      if (socket.open()) wait_for(socket.fd(), POLLOUT, deadline);
      last = socket.open() ? connect_error(socket) : errno;
      if (last == 0) return socket;
    }
    std::this_thread::sleep_for(kRetry);
  } while (!deadline.passed());
  errno = last == EINPROGRESS ? ETIMEDOUT : last;
  return failure("expected a rank that listens on " + place(address, port) + ", got none");
}

Result<Socket> begin_connect(const std::string& address, int port) {
  NVFP4_MOE_ASSIGN(const Addresses found, resolve(address, port));
  Socket socket = begin(*found);
  if (!socket.open()) return failure(place(address, port));
  return socket;
}

int connect_error(Socket& socket) {
  pollfd asked{socket.fd(), POLLOUT, 0};
  if (::poll(&asked, 1, 0) <= 0) return EINPROGRESS;
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  if (error != 0 || !connected_to_itself(socket)) return error;
  drop_at_once(socket);
  return ECONNREFUSED;
}

Result<Socket> accept_from(const Socket& listener) {
  Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket.open()) {
    set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
    return socket;
  }
  // Whoever came may have gone again.
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) return failure("accept");
  return Socket();
}

Result<int> local_port(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return failure("getsockname");
  return static_cast<int>(ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                                              : reinterpret_cast<sockaddr_in&>(address).sin_port));
}

Result<std::string> local_address(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return failure("getsockname");
  const int error =
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
  if (error != 0) return io_error(std::string("exchange: getnameinfo: ") + gai_strerror(error));
  return std::string(host.data());
}

std::vector<std::string> host_addresses(size_t most) {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return addresses;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(first, &freeifaddrs);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = first; each != nullptr && addresses.size() < most; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
      if ((each->ifa_flags & IFF_UP) == 0 || (each->ifa_flags & IFF_LOOPBACK) != 0) continue;
      const auto* const six = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) continue;
      std::array<char, NI_MAXHOST> host{};
      const auto size = static_cast<socklen_t>(family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
      if (getnameinfo(each->ifa_addr, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) == 0)
        addresses.emplace_back(host.data());
    }
  }
  return addresses;
}

void end_without_host(const Socket& socket, std::chrono::milliseconds after) {
  // A question after half of the time, and more of them in what is left; in seconds, of which the system takes 1 to 32767.
  const auto seconds = [](std::chrono::milliseconds time) {
    return static_cast<int>(std::clamp<int64_t>(std::chrono::ceil<std::chrono::seconds>(time).count(), 1, 32767));
  };
  set_option(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket.fd(), IPPROTO_TCP, TCP_KEEPIDLE, seconds(after / 2));
  set_option(socket.fd(), IPPROTO_TCP, TCP_KEEPINTVL, seconds(after / 6));
  // Of questions, and of bytes that were sent.
  set_option(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(after.count()));
}

Movement read_some(const Socket& socket, std::span<std::byte> into) {
  return movement(::recv(socket.fd(), into.data(), into.size(), 0));
}
Movement write_some(const Socket& socket, std::span<const std::byte> from) {
  return movement(::send(socket.fd(), from.data(), from.size(), MSG_NOSIGNAL));
}
Movement peek(const Socket& socket, std::span<std::byte> into) {
  return movement(::recv(socket.fd(), into.data(), into.size(), MSG_PEEK));
}
bool has_ended(const Socket& socket) {
  pollfd asked{socket.fd(), POLLRDHUP, 0};
  return ::poll(&asked, 1, 0) > 0;  // an error of the connection, or its end both ways, comes unasked
}

bool read_all(const Socket& socket, std::span<std::byte> into, const Deadline& deadline) {
  while (!into.empty()) {
    const Movement read = read_some(socket, into);
    if (read.moved == Moved::kEnded) return false;
    into = into.subspan(read.bytes);
    if (read.moved == Moved::kNothingYet && !wait_for(socket.fd(), POLLIN, deadline)) return false;
  }
  return true;
}

bool write_all(const Socket& socket, std::span<const std::byte> from, const Deadline& deadline) {
  while (!from.empty()) {
    const Movement written = write_some(socket, from);
    if (written.moved == Moved::kEnded) return false;
    from = from.subspan(written.bytes);
    if (written.moved == Moved::kNothingYet && !wait_for(socket.fd(), POLLOUT, deadline)) return false;
  }
  return true;
}

}  // namespace nvfp4_moe
