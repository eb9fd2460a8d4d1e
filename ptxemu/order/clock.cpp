// Vector clocks: building, joining and caching them.
#include "order/clock.h"

#include <algorithm>

namespace ptxemu::ordering {
namespace {

bool covers(const Slots& a, const Slots& b) {
  if (b.size() > a.size()) return false;
  for (size_t i = 0; i < b.size(); ++i)
    if (b[i].done > a[i].done || b[i].async > a[i].async || b[i].tensor > a[i].tensor) return false;
  return true;
}
bool covers(const Clock& a, const Clock& b) {
  if (!a.launches.covers(b.launches)) return false;
  for (const Part& part : b.parts) {
    const Part* own = a.find(part.cta);
    if (!own || (own->slots != part.slots && !covers(*own->slots, *part.slots))) return false;
  }
  return true;
}
void raise(Slots& a, const Slots& b) {
  if (a.size() < b.size()) a.resize(b.size());
  for (size_t i = 0; i < b.size(); ++i) {
    a[i].done = std::max(a[i].done, b[i].done);
    a[i].async = std::max(a[i].async, b[i].async);
    a[i].tensor = std::max(a[i].tensor, b[i].tensor);
  }
}

// A cache of joins, by the addresses of the joined clocks. It keeps those clocks alive, so that no
// other clock can get their addresses.
struct Remembered {
  ClockRef a, b, result;
  uint32_t number = 0;
};
constexpr size_t kRemembered = 1024;
std::vector<Remembered>& memory() {
  static auto* all = new std::vector<Remembered>(kRemembered);
  return *all;
}
Remembered& place(const ClockRef& a, const ClockRef& b, uint32_t number) {
  const uint64_t x = reinterpret_cast<uint64_t>(a.get()) / 16,
                 y = reinterpret_cast<uint64_t>(b.get()) / 16;
  return memory()[(x * 0x9e3779b97f4a7c15ull ^ y * 0xc2b2ae3d27d4eb4full ^
                   number * 0x165667b19e3779f9ull) >>
                      32 &
                  (kRemembered - 1)];
}
template <class F>
ClockRef remembered(const ClockRef& a, const ClockRef& b, uint32_t number, F make) {
  Remembered& known = place(a, b, number);
  if (known.result && known.a == a && known.b == b && known.number == number) return known.result;
  known = {a, b, make(), number};
  return known.result;
}

enum : uint32_t { kJoin, kRaise };

}  // namespace

bool Launches::has(uint32_t thread, uint32_t number) const {
  if (thread >= threads_.size()) return false;
  const Ended& one = threads_[thread];
  return number <= one.before ||
         (number - one.before <= 32 && one.chain >> (number - one.before - 1) & 1);
}

void Launches::add(uint32_t thread, uint32_t before, uint32_t chain) {
  if (before == 0 && chain == 0) return;
  if (thread >= threads_.size()) threads_.resize(thread + 1);
  Ended& one = threads_[thread];
  if (one.before < before)
    one = {before, chain};
  else if (one.before == before)
    one.chain |= chain;
}

void Launches::add(const Launches& other) {
  for (uint32_t thread = 0; thread < other.threads_.size(); ++thread)
    add(thread, other.threads_[thread].before, other.threads_[thread].chain);
}

bool Launches::covers(const Launches& other) const {
  for (uint32_t thread = 0; thread < other.threads_.size(); ++thread) {
    const Ended &more = other.threads_[thread],
                own = thread < threads_.size() ? threads_[thread] : Ended{};
    if (more.before > own.before || (more.before == own.before && more.chain & ~own.chain))
      return false;
  }
  return true;
}

const Part* Clock::find(uint32_t cta) const {
  const auto at = std::lower_bound(parts.begin(), parts.end(), cta,
                                   [](const Part& part, uint32_t x) { return part.cta < x; });
  return at != parts.end() && at->cta == cta ? &*at : nullptr;
}

Slots& Gather::own_slots(uint32_t cta, size_t size) {
  auto at = std::lower_bound(parts_.begin(), parts_.end(), cta,
                             [](const Piece& piece, uint32_t x) { return piece.part.cta < x; });
  if (at == parts_.end() || at->part.cta != cta)
    at = parts_.insert(at, {{cta, std::make_shared<Slots>()}, true});
  else if (!at->own)
    *at = {{cta, std::make_shared<Slots>(*at->part.slots)}, true};
  if (at->part.slots->size() < size) at->part.slots->resize(size);
  return *at->part.slots;
}

void Gather::add(const ClockRef& clock) {
  if (!clock) return;
  for (const ClockRef& seen : seen_)
    if (seen == clock) return;
  seen_[next_seen_++ % seen_.size()] = clock;
  launches_.add(clock->launches);
  for (const Part& part : clock->parts) add(part);
}

void Gather::add(const Part& part) {
  auto at = std::lower_bound(parts_.begin(), parts_.end(), part.cta,
                             [](const Piece& piece, uint32_t x) { return piece.part.cta < x; });
  if (at == parts_.end() || at->part.cta != part.cta)
    parts_.insert(at, {part, false});
  else if (at->part.slots != part.slots && !covers(*at->part.slots, *part.slots))
    raise(own_slots(part.cta, part.slots->size()), *part.slots);
}

void Gather::set(uint32_t cta, uint32_t slot, Known known) {
  Known& at = own_slots(cta, slot + 1)[slot];
  at.done = std::max(at.done, known.done);
  at.async = std::max(at.async, known.async);
  at.tensor = std::max(at.tensor, known.tensor);
}

ClockRef Gather::take() {
  auto clock = std::make_shared<Clock>();
  clock->launches = std::move(launches_);
  for (Piece& piece : parts_) clock->parts.push_back(std::move(piece.part));
  *this = {};
  return clock;
}

ClockRef join(const ClockRef& a, const ClockRef& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  return remembered(a, b, kJoin, [&]() -> ClockRef {
    if (covers(*a, *b)) return a;
    if (covers(*b, *a)) return b;
    Gather both;
    both.add(a);
    both.add(b);
    return both.take();
  });
}

ClockRef raised(const ClockRef& clock) {
  return remembered(clock, nullptr, kRaise, [&] {
    auto result = std::make_shared<Clock>(*clock);
    for (Part& part : result->parts) {
      part.slots = std::make_shared<Slots>(*part.slots);
      for (Known& known : *part.slots) known.async = std::max(known.async, known.done);
    }
    return result;
  });
}

void clear_clocks() { memory().assign(kRemembered, {}); }

}  // namespace ptxemu::ordering
