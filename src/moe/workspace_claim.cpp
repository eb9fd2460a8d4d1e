#include "moe/workspace_claim.h"

namespace nvfp4_moe {

constinit std::array<WorkspaceClaim::Bucket, size_t{1} << WorkspaceClaim::kBucketBits> WorkspaceClaim::buckets_{};

Status WorkspaceClaim::busy() {
  return {Code::kBusy, "workspace: expected one that no other run is using, got one in use"};
}

}  // namespace nvfp4_moe
