// The list of this build's backends, highest priority first. Written once, here and in registry.cpp.
#pragma once

#include <span>
#include <string_view>

#include "backend/backend.h"

namespace nvfp4_moe {

std::span<const Backend* const> backends();
const Backend* find_backend(std::string_view name);  // null where there is none

}  // namespace nvfp4_moe
