// Files of the packed cache: every bit is checked, partial files of dead writers are removed, and
// concurrent writers and readers that may be killed at any moment see only whole entries.
#include "moe/cache_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>

#include "io/output_file.h"
#include "moe/cache_folder.h"
#include "support/attack.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using test::attacked;
using test::TempDir;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr size_t kExperts = 5;
constexpr const char* kName = "layer0.packed";

std::vector<std::byte> payload_of(uint32_t seed, size_t size) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

class CacheFile : public testing::Test {
 protected:
  Status write(const std::vector<std::byte>& payload, Executor& executor = serial_executor()) {
    return write_cache_file(folder_, kName, 0644, key_, scales_, fp8_, payload.data(),
                            payload.size(), executor);
  }
  Result<CachedLayer> read(size_t payload_bytes) {
    return read_cache_file(folder_, kName, {key_, kExperts, payload_bytes, false, !fp8_.empty()},
                           serial_executor());
  }
  std::vector<std::string> parts() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_.path()))
      if (entry.path().extension() == ".part") names.push_back(entry.path().filename().string());
    return names;
  }

  TempDir directory_;
  CacheFolder folder_ = CacheFolder::open(directory_.path().string()).value();
  std::string path_ = directory_.file(kName);
  ContentHash key_{1, 2};
  std::vector<TensorScales> scales_{kExperts, TensorScales{0.5f, 1.0f, 2.0f}};
  std::vector<Fp8ExpertWeights> fp8_;
};

TEST_F(CacheFile, Fp8WeightsFollowTheScales) {
  fp8_.assign(kExperts, {{-15, 7}, {0, uint64_t{1} << 40}, {3, 0}});
  fp8_[4].down.inexact = 5;
  ASSERT_OK(write(payload_of(1, 100)));
  const auto mapped = read(100);
  ASSERT_OK(mapped);
  EXPECT_EQ(mapped->scales, scales_);
  EXPECT_EQ(mapped->fp8_weights, fp8_);
  for (const int32_t shift : {-16, 4}) {
    fp8_[2].up.shift = shift;
    ASSERT_OK(write(payload_of(1, 100)));
    EXPECT_THAT(read(100).status().message(),
                HasSubstr("fp8 shift: expected -15..3, got " + std::to_string(shift)));
  }
}

TEST_F(CacheFile, WhatIsWrittenIsReadWithAnyNumberOfThreads) {
  const auto pool = make_thread_pool(3);
  for (const size_t size :
       {size_t{1}, size_t{4095}, (size_t{4} << 20) - 1, size_t{4} << 20, (size_t{9} << 20) + 7}) {
    const std::vector<std::byte> payload = payload_of(static_cast<uint32_t>(size), size);
    ASSERT_OK(write(payload, *pool));
    const auto mapped = read(size);
    ASSERT_OK(mapped);
    EXPECT_EQ(mapped->scales, scales_);
    EXPECT_EQ(std::memcmp(mapped->payload.data(), payload.data(), size), 0);
    EXPECT_EQ(mapped->payload.size_bytes(), size);
  }
}

ATTACK_TEST_F(kCacheTampering, CacheFile, EveryBitOfAFileIsUnderAHash) {
  constexpr size_t kSize = 3000;
  ASSERT_OK(write(payload_of(1, kSize)));
  const int file = open(path_.c_str(), O_RDWR);
  ASSERT_GE(file, 0);
  const auto bytes = static_cast<off_t>(fs::file_size(path_));
  for (off_t at = 0; at < bytes; ++at) {
    char byte = 0;
    ASSERT_EQ(pread(file, &byte, 1, at), 1);
    const char flipped = static_cast<char>(byte ^ (1 << at % 8));
    ASSERT_EQ(pwrite(file, &flipped, 1, at), 1);
    attacked();
    EXPECT_FALSE(read(kSize).ok()) << "bit " << at % 8 << " of byte " << at;
    ASSERT_EQ(pwrite(file, &byte, 1, at), 1);
  }
  close(file);
  EXPECT_OK(read(kSize));
}

// packed_cache_test.cpp has folders, links and FIFOs.
ATTACK_TEST_F(kSpecialFiles, CacheFile, ADeviceIsRefused) {
  attacked();
  EXPECT_THAT(read_cache_file(CacheFolder::open("/dev").value(), "zero",
                              {key_, kExperts, 10, false}, serial_executor())
                  .status()
                  .message(),
              HasSubstr("got a device"));
}

ATTACK_TEST_F(kWriteErrors, CacheFile, AWriteThatFailsLeavesTheOldFileAndNoPart) {
  ASSERT_OK(write(payload_of(1, 5000)));
  struct rlimit old {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 16384, old.rlim_max };
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write(payload_of(2, 50000));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, handler);
  attacked();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr("cannot write"));
  EXPECT_OK(read(5000));
  EXPECT_TRUE(parts().empty());
}

// ---- part files

ATTACK_TEST_F(kCacheTampering, CacheFile, PartsOfDeadWritersGoAndThoseOfTheLivingStay) {
  // A writer that runs in another process, one that was killed there, and one in this process.
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  std::vector<pid_t> writers;
  for (int i = 0; i < 2; ++i) {
    writers.push_back(fork());
    if (writers.back() == 0) {
      const auto part = CachePart::create(folder_, kName, 0644);
      (void)!::write(ready[1], part.ok() ? "y" : "n", 1);
      pause();
      _exit(0);
    }
  }
  for (int i = 0; i < 2; ++i) {
    char answer = 0;
    ASSERT_EQ(::read(ready[0], &answer, 1), 1);
    ASSERT_EQ(answer, 'y');
  }
  {
    const auto ours = CachePart::create(folder_, kName, 0644);
    ASSERT_OK(ours);
    EXPECT_EQ(sweep_cache_parts(folder_), 0);
    EXPECT_EQ(parts().size(), 3u);
    kill(writers[0], SIGKILL);
    attacked();
    waitpid(writers[0], nullptr, 0);
    EXPECT_EQ(sweep_cache_parts(folder_), 1);
    EXPECT_EQ(parts().size(), 2u);
    // This process's number on a part without a lock: process numbers are reused, locks are not.
    fs::copy_file(ours->path(), ours->path().substr(0, ours->path().rfind('-')) + "-99.part");
    EXPECT_EQ(sweep_cache_parts(folder_), 1);
    EXPECT_EQ(parts().size(), 2u);
  }
  EXPECT_EQ(parts().size(), 1u);
  kill(writers[1], SIGKILL);
  attacked();
  waitpid(writers[1], nullptr, 0);
  EXPECT_EQ(sweep_cache_parts(folder_), 1);
  close(ready[0]), close(ready[1]);
}

TEST_F(CacheFile, PartsOfAnotherHostStayUntilNobodyHasWrittenForAnHour) {
  const std::string part = path_ + ".0123456789abcdef-1-0.part",
                    other = directory_.file("notes.part");
  for (const std::string& path : {part, other}) ASSERT_OK(write_text_file(path, "x"));
  fs::create_directory(path_ + ".0123456789abcdef-1-1.part");
  EXPECT_EQ(sweep_cache_parts(folder_), 0);
  const struct timeval old[2] = {{time(nullptr) - 7200, 0}, {time(nullptr) - 7200, 0}};
  for (const std::string& path : {part, other}) ASSERT_EQ(utimes(path.c_str(), old), 0);
  const int held = open(part.c_str(), O_RDWR);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  EXPECT_EQ(sweep_cache_parts(folder_), 0);  // its writer is slow, and reachable
  close(held);
  EXPECT_EQ(sweep_cache_parts(folder_), 1);
  EXPECT_FALSE(fs::exists(part));
  EXPECT_TRUE(fs::exists(other));  // not the cache's
  EXPECT_TRUE(fs::is_directory(path_ + ".0123456789abcdef-1-1.part"));
}

// ---- processes

// Writes and reads the entry forever; exits with 1 if it reads bytes that were never written, with
// 2 if something fails.
[[noreturn]] void write_and_read(const CacheFolder& folder, uint32_t seed) {
  constexpr size_t kSize = 300'000;
  const std::vector<TensorScales> scales(kExperts);
  const std::vector<std::byte> payload = payload_of(seed, kSize);
  for (;;) {
    sweep_cache_parts(folder);
    if (!write_cache_file(folder, kName, 0644, {9, 9}, scales, {}, payload.data(), kSize,
                          serial_executor())
             .ok())
      _exit(2);
    for (int i = 0; i < 4; ++i) {
      const auto mapped =
          read_cache_file(folder, kName, {{9, 9}, kExperts, kSize, false}, serial_executor());
      if (!mapped.ok()) _exit(2);
      bool known = false;  // from this writer or another, but whole
      for (uint32_t other = 0; other < 3 && !known; ++other)
        known = std::memcmp(mapped->payload.data(), payload_of(other, 64).data(), 64) == 0 &&
                std::memcmp(mapped->payload.data() + kSize - 64,
                            payload_of(other, kSize).data() + kSize - 64, 64) == 0;
      if (!known) _exit(1);
    }
  }
}

ATTACK_TEST_F(kCacheTampering, CacheFile, ProcessesThatAreKilledAtAnyMomentLeaveWholeEntries) {
  std::mt19937 random(7);
  const auto start = [&](uint32_t seed) {
    const pid_t pid = fork();
    if (pid == 0) write_and_read(folder_, seed);
    return pid;
  };
  const auto end = [](pid_t pid) {
    kill(pid, SIGKILL);
    attacked();
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFSIGNALED(status)) << "exited by itself with " << WEXITSTATUS(status);
  };
  std::vector<pid_t> processes;
  for (uint32_t i = 0; i < 3; ++i) processes.push_back(start(i));
  for (int round = 0; round < 60; ++round) {
    usleep(static_cast<useconds_t>(random() % 30'000));
    const auto which = static_cast<uint32_t>(random() % 3);
    end(processes[which]);
    processes[which] = start(which);
  }
  for (const pid_t process : processes) end(process);
  if (fs::exists(path_))
    EXPECT_OK(
        read_cache_file(folder_, kName, {{9, 9}, kExperts, 300'000, false}, serial_executor()));
  sweep_cache_parts(folder_);
  EXPECT_TRUE(parts().empty());
}

}  // namespace
}  // namespace nvfp4_moe::internal
