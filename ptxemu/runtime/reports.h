// Parts of reports.
#pragma once

#include <string>

#include "runtime/machine.h"

namespace ptxemu {

std::string coordinates(const uint32_t* x);      // (x,y,z)
std::string headline(const KernelInfo* kernel);  // " in kernel NAME" and the line's end

}  // namespace ptxemu
