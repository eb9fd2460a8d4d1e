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
#include "moe/env.h"

namespace nvfp4_moe::internal {

std::span<const Backend* const> backends();
const Backend* find_backend(std::string_view name);  // null if there is none
std::string backend_names();  // "auto, cpu, cpu:avx2, ..., reference", for messages

// Warnings about a backend with activations of a format, a sentence each; mostly none.
std::vector<std::string> backend_notes(const Backend& backend, ActivationFormat format);

// The name that an option stands for: NVFP4_MOE_BACKEND if it is "auto" and the variable is set.
// kInvalidArgument, naming the option or the variable, if this build has no backend of that name.
Result<std::string> forced_backend(const std::string& option, const Env& env,
                                   const char* option_name = "backend");

// The backend for a layer: `forced` by name, or by priority if it is "auto". A forced one that
// declines the layer is kUnsupported with its reason: there is no falling back.
Result<const Backend*> choose_backend(const MoeConfig& config, const DeviceFacts& device,
                                      const std::string& forced);

// Memory functions of a kind of device; null for hosts, and if this build has no backend for it.
const DeviceMemory* device_memory(DeviceKind kind);
// The format functions on arrays there; null if device_memory is.
const DeviceFormats* device_formats(DeviceKind kind);
// A router's selection on arrays there; null in the same cases.
const DeviceRouter* device_router(DeviceKind kind);
// The functions of one rank of several; null in the same cases.
const DeviceRanks* device_ranks(DeviceKind kind);
// The functions of ranks over peer memory; null in the same cases.
const DevicePeers* device_peers(DeviceKind kind);
// The topology of such devices; null in the same cases.
const DeviceTopology* device_topology(DeviceKind kind);
// Experts replaced in the order of a stream there; null if device_memory is.
const DeviceReplacement* device_replacement(DeviceKind kind);
// The packet functions of all_to_all; null in the same cases.
const DevicePackets* device_packets(DeviceKind kind);

}  // namespace nvfp4_moe::internal
