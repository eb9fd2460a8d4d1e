#include "moe/dispatch_side.h"

#include <string>

namespace nvfp4_moe {

Result<DeviceReport> DeviceReport::make(const MoeLayer& layer) {
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  DeviceReport made;
  const WireReport none;
  NVFP4_MOE_ASSIGN(made.report_, memory.allocate(sizeof(WireReport), device, "report of all_to_all"));
  NVFP4_MOE_TRY(memory.to_device(device, made.report_.data(), &none, sizeof(none), nullptr));
  return made;
}

Result<WireReport> DeviceReport::take(const MoeLayer& layer, void* stream) const {
  const DeviceMemory& memory = *layer.backend().memory;
  const int device = layer.weights().device;
  WireReport seen;
  const WireReport none;
  NVFP4_MOE_TRY(memory.to_host(device, &seen, report_.data(), sizeof(seen), stream));
  if (seen.runs > 0 || seen.wrong > 0)
    NVFP4_MOE_TRY(memory.to_device(device, report_.data(), &none, sizeof(none), stream));
  return seen;
}

Status DeviceReport::wrong_records(int rank, uint64_t count) {
  return io_error("dispatch: expected records of slots of rank " + std::to_string(rank) + ", got " +
                  std::to_string(count) + " others; out is NaN");
}

}  // namespace nvfp4_moe
