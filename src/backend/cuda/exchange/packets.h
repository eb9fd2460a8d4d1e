// The functions of DevicePackets that run on the expert rank (unpack_packets.cu).
#pragma once

#include "backend/device_exchange.h"

namespace nvfp4_moe::internal::cuda {

Status unpack_packets(const StepContext& expert, const LayerSteps& steps,
                      const UnpackPackets& call);
Status pack_rows(int device, const PackRows& call, void* stream);

}  // namespace nvfp4_moe::internal::cuda
