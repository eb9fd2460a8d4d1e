// Whether this process may use AMX tiles of bf16.
#pragma once

namespace nvfp4_moe::internal {

// CPUID, and Linux's permission (5.16 and later), which is asked for on the first call and holds
// for every thread. Never on other hosts.
bool bf16_tiles_run_on_host();

}  // namespace nvfp4_moe::internal
