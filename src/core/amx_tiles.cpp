#include "core/amx_tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nvfp4_moe::internal {
namespace {

bool ask() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1 << 22, kTile = 1 << 24;  // of edx; clang 14 knows no names for them
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBf16) != 0 &&
         (edx & kTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool bf16_tiles_run_on_host() {
  static const bool runs = ask();
  return runs;
}

}  // namespace nvfp4_moe::internal
