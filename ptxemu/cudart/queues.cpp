// Queues of launches, and the threads that run them.
#include "cudart/queues.h"

#include <algorithm>
#include <cstdlib>

#include "cudart/device.h"
#include "order/hooks.h"

namespace ptxemu {
namespace {

constexpr size_t kMostChained = 16, kMostQueued = 256;
constexpr std::chrono::microseconds kShortestPause{20}, kLongestPause{1000};

// How long kernels may wait without any progress.
std::chrono::duration<double> patience() {
  const char* asked = std::getenv("PTXEMU_PATIENCE");
  return std::chrono::duration<double>(asked && *asked ? std::atof(asked) : 120.0);
}

}  // namespace

void DeviceMutex::lock() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (depth_ != 0 && owner_ == std::this_thread::get_id()) {
    ++depth_;
    return;
  }
  const uint64_t ticket = next_++;
  turn_.wait(lock, [&] { return served_ == ticket; });
  owner_ = std::this_thread::get_id();
  depth_ = 1;
}

void DeviceMutex::unlock() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--depth_ != 0) return;
  ++served_;
  if (next_ != served_) turn_.notify_all();
}

bool DeviceMutex::wanted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return next_ != served_ + 1;
}

void DeviceMutex::pause(std::chrono::microseconds longest) {
  if (planted(Fault::turn_kept)) return std::this_thread::sleep_for(longest);
  std::unique_lock<std::mutex> lock(mutex_);
  const uint32_t depth = depth_;
  depth_ = 0;
  ++served_;
  turn_.notify_all();
  const uint64_t before = changes_;
  changed_.wait_for(lock, longest, [&] { return changes_ != before; });
  const uint64_t ticket = next_++;
  turn_.wait(lock, [&] { return served_ == ticket; });
  owner_ = std::this_thread::get_id();
  depth_ = depth;
}

void DeviceMutex::changed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++changes_;
  changed_.notify_all();
}

Queue* Device::own_queue() {
  for (auto& queue : queues)
    if (queue->thread == std::this_thread::get_id()) return queue.get();
  return nullptr;
}

bool Device::is_done(cudaStream_t stream) { return !own_queue() && !others_use(stream); }

bool Device::others_use(cudaStream_t stream) {
  // A stream that every thread has under the same name is a separate stream for each thread.
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return false;
  for (const auto& queue : queues)
    for (const Queue::Chain& chain : queue->chains)
      if (chain.stream == stream && queue->thread != std::this_thread::get_id()) return true;
  return false;
}

void Device::fail(const char* report) {
  failure = report;
  broken = failure.find("out of bounds") != std::string::npos ? cudaErrorIllegalAddress
                                                              : cudaErrorLaunchFailure;
  for (auto& queue : queues)
    for (Queue::Chain& chain : queue->chains) chain.mark->reached = true;
  queues.clear();
  check_give_up();
  mutex.changed();
}

Device::Outcome Device::advance(Queue& queue, bool patient) {
  bool worked = false;
  Run::State state = Run::State::kEnded;
  while (!queue.chains.empty()) {
    Queue::Chain& first = queue.chains.front();
    if (!first.run) first.run = std::make_unique<Run>(std::move(first.launches));
    state = first.run->go_on(worked, patient);
    if (state != Run::State::kEnded) break;
    first.mark->reached = true;
    queue.chains.pop_front();
    mutex.changed();
  }
  return worked                        ? Outcome::kWorked
         : state == Run::State::kWaits ? Outcome::kWaits
                                       : Outcome::kPolls;
}

Device::Outcome Device::advance(bool patient) {
  Outcome all = Outcome::kPolls;
  try {
    for (auto& queue : queues)
      if (queue->thread == std::this_thread::get_id() || !planted(Fault::turn_alone))
        all = std::max(all, advance(*queue, patient));
  } catch (const std::exception& error) {
    fail(error.what());
    return Outcome::kWorked;
  }
  queues.erase(std::remove_if(queues.begin(), queues.end(),
                              [](const auto& queue) { return queue->chains.empty(); }),
               queues.end());
  if (all == Outcome::kWorked) last_work = std::chrono::steady_clock::now();
  return all;
}

void Device::settle() {
  while (!queues.empty() && advance(true) == Outcome::kWorked) {
  }
}

cudaError_t Device::wait(const std::function<bool()>& over) {
  std::chrono::microseconds pause = kShortestPause;
  last_work = std::chrono::steady_clock::now();
  while (!queues.empty()) {
    const Outcome outcome = advance(std::chrono::steady_clock::now() - last_work < patience());
    if (outcome == Outcome::kWorked) {
      pause = kShortestPause;
      continue;
    }
    if (over()) break;
    if (outcome == Outcome::kPolls && !mutex.wanted()) continue;
    mutex.pause(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return broken;
}

cudaError_t Device::drain(cudaStream_t stream) {
  if (queues.empty()) return broken;
  return wait([&] { return is_done(stream); });
}

std::shared_ptr<Mark> Device::mark() {
  settle();
  const Queue* own = own_queue();
  return own ? own->chains.back().mark : nullptr;
}

cudaError_t Device::wait_for(const std::shared_ptr<Mark>& mark) {
  return wait([&] { return !mark || mark->reached; });
}

void Device::close_chain() {
  settle();
  if (Queue* own = own_queue()) own->chains.back().closed = true;
}

cudaError_t Device::enqueue(cudaStream_t stream, std::function<void()> host) {
  if (Capture* capture = capture_of(stream)) {
    capture->graph->operations.push_back({nullptr, std::move(host)});
    return cudaSuccess;
  }
  const cudaError_t error = drain(stream);
  if (error == cudaSuccess) host();
  return error;
}

cudaError_t Device::enqueue(cudaStream_t stream, Launch launch) {
  if (Capture* capture = capture_of(stream)) {
    capture->graph->operations.push_back({std::make_unique<Launch>(std::move(launch)), {}});
    return cudaSuccess;
  }
  const auto takes = [&](const Queue::Chain& last) {
    return !last.run && !last.closed && last.stream == stream && launch.programmatic &&
           last.launches.size() < kMostChained;
  };
  // In a shared stream, launches of other threads come first.
  if (others_use(stream)) drain(stream);
  Queue* own = own_queue();
  if (!own || !takes(own->chains.back())) {
    settle();
    own = own_queue();
    if (own && own->chains.size() == kMostQueued) drain(), own = nullptr;
    if (broken != cudaSuccess) return broken;
    if (!own) {
      queues.push_back(std::make_unique<Queue>());
      own = queues.back().get();
      own->thread = std::this_thread::get_id();
    }
    own->chains.emplace_back().stream = stream;
  }
  check_enqueue(launch);
  own->chains.back().launches.push_back(std::move(launch));
  return cudaSuccess;
}

void Device::forget_allocations() {
  for (auto& queue : queues)
    for (Queue::Chain& chain : queue->chains)
      if (chain.run) chain.run->forget_allocations();
}

}  // namespace ptxemu
