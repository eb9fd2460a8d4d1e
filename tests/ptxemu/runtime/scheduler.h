// Runs launches: a chain of them, of which each may begin before its predecessor ends where both ask for that.
#pragma once

#include <string>
#include <vector>

#include "runtime/machine.h"

namespace ptxemu {

// Runs the chain to its end. Throws LaunchFailure.
void run_chain(std::vector<Launch>& chain);

}  // namespace ptxemu
