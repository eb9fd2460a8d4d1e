// Pages of records: making them, splitting them into smaller granules, and dropping them.
#include "order/shadow.h"

namespace ptxemu::ordering {

void Shadow::split(Page& page, uint32_t shift) {
  auto cells = std::make_unique<Cell[]>(1u << (kPageShift - shift));
  if (page.cells) {
    const uint32_t each = 1u << (page.shift - shift);
    for (uint32_t i = 0; i < 1u << (kPageShift - shift); ++i) {
      const Cell& from = page.cells[i / each];
      cells[i].write = from.write, cells[i].update = from.update, cells[i].read = from.read;
      if (from.reads) cells[i].reads = std::make_unique<std::vector<Record>>(*from.reads);
    }
  }
  page.cells = std::move(cells);
  page.shift = shift;
}

void Shadow::forget(uint64_t at, uint64_t size) {
  // Pages at either end may be shared with others: only their granules are dropped.
  each(at, size, [](Cell& cell, uint64_t) { cell = {}; });
}

void Shadow::clear() {
  regions_.clear();
  last_number_ = ~0ull;
  last_ = nullptr;
}

}  // namespace ptxemu::ordering
