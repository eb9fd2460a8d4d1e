// Records this process's calls that write below a folder, and injects faults into them.
//
// recorded_calls.cpp defines open, write, fsync, rename and similar functions for the whole
// executable, so calls of the library and of the C++ runtime go through it. Nothing is really
// synced: the state after a crash is computed from the record (crash_images.h), so tests do not
// wait for disks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::test {

enum class CallKind {
  kCreate,
  kWrite,
  kTruncate,
  kSync,
  kSyncFolder,
  kRename,
  kUnlink,
  kMakeFolder
};

struct RecordedCall {
  CallKind kind;
  std::string path;     // relative to the folder; for a rename the source
  std::string to;       // of a rename
  int64_t file = -1;    // a number for each file that was ever created
  uint64_t offset = 0;  // for a write; the new size for a truncation
  std::string bytes;    // of a write
};

// Records from construction to destruction; one at a time.
class RecordedCalls {
 public:
  explicit RecordedCalls(const std::filesystem::path& folder);
  ~RecordedCalls();
  RecordedCalls(const RecordedCalls&) = delete;
  RecordedCalls& operator=(const RecordedCalls&) = delete;
  const std::vector<RecordedCall>& calls() const;
};

// A fault in calls on files below a folder, from construction to destruction; one at a time.
struct Fault {
  std::string call;   // "open", "write", "fsync", "rename", "close"
  int64_t first = 0;  // the first such call that fails, from 0
  int64_t count = 1;  // how many
  int error = 0;      // errno; 0: a short write of half the bytes
};
class InjectedFault {
 public:
  InjectedFault(const std::filesystem::path& folder, const Fault& fault);
  ~InjectedFault();
  InjectedFault(const InjectedFault&) = delete;
  InjectedFault& operator=(const InjectedFault&) = delete;
  int64_t seen() const;  // calls of the kind so far
  int64_t hit() const;   // of these, the calls that failed
};

}  // namespace nvfp4_moe::internal::test
