#include "runtime/memory_map.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <sstream>

#include "runtime/planted.h"

namespace ptxemu {
namespace {

constexpr uint64_t kPage = 4096, kGuard = 16 * kPage;
constexpr size_t kFreedKept = 4096;

struct Range {
  uint64_t high, number;
  std::string what;
  uint64_t mapped_low, mapped_bytes;  // 0 for memory that others own
};
struct Map {
  std::map<uint64_t, Range> ranges;
  std::deque<std::pair<uint64_t, Range>> freed;
  uint64_t numbers = 0, bytes = 0;
};
Map& map() {
  static Map* all = new Map;  // is used while other statics are destroyed
  return *all;
}

uint8_t fill_byte() {
  const char* asked = std::getenv("PTXEMU_POISON");
  return asked ? static_cast<uint8_t>(std::strtoul(asked, nullptr, 0)) : 0xcd;
}

std::string text(uint64_t low, const Range& range) {
  std::ostringstream out;
  out << range.what << " #" << range.number << " (" << range.high - low << " bytes at 0x"
      << std::hex << low << ")";
  return out.str();
}

}  // namespace

void* allocate(uint64_t bytes, const char* what) {
  const uint64_t room = (bytes + 255) / 256 * 256;
  if (bytes > kDeviceBytes || map().bytes + room > kDeviceBytes) return nullptr;
  const uint64_t mapped = (room + kPage - 1) / kPage * kPage + 2 * kGuard;
  void* base = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  uint8_t* start = static_cast<uint8_t*>(base) + kGuard;
  if (mprotect(start, mapped - 2 * kGuard, PROT_READ | PROT_WRITE) != 0) {
    munmap(base, mapped);
    return nullptr;
  }
  if (!planted(Fault::fresh_zero)) std::memset(start, fill_byte(), room);
  register_memory(reinterpret_cast<uint64_t>(start), bytes, what);
  Range& range = map().ranges.at(reinterpret_cast<uint64_t>(start));
  range.mapped_low = reinterpret_cast<uint64_t>(base), range.mapped_bytes = mapped;
  map().bytes += room;
  return start;
}

bool release(void* pointer) {
  const auto found = map().ranges.find(reinterpret_cast<uint64_t>(pointer));
  if (found == map().ranges.end() || found->second.mapped_bytes == 0) return false;
  if (planted(Fault::freed_memory)) return true;
  const auto [low, range] = *found;
  map().bytes -= (range.high - low + 255) / 256 * 256;
  // The addresses stay reserved, without memory.
  mmap(reinterpret_cast<void*>(range.mapped_low), range.mapped_bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  map().freed.emplace_back(low, range);
  map().ranges.erase(found);
  if (map().freed.size() > kFreedKept) {
    munmap(reinterpret_cast<void*>(map().freed.front().second.mapped_low),
           map().freed.front().second.mapped_bytes);
    map().freed.pop_front();
  }
  return true;
}

void register_memory(uint64_t low, uint64_t bytes, const char* what) {
  map().ranges[low] = Range{low + bytes, ++map().numbers, what, 0, 0};
}
void unregister_memory(uint64_t low) { map().ranges.erase(low); }

bool allocated(uint64_t address, uint64_t bytes, uint64_t* low, uint64_t* high) {
  auto after = map().ranges.upper_bound(address);
  if (after == map().ranges.begin()) return false;
  --after;
  if (address + bytes > after->second.high) return false;
  if (low) *low = after->first;
  if (high) *high = after->second.high;
  return true;
}

std::string describe_address(uint64_t address) {
  for (const auto& [low, range] : map().freed)
    if (address >= low && address < range.high) return "in freed " + text(low, range);
  const auto after = map().ranges.upper_bound(address);
  std::ostringstream out;
  if (after != map().ranges.begin()) {
    const auto before = std::prev(after);
    if (address < before->second.high)
      out << address - before->first << " bytes into " << text(before->first, before->second);
    else
      out << address - before->second.high << " bytes after the end of "
          << text(before->first, before->second);
  }
  if (after != map().ranges.end())
    out << (out.str().empty() ? "" : ", ") << after->first - address << " bytes before "
        << text(after->first, after->second);
  return out.str().empty() ? "nothing is allocated" : out.str();
}

uint64_t allocation_number(uint64_t low) {
  const auto found = map().ranges.find(low);
  return found == map().ranges.end() ? 0 : found->second.number;
}
uint64_t allocated_bytes() { return map().bytes; }

}  // namespace ptxemu
