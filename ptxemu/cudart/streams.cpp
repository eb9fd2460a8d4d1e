// Streams, events, captures and graphs. Each thread's work runs in the order of its calls, which is
// a legal order for streams.
#include <chrono>
#include <thread>

#include "cudart/device.h"

using namespace ptxemu;

namespace {

struct Stream {
  int priority;
};
struct Event {
  std::chrono::steady_clock::time_point recorded;
  std::shared_ptr<Mark> mark;  // null if all earlier work had ended
};

// The legacy stream must not be used while a stream that waits for it is captured.
bool implicit(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy) return false;
  for (const auto& [captured, capture] : device().captures)
    if (capture->mode != cudaStreamCaptureModeRelaxed) return true;
  return false;
}

bool forbidden(cudaStream_t stream) {
  if (!device().capture_of(stream) && !device().capture_forbids()) return false;
  if (Capture* capture = device().capture_of(stream)) capture->invalid = true;
  return true;
}

bool reached(const Event& event) { return !event.mark || event.mark->reached; }

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  if (forked()) return noted(cudaErrorInitializationError);
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(device().mutex);
  device().captures.erase(stream);
  const cudaError_t error = device().drain(stream);
  delete reinterpret_cast<Stream*>(stream);
  return noted(error);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Lock lock(device().mutex);
  return noted(forbidden(stream) ? cudaErrorStreamCaptureUnsupported : device().drain(stream));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const Lock lock(device().mutex);
  if (forbidden(stream)) return noted(cudaErrorStreamCaptureUnsupported);
  device().settle();
  return noted(device().is_done(stream) ? device().broken : cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(device().mutex);
  const auto recorded = device().captured_events.find(event);
  // A stream that waits for an event of a capture joins it.
  if (recorded != device().captured_events.end()) {
    device().captures[stream] = recorded->second;
    return cudaSuccess;
  }
  return noted(device().wait_for(reinterpret_cast<Event*>(event)->mark));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(device().mutex);
  device().captured_events.erase(event);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(device().mutex);
  const auto capture = device().captures.find(stream);
  if (capture != device().captures.end()) {
    device().captured_events[event] = capture->second;
    return cudaSuccess;
  }
  device().captured_events.erase(event);
  reinterpret_cast<Event*>(event)->mark = device().mark();
  reinterpret_cast<Event*>(event)->recorded = std::chrono::steady_clock::now();
  return noted(device().broken);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(device().mutex);
  if (device().captured_events.count(event)) return noted(cudaErrorStreamCaptureUnsupported);
  return noted(device().wait_for(reinterpret_cast<Event*>(event)->mark));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(device().mutex);
  if (device().captured_events.count(event)) return noted(cudaErrorStreamCaptureUnsupported);
  device().settle();
  return noted(reached(*reinterpret_cast<Event*>(event)) ? device().broken : cudaErrorNotReady);
}
// The emulator's own time, which is unrelated to a device's.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto span =
      reinterpret_cast<Event*>(end)->recorded - reinterpret_cast<Event*>(start)->recorded;
  *milliseconds = std::chrono::duration<float, std::milli>(span).count();
  return cudaSuccess;
}

// Host functions are called without the device's mutex: one may wait for another thread's work.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  std::unique_lock<DeviceMutex> lock(device().mutex);
  if (device().capture_of(stream)) return noted(device().enqueue(stream, [=] { function(data); }));
  const cudaError_t error = device().drain(stream);
  lock.unlock();
  if (error == cudaSuccess) function(data);
  return noted(error);
}

// ---- captures
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const Lock lock(device().mutex);
  if (stream == nullptr || stream == cudaStreamLegacy)
    return noted(cudaErrorStreamCaptureUnsupported);
  if (device().capture_of(stream)) return noted(cudaErrorIllegalState);
  const cudaError_t error = device().drain();
  if (error != cudaSuccess) return noted(error);
  auto capture = std::make_shared<Capture>();
  capture->id = ++device().captures_begun;
  capture->mode = mode;
  capture->origin = stream;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_shared<Graph>();
  device().captures[stream] = capture;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock(device().mutex);
  const auto found = device().captures.find(stream);
  if (found == device().captures.end()) return noted(cudaErrorIllegalState);
  const std::shared_ptr<Capture> capture = found->second;
  for (auto other = device().captures.begin(); other != device().captures.end();)
    other = other->second == capture ? device().captures.erase(other) : std::next(other);
  for (auto other = device().captured_events.begin(); other != device().captured_events.end();)
    other = other->second == capture ? device().captured_events.erase(other) : std::next(other);
  *graph = nullptr;
  if (capture->invalid) return noted(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture->graph));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const Lock lock(device().mutex);
  const Capture* capture = device().capture_of(stream);
  if (!capture && implicit(stream)) return noted(cudaErrorStreamCaptureImplicit);
  *status = !capture           ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  const cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (error != cudaSuccess) return error;
  const Lock lock(device().mutex);
  if (const Capture* capture = device().capture_of(stream); capture && id) *id = capture->id;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(
      new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph>*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
// Copies and host functions wait here for the launches before them.
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::unique_lock<DeviceMutex> lock(device().mutex);
  device().close_chain();
  cudaError_t error = device().broken;
  const std::shared_ptr<Graph> graph = *reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  for (const Operation& operation : graph->operations) {
    if (error != cudaSuccess) break;
    if (!operation.launch) {
      error = device().drain(stream);
      lock.unlock();
      if (error == cudaSuccess) operation.host();
      lock.lock();
      continue;
    }
    Launch launch;
    static_cast<LaunchRequest&>(launch) = *operation.launch;
    if (planted(Fault::graph_arguments)) launch.arguments.assign(launch.arguments.size(), 0);
    error = device().enqueue(stream, std::move(launch));
  }
  return noted(error);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = (*reinterpret_cast<std::shared_ptr<Graph>*>(graph))->operations.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Lock lock(device().mutex);
  const cudaError_t error = device().drain();
  delete reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  return noted(error);
}

}  // extern "C"
