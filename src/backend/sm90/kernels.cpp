#include "backend/sm90/kernels.h"

#include <array>

#include "backend/sm90/config.h"

namespace nvfp4_moe::internal::sm90 {
namespace {

// In the order of kGemmConfigs.
constexpr std::array<const KernelEntry*, kGemmConfigs.size()> kEntries = {
    &kM256N8,           &kM512N8,           &kM512N16,       &kM512N32,    &kM256N64,
    &kM512N8OrWide,     &kM512N16OrWide,    &kM512N32OrWide, &kM256N128,   &kFp8M256N8,
    &kFp8M512N8,        &kFp8M512N16,       &kFp8M512N32,    &kFp8M256N64, &kFp8M512N8OrWide,
    &kFp8M512N16OrWide, &kFp8M512N32OrWide, &kFp8M256N128,   &kFp8M128N256};

}  // namespace

const KernelEntry& kernel_entry(size_t config) { return *kEntries[config]; }

}  // namespace nvfp4_moe::internal::sm90
