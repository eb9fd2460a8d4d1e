// Sockets of the ranks' own connections: opened, waited for until a deadline, read and written without blocking.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe {

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout) : end_(std::chrono::steady_clock::now() + timeout) {}
  int left_ms() const;  // 0 once it has passed; for poll
  bool operator<(const Deadline& other) const { return end_ < other.end_; }
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }

 private:
  std::chrono::steady_clock::time_point end_;
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// Listens on the address (on all of this host where it is not one of this host's own, as behind a translation of
// addresses); port 0: a free one.
Result<Socket> listen_on(const std::string& address, int port);
// Tries until somebody else listens there or the deadline passes.
Result<Socket> connect_to(const std::string& address, int port, const Deadline& deadline);
// Begins to connect and does not wait; connect_error says how it went on.
Result<Socket> begin_connect(const std::string& address, int port);
// Of a connection that was begun: 0 where it stands, EINPROGRESS while that is not known, else why it failed. One that is
// connected to itself was refused.
int connect_error(Socket& socket);
// Nobody yet: a socket that is not open.
Result<Socket> accept_from(const Socket& listener);
// Whether both ends of a connection are this socket. To connect to a port of this host on which nobody listens can come to
// that, where the port is also the one that the system chose for the socket.
bool connected_to_itself(const Socket& socket);
Result<int> local_port(const Socket& socket);
Result<std::string> local_address(const Socket& socket);
// This host's own, as others may reach it: of interfaces that are up, without loopback and addresses of one link alone, IPv4
// first; `most` of them at most.
std::vector<std::string> host_addresses(size_t most);
// A connection on which nothing is said ends, once its other host has not answered for about so long.
void end_without_host(const Socket& socket, std::chrono::milliseconds after);

// What came of one attempt to read or write.
enum class Moved { kSome, kNothingYet, kEnded };
struct Movement {
  Moved moved = Moved::kNothingYet;
  size_t bytes = 0;
};
Movement read_some(const Socket& socket, std::span<std::byte> into);
Movement write_some(const Socket& socket, std::span<const std::byte> from);
// What lies there, without taking it.
Movement peek(const Socket& socket, std::span<std::byte> into);
// Whether the other end has closed or is gone, whatever has come from it and not been read yet. Does not wait.
bool has_ended(const Socket& socket);

// All of it until the deadline, for the few bytes of a greeting. False where the other end has gone or the time is over.
bool read_all(const Socket& socket, std::span<std::byte> into, const Deadline& deadline);
bool write_all(const Socket& socket, std::span<const std::byte> from, const Deadline& deadline);

template <class Struct>
std::span<std::byte> bytes_of(Struct& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}
template <class Struct>
std::span<const std::byte> bytes_of(const Struct& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace nvfp4_moe
