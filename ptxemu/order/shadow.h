// The last accesses to memory: one record per granule of device, shared and tensor memory, by the
// host's address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace ptxemu::ordering {

// An access. Number 0: none.
struct Record {
  uint32_t number = 0, cta = 0;  // of the slot's numbers
  uint32_t line = 0;
  uint16_t slot = 0;
  uint8_t proxy : 2 = 0, scope : 2 = 0, write : 1 = 0, strong : 1 = 0;
  uint8_t collective : 1 = 0;  // by a lane for its whole warp
  uint8_t any_lane : 1 = 0;    // the knowledge of any lane of the warp is enough
  uint8_t in_flight : 1 = 0;   // not done, for any number
  bool same_actor(const Record& other) const { return slot == other.slot && cta == other.cta; }
};

struct Cell {
  Record write;   // the last that is not atomic
  Record update;  // the last that is, after it
  Record read;
  std::unique_ptr<std::vector<Record>> reads;  // further ones that no order is known between
};

// A KiB of memory in granules of 16 bytes or, after smaller accesses, of 8 to 1.
struct Page {
  std::unique_ptr<Cell[]> cells;
  uint32_t shift = 4;  // of a granule
};
constexpr uint32_t kPageShift = 10, kRegionShift = 20;

class Shadow {
 public:
  // Calls of(cell, its address) for every granule of the bytes.
  template <class F>
  void each(uint64_t at, uint64_t size, F of) {
    while (size != 0) {
      const uint64_t first = at & ((1u << kPageShift) - 1),
                     here = std::min<uint64_t>(size, (1u << kPageShift) - first);
      Page& page = page_of(at);
      refine(page, static_cast<uint32_t>(__builtin_ctzll(first | here | 16)));
      for (uint64_t i = first >> page.shift; i < (first + here) >> page.shift; ++i)
        of(page.cells[i], (at - first) + (i << page.shift));
      at += here, size -= here;
    }
  }
  // Drops the records of freed bytes.
  void forget(uint64_t at, uint64_t size);
  void clear();

 private:
  struct Region {
    Page pages[1u << (kRegionShift - kPageShift)];
  };
  Page& page_of(uint64_t at) {
    const uint64_t region = at >> kRegionShift;
    if (region != last_number_) {
      auto& found = regions_[region];
      if (!found) found = std::make_unique<Region>();
      last_ = found.get();
      last_number_ = region;
    }
    return last_->pages[at >> kPageShift & ((1u << (kRegionShift - kPageShift)) - 1)];
  }
  static void refine(Page& page, uint32_t shift) {
    if (!page.cells || page.shift > shift) split(page, shift);
  }
  static void split(Page& page, uint32_t shift);
  std::unordered_map<uint64_t, std::unique_ptr<Region>> regions_;
  uint64_t last_number_ = ~0ull;
  Region* last_ = nullptr;
};

}  // namespace ptxemu::ordering
