// Limits of a launch that the kernel's directives or the device set.
#pragma once

#include <string>

#include "cudart/device.h"

namespace ptxemu {

struct LaunchLimits {
  const KernelInfo& info;
  const std::string& text;  // the kernel's PTX
  bool non_portable_clusters;
};
// Why hardware refuses the launch; "" if it does not.
std::string launch_refusal(const LaunchLimits& limits, const LaunchShape& shape,
                           const uint32_t* cluster);

}  // namespace ptxemu
