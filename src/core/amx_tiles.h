// Whether this process may use AMX tiles of bf16.
#pragma once

namespace nvfp4_moe::internal {

// Checks CPUID and asks Linux (5.16 and later) for permission on the first call. The permission
// holds for every thread. Always false on other hosts.
bool bf16_tiles_run_on_host();

}  // namespace nvfp4_moe::internal
