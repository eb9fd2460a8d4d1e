// wgmma: products of a warpgroup, done between their issue and their wait, visible at the wait.
//
// Each of the four warps computes its own 16 rows of D. A thread's registers hold poison from the
// issue to the wait, and their results are stored separately. Compiled code may copy such registers
// before the wait, because ptxas will assign both names to one register. copy_in_flight tracks such
// copies.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "runtime/control.h"
#include "runtime/products.h"

namespace ptxemu {
namespace {

constexpr uint32_t kInFlightPoison = 0x7fbadbad;

MatrixDescriptor descriptor(uint64_t x) {
  static constexpr uint32_t kSwizzles[4] = {0, 3, 2, 1};
  if (planted(Fault::wgmma_swizzle_64) && x >> 62 == 2) x |= 3ull << 62;
  return {static_cast<uint32_t>(x & 0x3fff) << 4, static_cast<uint32_t>(x >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(x >> 32 & 0x3fff) << 4, kSwizzles[x >> 62]};
}

struct ProductLane {
  Thread* thread;
  const uint32_t* a;
  InFlightRegisters* d;
  uint32_t first;  // slot of d[0]
};

// One issue of one warp.
struct Issue {
  Cta* cta;
  uint32_t warp;  // of the warpgroup
  int n;
  WgmmaType a_type, b_type;
  bool from_registers, accumulate;
  uint64_t a_descriptor, b_descriptor;
  uint32_t a[32][4];
  InFlightRegisters* d[32];
  uint32_t first[32];
};

// A product's k is 32 bytes of each row for every type.
constexpr int kRowBytes = 32;

int element_bytes(WgmmaType type) {
  return type == WgmmaType::kF16 || type == WgmmaType::kBf16 ? 2 : 1;
}

// The elements of one 32-bit word, lowest first: two or four.
void widen(WgmmaType type, uint32_t word, float* to) {
  for (int i = 0; i < 4 / element_bytes(type); ++i) switch (type) {
      case WgmmaType::kF16: to[i] = float_from_f16(static_cast<uint16_t>(word >> (16 * i))); break;
      case WgmmaType::kBf16:
        to[i] = float_from_bf16(static_cast<uint16_t>(word >> (16 * i)));
        break;
      case WgmmaType::kE4M3: to[i] = float_from_e4m3(word >> (8 * i) & 0xff); break;
      case WgmmaType::kE5M2: to[i] = float_from_e5m2(word >> (8 * i) & 0xff); break;
    }
}

void load_rows(const Issue& issue, WgmmaType type, uint64_t bits, uint32_t first_row, int rows,
               float (*to)[kRowBytes]) {
  const MatrixDescriptor at = descriptor(bits);
  const uint8_t* shared = issue.cta->shared;
  const uint32_t end = issue.cta->shared_bytes;
  const int per_word = 4 / element_bytes(type);
  for (int row = 0; row < rows; ++row)
    for (int word = 0; word < kRowBytes / 4; word += 4) {
      const uint32_t offset =
          at.at(first_row + static_cast<uint32_t>(row), static_cast<uint32_t>(4 * word));
      if (offset + 16 > end)
        fault_work(issue.cta->cluster, "wgmma reads outside the cta's shared memory");
      uint32_t words[4];
      std::memcpy(words, shared + offset, sizeof words);
      for (int i = 0; i < 4; ++i) widen(type, words[i], to[row] + (word + i) * per_word);
    }
}

// The same rows for the checker of order, when the product is issued.
void check_rows(Thread* T, uint64_t bits, uint32_t first_row, int rows) {
  const MatrixDescriptor at = descriptor(bits);
  for (int row = 0; row < rows; ++row)
    for (uint32_t byte = 0; byte < kRowBytes; byte += 16) {
      const uint32_t offset = at.at(first_row + static_cast<uint32_t>(row), byte);
      if (offset + 16 <= T->cta->shared_bytes) check_wgmma_read(T, T->cta->shared + offset, 16);
    }
}

// Hopper's FP8 tensor cores add E4M3 products and the accumulator all at once. Each term is
// truncated towards zero 13 bits below the largest exponent, which is the accumulator's or the sum
// of two operands' exponents. Then the sum is truncated 13 bits below its own exponent. An H200
// gave the same bits for 32,768 products of 32 k, with subnormals, both signs and accumulators of
// 50 octaves, and for 2,048 sums of 4,096 k.
constexpr int kFp8SumBits = 13;

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}
int e4m3_exponent(float x) { return std::max(std::ilogb(x), -6); }  // of x that is not 0

float add_e4m3(float before, const float* left, const float* right) {
  int largest = before != 0 ? std::ilogb(before) : -200;
  for (int k = 0; k < kRowBytes; ++k) {
    if (left[k] == 0 || right[k] == 0) continue;
    if (!std::isfinite(left[k] * right[k])) return left[k] * right[k];
    largest = std::max(largest, e4m3_exponent(left[k]) + e4m3_exponent(right[k]));
  }
  if (!std::isfinite(before) || largest == -200) return before;
  const double place = power_of_two(largest - kFp8SumBits),
               inverse = power_of_two(kFp8SumBits - largest);
  double places = std::trunc(static_cast<double>(before) * inverse);
  for (int k = 0; k < kRowBytes; ++k)
    places += std::trunc(static_cast<double>(left[k]) * static_cast<double>(right[k]) * inverse);
  if (places == 0) return 0.0f;
  const int own = std::max(0, std::ilogb(places) - kFp8SumBits);
  return static_cast<float>(std::trunc(places * power_of_two(-own)) * power_of_two(own) * place);
}

// put(row, column, sum) for each of 16 rows and n columns.
template <int kK, class Put>
void multiply_rows(const float (*a)[kRowBytes], const float (*b)[kRowBytes], int n, Put put) {
  static constexpr double kOne[1][8] = {{1, 1, 1, 1, 1, 1, 1, 1}};
  for (int first = 0; first < n; first += 8) {
    Columns<double, 8>::Type columns[kK];
    for (int k = 0; k < kK; ++k)
      for (int i = 0; i < 8; ++i) columns[k][i] = static_cast<double>(b[first + i][k]);
    for (int row = 0; row < 16; ++row) {
      double left[kK], sums[8];
      for (int k = 0; k < kK; ++k) left[k] = static_cast<double>(a[row][k]);
      row_of_product<kK, 1, double, 8>(left, kOne[0], columns, kOne, 1, sums);
      for (int i = 0; i < 8; ++i) put(row, first + i, sums[i]);
    }
  }
}

void compute(const Issue& issue) {
  float a[16][kRowBytes], b[256][kRowBytes];
  const int per_word = 4 / element_bytes(issue.a_type),
            depth = kRowBytes / element_bytes(issue.a_type);
  if (issue.from_registers) {
    // Words 0 and 1 are of rows g and g + 8 in the first half of k, words 2 and 3 in the second.
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        widen(issue.a_type, issue.a[lane][i],
              &a[lane / 4 + i % 2 * 8][lane % 4 * per_word + i / 2 * (depth / 2)]);
  } else {
    load_rows(issue, issue.a_type, issue.a_descriptor, issue.warp * 16, 16, a);
  }
  load_rows(issue, issue.b_type, issue.b_descriptor, 0, issue.n, b);
  const bool accumulate = issue.accumulate || planted(Fault::wgmma_scale_d);
  uint32_t* d[32];
  for (int lane = 0; lane < 32; ++lane) d[lane] = issue.d[lane]->values.data() + issue.first[lane];
  // A lane holds columns 8 j + 2 q and the next of rows g and g + 8.
  const auto result = [&](int row, int column) -> uint32_t& {
    return d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
  };
  if (issue.a_type == WgmmaType::kE4M3 && issue.b_type == WgmmaType::kE4M3) {
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < issue.n; ++column) {
        uint32_t& to = result(row, column);
        const float before = accumulate ? as_float(to) : 0.0f;
        to = canonical_nan(float_bits(add_e4m3(before, a[row], b[column])));
      }
  } else {
    const auto put = [&](int row, int column, double sum) {
      uint32_t& to = result(row, column);
      const double before = accumulate ? static_cast<double>(as_float(to)) : 0.0;
      to = canonical_nan(float_bits(static_cast<float>(before + sum)));
    };
    depth == 16 ? multiply_rows<16>(a, b, issue.n, put) : multiply_rows<32>(a, b, issue.n, put);
  }
}

void run_products(Warp* warp, uint64_t before_group) {
  while (!warp->products.empty() && warp->products.front().group < before_group) {
    const Work work = std::move(warp->products.front().compute);
    warp->products.pop_front();
    work();
  }
}

// The register and slot of the record that has this register; null if it is not in flight.
std::pair<InFlightRegisters*, size_t> find_register(Thread* T, const uint32_t* wanted) {
  for (auto& record : T->in_flight_records)
    for (size_t i = 0; i < record->registers.size(); ++i)
      if (record->registers[i] == wanted) return {record.get(), i};
  return {nullptr, 0};
}

// The record that has d in order: a product that goes on from the last one. Other names of its
// registers are forgotten, since they would need the values from before this product.
InFlightRegisters* find_record(Thread* T, int count, uint32_t* const* d) {
  const auto [record, first] = find_register(T, d[0]);
  if (!record || record->values.size() != static_cast<size_t>(count) ||
      first + static_cast<size_t>(count) > record->registers.size())
    return nullptr;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i)
    if (record->registers[first + i] != d[i] || record->slots[first + i] != i) return nullptr;
  if (record->registers.size() > static_cast<size_t>(count)) {
    record->registers.assign(d, d + count);
    for (size_t i = 0; i < record->slots.size(); ++i) record->slots[i] = static_cast<uint32_t>(i);
    record->slots.resize(static_cast<size_t>(count));
  }
  return record;
}

InFlightRegisters* new_record(Thread* T, int count, uint32_t* const* d) {
  auto record = std::make_unique<InFlightRegisters>();
  const size_t room = static_cast<size_t>(count);
  record->registers.reserve(room), record->slots.reserve(room), record->values.reserve(room);
  bool any_in_flight = false;
  for (int i = 0; i < count && T->in_flight; ++i)
    any_in_flight |= find_register(T, d[i]).first != nullptr;
  if (any_in_flight)
    run_products(T->warp, ~0ull);  // the registers come from several products or in another order
  for (int i = 0; i < count; ++i) {
    const auto [other, at] =
        T->in_flight ? find_register(T, d[i]) : std::pair<InFlightRegisters*, size_t>{};
    record->values.push_back(other ? other->values[other->slots[at]] : *d[i]);
    if (other) drop_in_flight(T, d[i]);
    record->registers.push_back(d[i]);
    record->slots.push_back(static_cast<uint32_t>(i));
  }
  T->in_flight_records.push_back(std::move(record));
  return T->in_flight_records.back().get();
}

// Writes the result of the product and its chain to all registers that wait for it.
void retire(Thread* T, uint64_t before_group) {
  auto& records = T->in_flight_records;
  for (auto& record : records) {
    if (record->group >= before_group) continue;
    for (size_t i = 0; i < record->registers.size(); ++i)
      *record->registers[i] = record->values[record->slots[i]];
  }
  records.erase(std::remove_if(records.begin(), records.end(),
                               [&](const auto& record) { return record->group < before_group; }),
                records.end());
  T->in_flight = records.empty() ? nullptr : records.back().get();
}

}  // namespace

void wgmma_issue(Thread* T, int n, WgmmaType a_type, WgmmaType b_type, const uint32_t* a,
                 uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate,
                 uint32_t* const* d) {
  if (T->order && T->wgmma_group == 0) check_unfenced(T, 0);
  for (const uint64_t bits : {a ? 0 : a_descriptor, b_descriptor}) {
    if (bits >> 49 & 7) fault(T, "wgmma: descriptors with a base offset are not supported");
    if (bits & 0x3ff1c000c000c000 && !planted(Fault::descriptor_unchecked))
      fault(T, "wgmma: bits 14, 15, 30, 31, 46 to 48 and 52 to 61 of a descriptor must be 0");
  }
  const int count = n / 2;
  InFlightRegisters* record = T->in_flight ? find_record(T, count, d) : nullptr;
  if (!record) record = new_record(T, count, d);
  record->group = T->wgmma_group;
  T->in_flight = record;
  for (uint32_t* reg : record->registers) *reg = kInFlightPoison;
  ProductLane mine{T, a, record, 0};
  meet(T, 0, "aligned wgmma", &mine, true, [=](void** lanes, uint32_t) {
    auto issue = std::make_shared<Issue>();
    if (T->order) {
      if (!a) check_rows(T, a_descriptor, T->warp->index % 4 * 16, 16);
      check_rows(T, b_descriptor, 0, n);
    }
    issue->cta = T->cta, issue->warp = T->warp->index % 4, issue->n = n;
    issue->a_type = a_type, issue->b_type = b_type;
    issue->from_registers = a != nullptr, issue->accumulate = accumulate;
    issue->a_descriptor = a_descriptor, issue->b_descriptor = b_descriptor;
    for (int lane = 0; lane < 32; ++lane) {
      const ProductLane& x = *static_cast<ProductLane*>(lanes[lane]);
      if (x.a) std::copy(x.a, x.a + 4, issue->a[lane]);
      issue->d[lane] = x.d;
      issue->first[lane] = x.first;
    }
    if (order() == Order::kAtOnce ||
        (order() == Order::kRandom && T->warp->products.empty() && random_number() % 2))
      compute(*issue);
    else
      T->warp->products.push_back({T->wgmma_group, [issue] { compute(*issue); }});
  });
  if (planted(Fault::wgmma_at_once)) {
    run_products(T->warp, ~0ull);
    retire(T, ~0ull);
  }
}

void wgmma_fence(Thread* T) {
  check_wgmma_fence(T);
  meet(T, 0, "aligned wgmma.fence", nullptr, true, [](void**, uint32_t) {});
}

void wgmma_commit(Thread* T) {
  ++T->wgmma_group;
  meet(T, 0, "aligned wgmma.commit_group", nullptr, true, [](void**, uint32_t) {});
}

void wgmma_wait(Thread* T, uint32_t groups_left) {
  meet(T, 0, "aligned wgmma.wait_group", nullptr, true, [](void**, uint32_t) {});
  const uint64_t before_group = T->wgmma_group > groups_left ? T->wgmma_group - groups_left : 0;
  check_wgmma_wait(T, before_group);
  run_products(T->warp, before_group);
  retire(T, before_group);
}

void copy_in_flight(Thread* T, uint32_t* to, const uint32_t* from) {
  if (to == from) return;
  const auto [record, at] = find_register(T, from);
  const uint32_t slot = record ? record->slots[at] : 0;
  drop_in_flight(T, to);
  if (!record) return;
  record->registers.push_back(to);
  record->slots.push_back(slot);
}

void drop_in_flight(Thread* T, const uint32_t* to) {
  const auto [record, at] = find_register(T, to);
  if (!record) return;
  record->registers.erase(record->registers.begin() + static_cast<std::ptrdiff_t>(at));
  record->slots.erase(record->slots.begin() + static_cast<std::ptrdiff_t>(at));
}

}  // namespace ptxemu
