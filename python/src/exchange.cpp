// nvfp4_moe.Exchange and nvfp4_moe.ThreadGroup: ranks over a Python function, or over threads.
#include "exchange.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "core/fork.h"
#include "errors.h"
#include "exchange/callback.h"
#include "exchange/threads.h"
#include "interpreter.h"
#include "parallel/balance.h"
#include "parallel/connect.h"

namespace nb = nanobind;

namespace nvfp4_moe::internal::python {

namespace {

Timeout timeout_of(double seconds) {
  if (!(seconds > 0) || seconds > 1e6)
    fail("timeout: expected seconds above 0, got " + std::to_string(seconds));
  return Timeout{static_cast<int64_t>(std::ceil(seconds * 1000))};
}

// A caller's Python function. Lives as long as the exchange that calls it.
struct PyTransport {
  nb::callable all_to_all_v;
  int world = 0;

  static nb::object view(const void* data, int64_t bytes) {
    static char nothing = 0;
    // At least one byte: frameworks cannot make an array of an empty buffer. The sizes tell the
    // function how much of it is valid.
    char* const at = bytes > 0 ? static_cast<char*>(const_cast<void*>(data)) : &nothing;
    return nb::steal(PyMemoryView_FromMemory(at, bytes > 0 ? bytes : 1, PyBUF_WRITE));
  }

  static int call(void* user, const void* send, const int64_t* send_bytes, void* recv,
                  const int64_t* recv_bytes, int64_t timeout_ms, char* error, size_t error_bytes) {
    auto& self = *static_cast<PyTransport*>(user);
    const WithLock lock;
    return in_python([&] {
      try {
        nb::list sent, received;
        int64_t send_total = 0, recv_total = 0;
        for (int rank = 0; rank < self.world; ++rank) {
          sent.append(send_bytes[rank]);
          received.append(recv_bytes[rank]);
          send_total += send_bytes[rank];
          recv_total += recv_bytes[rank];
        }
        self.all_to_all_v(view(send, send_total), sent, view(recv, recv_total), received,
                          static_cast<double>(timeout_ms) / 1000);
        return 0;
      } catch (
          const std::exception& raised) {  // "ConnectionError: no answer", without its traceback
        const std::string text = status_of(raised).message();
        error[text.copy(error, error_bytes - 1)] = 0;
        return 1;
      }
    });
  }
};

struct PyExchange {
  std::shared_ptr<Exchange> exchange;
};

// transport: the function that the exchange calls, released after the exchange; null if the
// exchange does not call Python.
PyExchange held(std::unique_ptr<Exchange> exchange,
                std::shared_ptr<PyTransport> transport = nullptr) {
  return {{exchange.release(),
           [transport = std::move(transport)](Exchange* old) { DeleteWithoutLock()(old); }}};
}

PyExchange connect(nb::callable all_to_all_v, int rank, int world, double timeout) {
  const Timeout wait = timeout_of(timeout);
  // A Python function must be released with the interpreter lock held, whichever thread drops the
  // exchange last. If the interpreter is ending the lock cannot be taken, and the function leaks.
  const std::shared_ptr<PyTransport> transport(new PyTransport{std::move(all_to_all_v), world},
                                               [](PyTransport* old) {
                                                 if (interpreter_is_ending()) return;
                                                 const WithLock lock;
                                                 in_python([old] { delete old; });
                                               });
  const WithoutLock unlocked;
  return held(
      take(connect_callbacks({transport.get(), PyTransport::call, nullptr}, rank, world, wait)),
      transport);
}

struct PyThreadGroup {
  std::shared_ptr<ThreadGroup> group;
  int world;
};

PyExchange join(const PyThreadGroup& self, int rank, double timeout) {
  const Timeout wait = timeout_of(timeout);
  const std::shared_ptr<ThreadGroup> group = self.group;
  const WithoutLock unlocked;
  return held(take(group->join(rank, self.world, wait)));
}

// Reports to all ranks that the Python part of a collective call failed before it got here.
void report(const PyExchange& self, nb::handle raised) {
  const std::shared_ptr<Exchange> exchange = self.exchange;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  const Status failure = status_of(nb::python_error());
  const WithoutLock unlocked;
  check(exchange->agree(failure));
}

std::vector<int64_t> propose(const std::vector<uint64_t>& load, int world, int64_t slots_per_rank) {
  return take(propose_placement(load, world, slots_per_rank)).expert_of_slot();
}

// Every rank receives the error in this rank's arguments.
void connect_devices(const PyExchange& self, const std::string& device,
                     const std::optional<std::string>& library,
                     std::optional<uint64_t> communicator) {
  const std::shared_ptr<Exchange> exchange = self.exchange;
  const WithoutLock unlocked;
  if (communicator && *communicator == 0)
    check(exchange->agree(
        invalid_argument("communicator: expected the address of an ncclComm_t, got 0")));
  check(use_nccl(*exchange, device, library.value_or(""),
                 reinterpret_cast<void*>(communicator.value_or(0))));
}

void connect_memory(const PyExchange& self, const std::string& device) {
  const std::shared_ptr<Exchange> exchange = self.exchange;
  const WithoutLock unlocked;
  check(use_peers(*exchange, device));
}

}  // namespace

ParallelFields::ParallelFields(nb::handle fields)
    : exchange(fields[0]),
      combine(nb::cast<std::string>(fields[1])),
      capacity(nb::cast<int64_t>(fields[2])),
      placement(nb::cast<std::optional<std::vector<int64_t>>>(fields[3])) {}

std::optional<Parallel> parallel_of(const ParallelFields& fields, int64_t num_experts) {
  const auto combine = parse<CombineBy>(fields.combine);
  if (!combine.ok()) throw Failure(combine.status());
  if (fields.exchange.is_none()) {
    if (fields.capacity != 0 || fields.placement || *combine != CombineBy::kAllToAll)
      fail("combine, capacity, placement: expected an exchange beside them, got None");
    return std::nullopt;
  }
  if (!nb::isinstance<PyExchange>(fields.exchange))
    fail("exchange: expected an nvfp4_moe.Exchange, got " +
         nb::cast<std::string>(nb::str(fields.exchange.type())));
  Parallel parallel{nb::cast<PyExchange&>(fields.exchange).exchange, {}};
  parallel.options.combine = *combine;
  parallel.options.capacity = fields.capacity;
  if (fields.placement)
    parallel.options.placement =
        take(Placement::of_map(num_experts, parallel.exchange->world(), *fields.placement));
  return parallel;
}

std::shared_ptr<Exchange> unreported_exchange(const ParallelFields& fields) {
  if (fields.reported || !nb::isinstance<PyExchange>(fields.exchange)) return nullptr;
  return nb::cast<PyExchange&>(fields.exchange).exchange;
}

void bind_exchange(nb::module_& m) {
  nb::class_<PyExchange>(
      m, "Exchange",
      R"(One rank's connection to the other ranks, for the argument exchange of MoeLayer.

Made by ThreadGroup.join, torch_exchange or callback_exchange. All ranks must make the same calls in
the same order. If a rank is gone or late, the error on the ranks that wait for it names it.)")
      .def_prop_ro(
          "rank", [](const PyExchange& self) { return self.exchange->rank(); },
          "This rank, from 0.")
      .def_prop_ro(
          "world", [](const PyExchange& self) { return self.exchange->world(); },
          "The number of ranks.")
      .def(
          "barrier",
          [](const PyExchange& self) {
            const std::shared_ptr<Exchange> exchange = self.exchange;
            const WithoutLock unlocked;
            check(exchange->barrier());
          },
          "Waits until every rank has called it. Raises IoError, which names the missing rank.")
      .def("use_nccl", &connect_devices, nb::arg("device"), nb::arg("library") = nb::none(),
           nb::arg("communicator") = nb::none(),
           R"(Connects the ranks' GPUs through NCCL, for layers on a GPU.

Collective. Call it once, before the first such layer.

Args:
    device: This rank's GPU, for example "cuda:1".
    library: Path or name of NCCL 2.18 or later. None takes the copy that this process has loaded
        (torch's), else libnccl.so.2.
    communicator: The address of an ncclComm_t of the same ranks, as an integer. The caller keeps
        it. None makes one.

Raises (on every rank, naming the rank that failed):
    ValueError: device is not a device, or the exchange already has NCCL.
    Unsupported: This build, machine or NCCL cannot do it.
    IoError: A rank is missing.)")
      .def("use_peers", &connect_memory, nb::arg("device"),
           R"(Connects the ranks' GPUs directly: their kernels write into each other's memory.

An alternative to NCCL for at most 16 GPUs of one host that have peer access (NVLink or PCIe).
Collective. Call it once, before the first layer over it.

On each rank's device, runs of layers over it must not overlap: use one stream, or order them by
events. A run that waits for a missing rank ends after the exchange's timeout, also in a captured
graph. Then out is NaN and the next call raises IoError.

Args:
    device: This rank's GPU, for example "cuda:1".

Raises (on every rank, naming the rank that failed):
    ValueError: device is not a device, or the exchange already has NCCL or peers.
    Unsupported: Ranks are on several hosts or have no peer access. Names both devices and why.)")
      .def(
          "abort",
          [](const PyExchange& self, const std::string& message) {
            const std::shared_ptr<Exchange> exchange = self.exchange;
            const WithoutLock unlocked;
            exchange->abort(Status(Code::kCancelled, message));
          },
          nb::arg("message"),
          R"(Ends the exchange.

Calls that wait for this rank, and all later calls, raise Cancelled with the message. Over a
caller's function, calls of other ranks that are in flight end by their timeout.)");
  m.def("report_to_ranks", &report, nb::arg("exchange"), nb::arg("raised"));
  nb::class_<PyThreadGroup>(m, "ThreadGroup", "Connects ranks that are threads of this process.")
      .def(
          "__init__",
          [](PyThreadGroup* self, int world) {
            new (self) PyThreadGroup{take(ThreadGroup::make(world)), world};
          },
          nb::arg("world"))
      .def("join", &join, nb::arg("rank"), nb::arg("timeout") = 30.0,
           "Connects this thread as a rank and returns its Exchange. Waits for all ranks, at most "
           "timeout seconds.\n\n"
           "The rank leaves when its Exchange and the layers over it are released.");
  m.def("propose_placement", &propose, nb::arg("load"), nb::arg("world"), nb::arg("slots_per_rank"),
        R"(Proposes a placement that balances the load of the ranks.

Deterministic: every rank gets the same placement for the same load.

Args:
    load: How often each expert was selected (MoeLayer.expert_load()).
    world: The number of ranks.
    slots_per_rank: At least experts / world. Additional slots hold copies of the experts with the
        most load.

Returns:
    The expert of each slot, rank by rank.

Raises:
    ValueError: There are fewer slots than experts.)");
  m.def("connect_exchange", &connect, nb::arg("all_to_all_v"), nb::arg("rank"), nb::arg("world"),
        nb::arg("timeout"),
        nb::sig("def connect_exchange(all_to_all_v: Callable[[memoryview, list[int], memoryview, "
                "list[int], float], "
                "None], rank: int, world: int, timeout: float) -> Exchange"));
}

}  // namespace nvfp4_moe::internal::python
