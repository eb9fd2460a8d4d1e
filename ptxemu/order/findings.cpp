// Reports on two unordered accesses: both accesses, their places, and what would order them.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <sstream>

#include "order/state.h"
#include "runtime/control.h"
#include "runtime/memory_map.h"
#include "runtime/reports.h"

namespace ptxemu {

using namespace ordering;

namespace {

constexpr uint64_t kMostPrinted = 24;

std::map<const KernelInfo*, const std::string*>& sources() {
  static auto* all = new std::map<const KernelInfo*, const std::string*>;
  return *all;
}

// One line of a kernel's PTX; empty if the text is not available.
std::string source_line(const KernelInfo* kernel, uint32_t line) {
  const auto found = sources().find(kernel);
  if (found == sources().end()) return "";
  size_t at = 0;
  for (uint32_t i = 1; i < line && at != std::string::npos; ++i)
    at = found->second->find('\n', at) + 1;
  const size_t end = found->second->find('\n', at);
  std::string text = found->second->substr(at, end - at);
  text.erase(0, text.find_first_not_of(" \t"));
  return text.substr(0, 150);
}

std::string cta_text(const OrderCta& cta) { return "cta " + coordinates(cta.ctaid); }

std::string thread_text(const OrderCta& cta, uint32_t linear) {
  const uint32_t tid[3] = {linear % cta.block[0], linear / cta.block[0] % cta.block[1],
                           linear / cta.block[0] / cta.block[1]};
  return "thread " + coordinates(tid) + " of " + cta_text(cta);
}

std::string hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

const OrderLaunch& launch_of(const Record& record) { return *checker.ctas[record.cta]->launch; }

// Who made an access.
std::string actor(const Record& record) {
  const OrderCta& cta = *checker.ctas[record.cta];
  const Slot slot = cta.slots[record.slot];
  const std::string warp = "warp " + std::to_string(slot.index) + " of " + cta_text(cta);
  switch (slot.kind) {
    case SlotKind::kThread: return thread_text(cta, slot.index);
    case SlotKind::kCopyAsync: return "cp.async of " + thread_text(cta, slot.index);
    case SlotKind::kBulkRead:
    case SlotKind::kBulkWrite: return "bulk store of " + thread_text(cta, slot.index);
    case SlotKind::kProducts: return "wgmma of " + warp;
    case SlotKind::kQueue: return "tcgen05 queue of " + thread_text(cta, slot.index);
    case SlotKind::kTensorLoad: return "tcgen05.ld of " + warp;
    case SlotKind::kTensorStore: return "tcgen05.st of " + warp;
    case SlotKind::kMbarrier:
      return "copy that completes phase " + std::to_string(record.number - 1) +
             " of the mbarrier at " + hex(slot.index) + " of " + cta_text(cta);
  }
  return "";
}

// The name of the wait for an agent.
const char* wait_for(SlotKind kind, bool write) {
  switch (kind) {
    case SlotKind::kCopyAsync:
      return "a cp.async.wait_group (or mbarrier) of its thread, and a barrier for other threads";
    case SlotKind::kBulkRead:
      return "cp.async.bulk.wait_group.read of its thread, and a barrier for other threads";
    case SlotKind::kBulkWrite:
      return "cp.async.bulk.wait_group of its thread, and a barrier for other threads";
    case SlotKind::kProducts:
      return "wgmma.wait_group of its warp, and a barrier for other threads";
    case SlotKind::kQueue: return "tcgen05.commit, and a wait for its mbarrier";
    case SlotKind::kTensorLoad:
      return "tcgen05.wait::ld of its warp, and a barrier for other threads";
    case SlotKind::kTensorStore:
      return "tcgen05.wait::st of its warp, and a barrier for other threads";
    case SlotKind::kMbarrier: return "a wait for the phase of the mbarrier that its bytes complete";
    case SlotKind::kThread: break;
  }
  return write ? "a barrier, or a release after it and an acquire that sees that, at a scope that "
                 "has both threads in it"
               : "a barrier, or a release after it and an acquire that sees that: what was read "
                 "may be overwritten";
}

std::string missing(Verdict verdict, const Record& before, const Record& now) {
  const SlotKind kind = checker.ctas[before.cta]->slots[before.slot].kind;
  switch (verdict) {
    case Verdict::kNoProxyFence:
      return "fence.proxy.async between the write by the generic proxy and this access by the "
             "asynchronous one";
    case Verdict::kNoFenceBefore:
      return "tcgen05.fence::before_thread_sync after it, before the barrier";
    case Verdict::kNoFenceAfter:
      return "tcgen05.fence::after_thread_sync after the barrier, before this access";
    case Verdict::kNotCoherent: return "a load without .nc: this launch writes there";
    case Verdict::kNoInitFence:
      return "fence.mbarrier_init or fence.proxy.async after mbarrier.init";
    default: break;
  }
  const OrderLaunch &first = launch_of(before), &then = launch_of(now);
  if (first.thread != then.thread)
    return "a release after it and an acquire that sees that, both at the scope of the system: the "
           "two launches are "
           "those of "
           "two host threads, and neither had ended when the other was enqueued";
  if (first.number != then.number)
    return first.number < then.number ? "griddepcontrol.wait, by this thread or one that it is "
                                        "ordered after: that launch may still run"
                                      : "griddepcontrol.wait in the later launch before its "
                                        "access: this one may still run";
  if (before.strong != now.strong && kind == SlotKind::kThread)
    return std::string(wait_for(kind, before.write)) + " (one of the two is not atomic)";
  return wait_for(kind, before.write);
}

std::string place(uint64_t address) {
  for (const auto& cta : checker.ctas) {
    const uint64_t shared = reinterpret_cast<uint64_t>(cta->shared),
                   tensor = reinterpret_cast<uint64_t>(cta->tensor);
    if (cta->shared && address >= shared && address < shared + cta->shared_bytes)
      return "shared memory of " + cta_text(*cta) + " at " + hex(address - shared);
    if (cta->tensor && address >= tensor && address < tensor + kTensorLanes * kTensorColumns * 4)
      return "tensor memory of " + cta_text(*cta) + ", lane " +
             std::to_string((address - tensor) / 4 / kTensorColumns) + ", column " +
             std::to_string((address - tensor) / 4 % kTensorColumns);
  }
  return "global memory at " + hex(address) + ", " + describe_address(address);
}

std::string source_of(const Record& record) {
  return source_line(launch_of(record).kernel, record.line);
}
std::string line_text(uint32_t line, const std::string& source) {
  return "PTX line " + std::to_string(line) + ": " + source;
}
std::string line_text(const Record& record) { return line_text(record.line, source_of(record)); }

// Findings that are known to be harmless: lines of PTXEMU_CHECK_KNOWN, each a regular expression
// over a kernel's name and the two PTX texts, "NAME | NOW | BEFORE".
bool is_known(const std::string& pair) {
  static const std::vector<std::regex> known = [] {
    std::vector<std::regex> all;
    const char* path = std::getenv("PTXEMU_CHECK_KNOWN");
    if (!path || !*path) return all;
    std::ifstream in(path);
    if (!in)
      std::fprintf(stderr, "ptxemu: PTXEMU_CHECK_KNOWN: cannot read %s\n", path), std::abort();
    for (std::string line; std::getline(in, line);)
      if (!line.empty() && line[0] != '#') all.emplace_back(line);
    return all;
  }();
  for (const std::regex& one : known)
    if (std::regex_match(pair, one)) return true;
  return false;
}

// Reports each pair of lines once, and prints at most kMostPrinted of them.
void say(const std::string& key, const std::string& pair, const std::string& text) {
  if (!checker.known_findings.insert(key).second || is_known(pair)) return;
  if (++checker.findings <= kMostPrinted) checker.text += text, std::fputs(text.c_str(), stderr);
  if (checker.findings == kMostPrinted)
    std::fputs("ptxemu: order: further ones are counted, not printed\n", stderr);
}

}  // namespace

void note_source(const KernelInfo* kernel, const std::string* text) { sources()[kernel] = text; }

std::string take_findings() {
  if (checker.findings == 0) return "";
  const std::string count = "ptxemu: order: " + std::to_string(checker.findings) +
                            " pairs of lines without an order between them\n";
  std::fputs(count.c_str(), stderr);
  const std::string all = count + checker.text;
  checker.findings = 0;
  checker.text.clear();
  checker.known_findings.clear();
  return all;
}

namespace ordering {

void report(Thread*, Verdict verdict, const Record& before, const Record& now, uint64_t at) {
  const std::string kernels[2] = {launch_of(before).kernel->name, launch_of(now).kernel->name};
  const std::string why = missing(verdict, before, now);
  const std::string key =
      kernels[0] + std::to_string(before.line) + kernels[1] + std::to_string(now.line) + why;
  if (checker.known_findings.count(key)) return;
  std::ostringstream out;
  out << "ptxemu: order: a " << (now.write ? "write" : "read")
      << " is not ordered after an earlier " << (before.write ? "write" : "read")
      << headline(launch_of(now).kernel);
  out << "  where:   " << place(at) << "\n";
  out << "  now:     " << actor(now) << (now.write ? " writes" : " reads")
      << (now.strong ? " (atomic), " : ", ") << line_text(now) << "\n";
  out << "  before:  " << actor(before) << (before.write ? " wrote" : " read")
      << (before.strong ? " (atomic), " : ", ") << line_text(before);
  const OrderLaunch &first = launch_of(before), &then = launch_of(now);
  if (first.thread != then.thread)
    out << "\n           of a launch of another host thread, kernel " << kernels[0];
  else if (first.number != then.number)
    out << "\n           of launch " << first.index << " of the chain, kernel " << kernels[0];
  out << "\n  missing: " << why << "\n";
  say(key, kernels[1] + " | " + source_of(now) + " | " + source_of(before), out.str());
}

void report_unfenced(Thread* T, uint32_t line) {
  const Record now = stamp(T, false, Proxy::kAsync);
  const KernelInfo* kernel = launch_of(now).kernel;
  std::ostringstream out;
  out << "ptxemu: order: a wgmma takes registers that were written after the last wgmma.fence"
      << headline(launch_of(now).kernel);
  out << "  now:     " << actor(now) << ", " << line_text(now) << "\n";
  if (line)
    out << "  before:  the same thread wrote one of them, "
        << line_text(line, source_line(kernel, line)) << "\n";
  out << "  missing: wgmma.fence between the two\n";
  say(std::string(kernel->name) + "unfenced" + std::to_string(now.line), kernel->name, out.str());
}

void report_mbarrier(Thread* T, Verdict verdict, const Mbarrier& barrier, const uint64_t* at,
                     bool async) {
  const Record now = stamp(T, true, async ? Proxy::kAsync : Proxy::kGeneric);
  const std::string why = missing(verdict, barrier.init, now);
  const std::string key =
      std::string(launch_of(now).kernel->name) + "mbarrier" + std::to_string(now.line) + why;
  if (checker.known_findings.count(key)) return;
  std::ostringstream out;
  out << "ptxemu: order: an mbarrier is used without an order after its init"
      << headline(launch_of(now).kernel);
  out << "  where:   " << place(reinterpret_cast<uint64_t>(at)) << "\n";
  out << "  now:     " << actor(now)
      << (async ? " issues a copy that completes at it, " : " uses it, ") << line_text(now)
      << "\n  before:  " << actor(barrier.init) << " initialized it, " << line_text(barrier.init)
      << "\n  missing: " << why << "\n";
  say(key, launch_of(now).kernel->name, out.str());
}

}  // namespace ordering
}  // namespace ptxemu
