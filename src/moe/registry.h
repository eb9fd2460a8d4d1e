// The list of this build's backends, highest priority first. Written once, in registry.cpp.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "backend/device_exchange.h"
#include "backend/device_functions.h"
#include "backend/device_peers.h"
#include "backend/device_replacement.h"
#include "backend/device_sampling.h"
#include "backend/device_streams.h"
#include "moe/env.h"

namespace nvfp4_moe::internal {

std::span<const Backend* const> backends();
const Backend* find_backend(std::string_view name);  // null if there is none
std::string backend_names();  // "auto, cpu, cpu:avx2, ..., reference", for messages
// The end of a message about a name that no backend of this build has: "expected one of ..., got
// ...".
std::string expected_backend(const std::string& name);

// Warnings about a backend with this activation format, one sentence each; usually empty.
std::vector<std::string> backend_notes(const Backend& backend, ActivationFormat format);

// The backend name for an option: NVFP4_MOE_BACKEND if the option is "auto" and the variable is
// set. kInvalidArgument, naming the option or the variable, if this build has no such backend.
Result<std::string> forced_backend(const std::string& option, const Env& env,
                                   const char* option_name = "backend");

// Memory functions for a kind of device; null for hosts, and if this build has no backend for it.
const DeviceMemory* device_memory(DeviceKind kind);
// The format functions on device arrays; null if device_memory is.
const DeviceFormats* device_formats(DeviceKind kind);
// A router's selection on device arrays; null if device_memory is.
const DeviceRouter* device_router(DeviceKind kind);
// The functions of a layer over ranks; null if device_memory is.
const DeviceRanks* device_ranks(DeviceKind kind);
// The functions of ranks over peer memory; null if device_memory is.
const DevicePeers* device_peers(DeviceKind kind);
// Replaces experts in stream order; null if device_memory is.
const DeviceReplacement* device_replacement(DeviceKind kind);
// Samples tokens of runs for NVFP4_MOE_CHECK; null if device_memory is.
const DeviceSampling* device_sampling(DeviceKind kind);
// Streams that wait for no others; null if device_memory is.
const DeviceStreams* device_streams(DeviceKind kind);
// The packet functions of all_to_all; null if device_memory is.
const DevicePackets* device_packets(DeviceKind kind);

}  // namespace nvfp4_moe::internal
