// Times graphs by the device's own clock, and measures a device's peak rates (DeviceMeasures).
#pragma once

#include <functional>
#include <vector>

#include "core/status.h"

namespace nvfp4_moe::internal::cuda {

Result<std::vector<double>> time_graph(int device,
                                       const std::function<Status(void* stream)>& enqueue,
                                       double seconds, int64_t most_replays);
Result<double> read_rate(int device);
Result<double> product_rate(int device);

// Work per second: the best of several launches that each do `work`, after one untimed launch.
Result<double> best_rate(int device, double work, const std::function<void(void* stream)>& launch);

}  // namespace nvfp4_moe::internal::cuda
