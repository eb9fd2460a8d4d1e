// Whether a planted fault is active. Without PTXEMU_PLANT, in every normal build, this is a
// constant.
#pragma once

namespace ptxemu {

enum class Fault {
  kNone,
#define PLANTED(name, what) name,
#include "runtime/planted.def"
#undef PLANTED
};

#ifdef PTXEMU_PLANT
extern Fault planted_fault;
inline bool planted(Fault fault) { return fault == planted_fault; }
#else
constexpr bool planted(Fault) { return false; }
#endif

}  // namespace ptxemu
