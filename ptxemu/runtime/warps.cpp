// Synchronizing lanes: the last one to arrive computes the results of all.
#include <algorithm>
#include <cstring>

#include "runtime/control.h"

namespace ptxemu {

// Lanes with the same mask at the same kind of instruction belong together. By definition `aligned`
// instructions need the whole warp at the same instruction.
void meet(Thread* T, uint32_t mask, const char* what, void* mine, bool aligned, Together call,
          const void* object) {
  Warp* warp = T->warp;
  if (aligned) {
    mask = warp->born;
    if (mask & ~warp->alive) fault(T, "an aligned instruction after lanes of the warp have ended");
    for (const Rendezvous& other : warp->rendezvous)
      if (other.mask == mask && other.what && (other.what != what || other.line != T->line) &&
          std::strncmp(other.what, "aligned", 7) == 0)
        fault(T, "lanes of a warp are at different aligned instructions");
  }
  if (!(mask >> T->lane & 1)) fault(T, "a lane that its own mask does not name");
  mask &= warp->alive | 1u << T->lane;
  Rendezvous* place = nullptr;
  for (Rendezvous& other : warp->rendezvous)
    if (other.mask == mask && other.what == what && !(other.arrived >> T->lane & 1)) place = &other;
  for (Rendezvous& other : warp->rendezvous)
    if (!place && !other.mask) {
      place = &other;
      *place = Rendezvous{mask, 0, T->line, what, {}};
    }
  if (!place) fault(T, "too many groups of lanes wait in one warp");
  place->arrived |= 1u << T->lane;
  place->lanes[T->lane] = mine;
  if (place->arrived != mask) {
    park(T, what, mask);
    return;
  }
  Rendezvous met = *place;
  place->mask = 0;
  call(object, met.lanes, mask);
  warp->ready |= mask & ~(1u << T->lane);
}

namespace {

template <class S, class F>
void each(void** lanes, uint32_t mask, F of) {
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) of(lane, *static_cast<S*>(lanes[lane]));
}

}  // namespace

void warp_sync(Thread* T, uint32_t mask) {
  meet(T, mask, "bar.warp.sync", nullptr, false,
       [=](void**, uint32_t present) { check_warp_sync(T, present); });
}

// Running lanes are not in lockstep here. A mask with only this lane is a legal value.
uint32_t active_mask(Thread* T) { return 1u << T->lane; }

uint32_t shuffle(Thread* T, Shuffle mode, uint32_t value, uint32_t by, uint32_t clamp,
                 uint32_t mask, bool& in_range) {
  struct Lane {
    uint32_t value, by, clamp, result;
    bool in_range;
  } mine{value, by, clamp, 0, false};
  static constexpr const char* kNames[] = {"shfl.idx", "shfl.up", "shfl.down", "shfl.bfly"};
  meet(T, mask, kNames[static_cast<int>(mode)], &mine, false, [&](void** lanes, uint32_t present) {
    each<Lane>(lanes, present, [&](uint32_t lane, Lane& x) {
      const uint32_t amount = x.by & 31, bound = x.clamp & 31,
                     segment = planted(Fault::shfl_width) ? 0 : x.clamp >> 8 & 31;
      const uint32_t highest = (lane & segment) | (bound & ~segment), lowest = lane & segment;
      uint32_t from = lane;
      if (mode == Shuffle::kUp)
        from = lane - amount,
        x.in_range = static_cast<int32_t>(from) >= static_cast<int32_t>(highest);
      else if (mode == Shuffle::kDown)
        from = lane + amount, x.in_range = from <= highest;
      else if (mode == Shuffle::kBfly)
        from = lane ^ amount, x.in_range = from <= highest;
      else
        from = lowest | (amount & ~segment), x.in_range = from <= highest;
      if (!x.in_range) from = lane;
      if (!(present >> from & 1)) fault(T, "shfl reads from a lane that its mask does not name");
      x.result = static_cast<Lane*>(lanes[from])->value;
    });
  });
  in_range = mine.in_range;
  return mine.result;
}

uint32_t vote(Thread* T, Vote kind, bool predicate, uint32_t mask) {
  struct Lane {
    bool predicate;
    uint32_t result;
  } mine{predicate, 0};
  static constexpr const char* kNames[] = {"vote.ballot", "vote.any", "vote.all", "vote.uni"};
  meet(T, mask, kNames[static_cast<int>(kind)], &mine, false, [&](void** lanes, uint32_t present) {
    uint32_t ballot = 0;
    each<Lane>(lanes, present, [&](uint32_t lane, Lane& x) {
      ballot |= static_cast<uint32_t>(x.predicate) << lane;
    });
    uint32_t result = kind == Vote::kAny   ? ballot != 0
                      : kind == Vote::kAll ? ballot == present
                                           : ballot == 0 || ballot == present;
    if (kind == Vote::kBallot)
      result = planted(Fault::ballot_predicate) ? present & ~ballot : ballot;
    each<Lane>(lanes, present, [&](uint32_t, Lane& x) { x.result = result; });
  });
  return mine.result;
}

uint32_t match_any(Thread* T, uint64_t value, uint32_t mask) {
  struct Lane {
    uint64_t value;
    uint32_t result;
  } mine{value, 0};
  meet(T, mask, "match.any", &mine, false, [](void** lanes, uint32_t present) {
    each<Lane>(lanes, present, [&](uint32_t lane, Lane& x) {
      each<Lane>(lanes, present, [&](uint32_t other, const Lane& y) {
        x.result |= static_cast<uint32_t>(x.value == y.value) << other;
      });
      if (planted(Fault::match_any_one)) x.result = 1u << lane;
    });
  });
  return mine.result;
}

uint32_t match_all(Thread* T, uint64_t value, uint32_t mask, bool& equal) {
  const uint32_t same = match_any(T, value, mask);
  equal = vote(T, Vote::kAll, same == mask, mask) != 0;
  return equal ? mask : 0;
}

uint32_t reduce(Thread* T, Reduction kind, uint32_t value, uint32_t mask) {
  struct Lane {
    uint32_t value, result;
  } mine{value, 0};
  meet(T, mask, "redux", &mine, false, [&](void** lanes, uint32_t present) {
    const uint32_t first = static_cast<uint32_t>(__builtin_ctz(present));
    uint32_t result = static_cast<Lane*>(lanes[first])->value;
    each<Lane>(lanes, present & ~(1u << first), [&](uint32_t, const Lane& x) {
      const int32_t a = static_cast<int32_t>(result), b = static_cast<int32_t>(x.value);
      switch (planted(Fault::redux_signed) && kind == Reduction::kMinS32 ? Reduction::kMinU32
                                                                         : kind) {
        case Reduction::kAdd: result += x.value; break;
        case Reduction::kAnd: result &= x.value; break;
        case Reduction::kOr: result |= x.value; break;
        case Reduction::kXor: result ^= x.value; break;
        case Reduction::kMinU32: result = std::min(result, x.value); break;
        case Reduction::kMaxU32: result = std::max(result, x.value); break;
        case Reduction::kMinS32: result = static_cast<uint32_t>(std::min(a, b)); break;
        case Reduction::kMaxS32: result = static_cast<uint32_t>(std::max(a, b)); break;
        default: break;
      }
    });
    each<Lane>(lanes, present, [&](uint32_t, Lane& x) { x.result = result; });
  });
  return mine.result;
}

// Without .NaN a lane's NaN counts only if all are NaN.
uint32_t reduce_floats(Thread* T, Reduction kind, bool absolute, bool nan, uint32_t value,
                       uint32_t mask) {
  if (absolute && !planted(Fault::redux_abs)) value &= 0x7fffffffu;
  meet(T, mask, "redux", &value, false, [=](void** lanes, uint32_t present) {
    uint32_t result = 0x7fffffffu;
    bool any_nan = false;
    each<uint32_t>(lanes, present, [&](uint32_t, const uint32_t& x) {
      any_nan |= is_nan_bits(x);
      const float before = as_float(result), next = as_float(x);
      result = float_bits(kind == Reduction::kMinF32 ? minimum_number(before, next)
                                                     : maximum_number(before, next));
    });
    if (nan && any_nan) result = 0x7fffffffu;
    each<uint32_t>(lanes, present, [&](uint32_t, uint32_t& x) { x = canonical_nan(result); });
  });
  return value;
}

bool elect(Thread* T, uint32_t mask, uint32_t& leader) {
  uint32_t chosen = 0;
  meet(T, mask, "elect.sync", &chosen, false, [](void** lanes, uint32_t present) {
    each<uint32_t>(lanes, present, [&](uint32_t, uint32_t& x) {
      x = static_cast<uint32_t>(__builtin_ctz(present));
    });
  });
  leader = chosen;
  return chosen == T->lane;
}

namespace {

constexpr uint32_t kRegisterFile = 65536;

// The registers that a thread may have when the kernel starts: ptxas gives it no more than its
// largest cta can have. 0 if it has no bounds; then setmaxnreg has no effect.
uint32_t launched_registers(const KernelInfo& info) {
  const uint32_t threads = info.max_threads[0] * info.max_threads[1] * info.max_threads[2];
  if (!threads && !info.max_registers) return 0;
  uint32_t most = 256;
  if (threads) most = std::min(most, kRegisterFile / ((threads + 31) / 32 * 32) / 8 * 8);
  if (info.max_registers) most = std::min(most, (info.max_registers + 7) / 8 * 8);
  return most;
}

// Whether the cta's registers, those of warps that have ended included, suffice if this warp has
// that many.
bool registers_suffice(const Warp* warp, uint32_t launched, uint32_t count) {
  uint64_t owned = 0, all = 0;
  for (const Warp& other : warp->cta->warps) {
    all += launched;
    if (&other == warp)
      owned += count;
    else if (other.alive)
      owned += other.registers ? other.registers : launched;
  }
  return owned <= all;
}

}  // namespace

void wake_for_registers(Cta* cta) {
  for (Thread* thread : cta->register_waiting) wake(thread);
  cta->register_waiting.clear();
}

// Moves registers between a warp and the cta's pool. .inc waits until the pool has them.
void set_max_registers(Thread* T, uint32_t count, bool increase) {
  if (count < 24 || count > 256 || count % 8)
    fault(T, "setmaxnreg: expected 24 to 256 registers in steps of 8");
  const uint32_t launched = launched_registers(*T->cta->cluster->launch->kernel);
  meet(T, 0, "aligned setmaxnreg", nullptr, true, [=](void**, uint32_t) {
    const uint32_t before = T->warp->registers ? T->warp->registers : launched;
    if (!launched || planted(Fault::registers_unchecked)) return;
    if (!increase && count > before)
      fault(T, "setmaxnreg.dec to more registers than the warp's threads have");
    if (increase && T->warp->registers && count < before)
      fault(T, "setmaxnreg.inc to fewer registers than the warp's threads have");
    if (increase) return;
    T->warp->registers = count;
    note_progress();
    wake_for_registers(T->cta);
  });
  if (!increase || !launched || planted(Fault::registers_unchecked)) return;
  while (T->warp->registers != count) {
    if (registers_suffice(T->warp, launched, count)) {
      T->warp->registers = count;
      note_progress();
    } else {
      T->cta->register_waiting.push_back(T);
      park(T, "the cta's registers, a thread's setmaxnreg.inc to", count);
    }
  }
}

}  // namespace ptxemu
