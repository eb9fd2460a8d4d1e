// Loads NCCL at run time: the functions that ranks on GPUs need, by name, and their types.
//
// It is never linked: a process that has torch has torch's copy, and two copies in one process do
// not work together. The declarations are NCCL's public binary interface since 2.18.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "core/status.h"

namespace nvfp4_moe::internal {

using NcclCommunicator = void*;  // ncclComm_t

enum class NcclResult : int {
  kSuccess = 0,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,  // for a non-blocking communicator: the call is still in progress
};
enum class NcclType : int { kBytes = 1 };  // ncclUint8

struct NcclUniqueId {
  char bytes[128];
};
// The first fields of ncclConfig_t; `size` is the number of bytes that are present. INT_MIN and
// null mean "not set".
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;
  int cluster_size = INT_MIN, min_ctas = INT_MIN, max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;  // since 2.25; padding before
};

struct NcclLibrary {
  // 2.18.0: has non-blocking communicators as they are used here
  static constexpr int kLeastVersion = 21800;

  // The library of that path or name, opened once per process. Empty: the copy that is already
  // loaded, otherwise libnccl.so.2 on the system's search path. kUnsupported, with the reason, if
  // there is none, if it is too old, or if a function is missing.
  static Result<const NcclLibrary*> open(const std::string& path = "");

  std::string path;  // path of the file, as reported by the system
  int version = 0;   // 22809 means 2.28.9
  std::string version_text() const;
  // "ncclSend: unhandled system error (last message of NCCL's log)".
  Status failure(const char* function, NcclResult result, NcclCommunicator comm) const;

  NcclResult (*get_version)(int*) = nullptr;
  const char* (*get_error_string)(NcclResult) = nullptr;
  const char* (*get_last_error)(NcclCommunicator) = nullptr;
  NcclResult (*get_unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*init_rank_config)(NcclCommunicator*, int ranks, NcclUniqueId, int rank,
                                 NcclConfig*) = nullptr;
  NcclResult (*destroy)(NcclCommunicator) = nullptr;
  NcclResult (*abort)(NcclCommunicator) = nullptr;
  NcclResult (*get_async_error)(NcclCommunicator, NcclResult*) = nullptr;
  NcclResult (*count)(NcclCommunicator, int*) = nullptr;
  NcclResult (*user_rank)(NcclCommunicator, int*) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(const void*, size_t count, NcclType, int peer, NcclCommunicator,
                     void* stream) = nullptr;
  NcclResult (*recv)(void*, size_t count, NcclType, int peer, NcclCommunicator,
                     void* stream) = nullptr;
};

}  // namespace nvfp4_moe::internal
