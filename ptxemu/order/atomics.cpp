// Atomic operations and fences: what is released at an address, and which threads acquire it.
//
// Every later acquire that reads the released value, or an update of it, synchronizes with the
// release if both scopes include the other thread. A fence turns later relaxed operations into
// releases of everything before it, and completes the acquire of earlier relaxed reads.
#include "order/state.h"

namespace ptxemu {

using namespace ordering;

namespace {

// The scope that two threads of these ctas need to synchronize. Host threads are ranks with
// separate devices.
Scope between(const OrderCta& a, const Released& one) {
  if (a.launch->thread != one.thread)
    return planted(Fault::clock_system) ? Scope::kGpu : Scope::kSys;
  return a.number == one.cta        ? Scope::kCta
         : a.cluster == one.cluster ? Scope::kCluster
                                    : Scope::kGpu;
}

void add_release(uint64_t address, const OrderCta& cta, Scope scope, const ClockRef& clock) {
  if (!clock) return;
  const uint32_t thread = cta.launch->thread;
  auto& all = checker.released[address];
  for (Released& one : all)
    if (one.scope == scope && one.thread == thread &&
        (scope >= Scope::kGpu || one.cta == cta.number ||
         (scope == Scope::kCluster && one.cluster == cta.cluster))) {
      one.clock = join(one.clock, clock);
      return;
    }
  all.push_back({scope, cta.number, cta.cluster, thread, clock});
}

}  // namespace

void check_strong(Thread* T, const uint8_t* at, uint32_t size, Strong what, Semantics semantics,
                  Scope scope) {
  if (!T->order || is_local(T, at)) return;
  const uint64_t address = reinterpret_cast<uint64_t>(at);
  OrderThread& o = *T->order;
  if (what != Strong::kWrite) {
    const auto found = checker.released.find(address);
    if (found != checker.released.end())
      for (const Released& one : found->second) {
        const Scope needed = between(*o.cta, one);
        if ((one.scope < needed || scope < needed) && !planted(Fault::clock_scope)) continue;
        if (semantics == Semantics::kAcquire || semantics == Semantics::kAcqRel ||
            planted(Fault::clock_relaxed))
          acquire(T, one.clock);
        else
          o.unacquired[static_cast<int>(needed)].add(one.clock);
      }
  }
  Record now = stamp(T, what != Strong::kRead, Proxy::kGeneric);
  now.strong = true, now.scope = static_cast<uint8_t>(scope);
  touch(T, at, size, now);
  if (what == Strong::kRead) return;
  // A store replaces what is released there, an update adds to it.
  if (what == Strong::kWrite) checker.released.erase(address);
  if (semantics == Semantics::kRelease || semantics == Semantics::kAcqRel ||
      planted(Fault::clock_relaxed)) {
    add_release(address, *o.cta, scope, release(T));
    return;
  }
  for (Scope fenced : {Scope::kCta, Scope::kCluster, Scope::kGpu, Scope::kSys}) {
    const ClockRef& clock = o.fences[static_cast<int>(fenced)];
    if (fenced <= scope) add_release(address, *o.cta, fenced, clock);
  }
}

void check_fence(Thread* T, Scope scope) {
  if (!T->order) return;
  OrderThread& o = *T->order;
  const int widest = static_cast<int>(scope);
  for (int i = 0; i <= widest; ++i)
    if (!o.unacquired[i].empty()) acquire(T, o.unacquired[i].take());
  const ClockRef clock = release(T);
  for (int i = 0; i <= widest; ++i) o.fences[i] = clock;
  if (planted(Fault::clock_proxy)) check_fence_proxy(T);
}

// Orders everything that the thread knows of or has done before later work of the asynchronous
// proxy.
void check_fence_proxy(Thread* T) {
  if (!T->order) return;
  OrderThread& o = *T->order;
  o.know(raised(o.base));
  o.fenced = o.number++;
  for (OwnAgent& agent : o.agents) agent.known.async = agent.known.done;
  check_fence_mbarrier_init(T);
}

void check_fence_mbarrier_init(Thread* T) {
  if (!T->order) return;
  for (const uint64_t* at : T->order->inits)
    if (Mbarrier* barrier = known_mbarrier(at)) barrier->fenced = true;
  T->order->inits.clear();
}

void check_fence_tensor(Thread* T, bool after) {
  if (!T->order) return;
  OrderThread& o = *T->order;
  if (after) o.tensor_base = o.tensor_seen.empty() ? o.base : join(o.base, o.tensor_seen.take());
  for (OwnAgent& agent : o.agents)
    if (!after) agent.known.tensor = agent.known.done;
}

}  // namespace ptxemu
