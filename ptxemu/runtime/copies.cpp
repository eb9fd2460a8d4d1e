// cp.async, bulk copies, st.async: visible at their wait or when their mbarrier's phase ends.
#include <algorithm>
#include <cstring>

#include "runtime/control.h"

namespace ptxemu {
namespace {

constexpr uint8_t kNotYet = 0xfd;  // what a read before the wait returns

void fetch(PendingCopy& copy) {
  std::memset(copy.bytes.data(), planted(Fault::cp_async_zeros) ? 0xaa : 0, copy.bytes.size());
  std::memcpy(copy.bytes.data(), copy.from, copy.source_bytes);
  copy.fetched = true;
}

void finish(std::vector<PendingCopy>& copies) {
  for (PendingCopy& copy : copies) {
    if (!copy.fetched) fetch(copy);
    std::memcpy(copy.to, copy.bytes.data(), copy.size);
  }
  copies.clear();
}

void finish(std::vector<Work>& stores) {
  for (Work& store : stores) store();
  stores.clear();
}

// The ctas of the cluster that a multicast copy goes to; other copies go to the one that their
// address names.
template <class F>
void each_destination(Cluster* cluster, bool multicast, uint32_t mask, uint32_t to,
                      uint32_t barrier, F of) {
  if (!multicast) return of(to, barrier);
  for (uint32_t rank = 0; rank < cluster->ctas.size(); ++rank)
    if (mask >> rank & 1)
      of((to & 0xffffff) | rank << kSharedOffsetBits,
         (barrier & 0xffffff) | rank << kSharedOffsetBits);
}

void require_sixteens(Thread* T, uint64_t to, uint64_t from, uint32_t size) {
  if ((to % 16 || from % 16 || size % 16) && !planted(Fault::bulk_alignment))
    fault(T, "a bulk copy: addresses and size must be multiples of 16");
}

}  // namespace

void enqueue_delivery(Thread* T, uint32_t to, const uint8_t* from, uint32_t size, uint32_t barrier,
                      uint32_t bytes, std::function<void(uint8_t*)> deliver) {
  Cluster* cluster = T->cta->cluster;
  uint8_t* place = cluster->shared_at(to);
  uint64_t* at = reinterpret_cast<uint64_t*>(cluster->shared_at(barrier));
  const uint32_t line = T->line;
  check_bulk(T, place, from, size, at);
  enqueue_copy(cluster, [=] {
    deliver(place);
    check_bulk_done(cluster, place, from, size, at, line);
    if (bytes) mbarrier_complete_bytes(cluster, at, bytes);
  });
}

void store_async(Thread* T, uint64_t to, const void* values, uint32_t size, uint64_t barrier) {
  T->shared_at(to, size);
  mbarrier_at(T, barrier);
  std::vector<uint8_t> bytes(static_cast<const uint8_t*>(values),
                             static_cast<const uint8_t*>(values) + size);
  enqueue_delivery(T, static_cast<uint32_t>(to), nullptr, size, static_cast<uint32_t>(barrier),
                   size, [=](uint8_t* place) { std::memcpy(place, bytes.data(), bytes.size()); });
}

void copy_async(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint32_t source_bytes) {
  if (source_bytes > size) fault(T, "cp.async reads more bytes than it writes");
  PendingCopy copy{T->shared_at(to, size), nullptr, size, source_bytes, false, {}};
  // A size of 0 reads nothing, for any address.
  copy.from = source_bytes ? T->global_at(from, 1) : copy.to;
  if (source_bytes) T->global_at(from + source_bytes - 1, 1);
  if (from % size) fault(T, "cp.async: the source's address is not a multiple of the size");
  check_copy_async(T, copy.to, copy.from, size, source_bytes);
  if (order() == Order::kAtOnce || (order() == Order::kRandom && random_number() % 2)) fetch(copy);
  if (planted(Fault::cp_async_at_once)) {
    if (!copy.fetched) fetch(copy);
    std::memcpy(copy.to, copy.bytes.data(), size);
    return;
  }
  std::memset(copy.to, kNotYet, size);
  T->open_copies.push_back(copy);
}

void copy_async_commit(Thread* T) {
  check_copy_group(T);
  T->copy_groups.push_back(std::move(T->open_copies));
  T->open_copies.clear();
}

void copy_async_wait(Thread* T, uint32_t groups_left) {
  check_copy_wait(T, groups_left);
  if (planted(Fault::cp_async_groups)) groups_left = 0;
  while (T->copy_groups.size() > groups_left) {
    finish(T->copy_groups.front());
    T->copy_groups.pop_front();
  }
}

void copy_async_wait_all(Thread* T) {
  copy_async_wait(T, 0);
  check_copy_wait(T, kNoneOpen);
  finish(T->open_copies);
}

// The arrival happens once all copies that the thread has issued are done.
void copy_async_arrive(Thread* T, uint64_t barrier, bool counted) {
  uint64_t* at = mbarrier_at(T, barrier);
  if (counted && !planted(Fault::cp_async_counted)) add_pending_arrival(T, at);
  const AgentNumber agent = check_copy_arrive(T);
  auto groups = std::make_shared<std::vector<std::vector<PendingCopy>>>();
  for (auto& group : T->copy_groups) groups->push_back(group);
  groups->push_back(T->open_copies);
  Cluster* cluster = T->cta->cluster;
  // Both this and a later wait finish the same copies. Each has read its bytes or reads them from
  // the same place.
  enqueue_copy(cluster, [=] {
    for (auto& group : *groups) finish(group);
    check_copy_done(cluster, agent, at);
    mbarrier_arrive_from_work(cluster, at);
  });
  T->copy_groups.clear();
  T->open_copies.clear();
}

void bulk_commit(Thread* T) {
  check_bulk_group(T);
  T->bulk_groups.push_back(std::move(T->open_bulk));
  T->open_bulk.clear();
}

void bulk_wait(Thread* T, uint32_t groups_left, bool reads_alone) {
  check_bulk_wait(T, groups_left, reads_alone);
  while (T->bulk_groups.size() > groups_left) {
    finish(T->bulk_groups.front());
    T->bulk_groups.pop_front();
  }
}

// When a thread ends its copies are completed, whether it has waited for them or not.
void finish_copies(Thread* T) {
  copy_async_wait_all(T);
  bulk_wait(T, 0, false);
  finish(T->open_bulk);
}

void bulk_load(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint64_t barrier,
               bool multicast, uint32_t mask) {
  require_sixteens(T, to, from, size);
  const uint8_t* source = T->global_at(from, 16);
  T->global_at(from + size - 16, 16);
  T->shared_at(to, 16);
  T->shared_at(to + size - 16, 16);
  mbarrier_at(T, barrier);
  Cluster* cluster = T->cta->cluster;
  each_destination(cluster, multicast, mask, static_cast<uint32_t>(to),
                   static_cast<uint32_t>(barrier), [&](uint32_t place, uint32_t signal) {
                     enqueue_delivery(
                         T, place, source, size, signal, planted(Fault::bulk_no_bytes) ? 0 : size,
                         [=](uint8_t* to_bytes) { std::memcpy(to_bytes, source, size); });
                   });
}

void bulk_exchange(Thread* T, uint64_t to, uint64_t from, uint32_t size, uint64_t barrier) {
  require_sixteens(T, to, from, size);
  const uint8_t* source = T->shared_at(from, 16);
  T->shared_at(from + size - 16, 16);
  T->shared_at(to, 16);
  T->shared_at(to + size - 16, 16);
  mbarrier_at(T, barrier);
  enqueue_delivery(T, static_cast<uint32_t>(to), source, size, static_cast<uint32_t>(barrier), size,
                   [=](uint8_t* place) { std::memcpy(place, source, size); });
}

void bulk_store(Thread* T, uint64_t to, uint64_t from, uint32_t size) {
  require_sixteens(T, to, from, size);
  const uint8_t* source = T->shared_at(from, 16);
  T->shared_at(from + size - 16, 16);
  uint8_t* place = T->global_at(to, 16);
  T->global_at(to + size - 16, 16);
  check_bulk_store(T, source, size, false);
  check_bulk_store(T, place, size, true);
  T->open_bulk.push_back([=] { std::memcpy(place, source, size); });
}

void bulk_add(Thread* T, uint64_t to, uint64_t from, uint32_t size, bool floats) {
  require_sixteens(T, to, from, size);
  const uint8_t* source = T->shared_at(from, 16);
  T->shared_at(from + size - 16, 16);
  uint8_t* place = T->global_at(to, 16);
  T->global_at(to + size - 16, 16);
  check_bulk_store(T, source, size, false);
  check_bulk_store(T, place, size, true);
  T->open_bulk.push_back([=] {
    for (uint32_t at = 0; at < size; at += 4) {
      const uint32_t value = read<uint32_t>(source + at);
      if (floats)
        atomic_add_f32(place + at, value);
      else
        atomic_add<uint32_t>(place + at, value);
    }
  });
}

// The response names a cluster that has not started, or that there is none. With `all` every cta of
// the cluster gets it.
void cancel_cluster(Thread* T, uint64_t to, uint64_t barrier, bool all) {
  Cluster* cluster = T->cta->cluster;
  Launch* launch = cluster->launch;
  u128 answer = 0;
  if (launch->next < launch->total) {
    uint64_t index = launch->next++;
    if (planted(Fault::cancel_before)) --index;
    ++launch->finished;
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t clusters = launch->grid[axis] / launch->cluster[axis];
      answer |= static_cast<u128>(index % clusters * launch->cluster[axis])
                << (axis == 0 ? 0 : 16 + 16 * axis);
      index /= clusters;
    }
    answer |= static_cast<u128>(1) << 127;
  }
  for (uint32_t rank = 0; rank < cluster->ctas.size(); ++rank) {
    if (!all && rank != T->rank) continue;
    const uint32_t place = (static_cast<uint32_t>(to) & 0xffffff) | rank << kSharedOffsetBits;
    const uint32_t signal = (static_cast<uint32_t>(barrier) & 0xffffff) | rank << kSharedOffsetBits;
    enqueue_delivery(T, place, nullptr, 16, signal, 16,
                     [=](uint8_t* to_bytes) { std::memcpy(to_bytes, &answer, 16); });
  }
}

}  // namespace ptxemu
