// The owner's functions of DeviceRecords.
#pragma once

#include "backend/device_exchange.h"

namespace nvfp4_moe::cuda {

Status take_records(const StepContext& owner, const LayerSteps& steps, const TakeRecords& call);
Status pack_rows(int device, const PackRows& call, void* stream);

}  // namespace nvfp4_moe::cuda
