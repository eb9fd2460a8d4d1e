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

// A host's function in Python. Lives as long as the exchange that calls it.
struct PyTransport {
  nb::callable all_to_all_v;
  int world = 0;

  static nb::object view(const void* data, int64_t bytes) {
    static char nothing = 0;
    // At least a byte: frameworks make no array of an empty buffer, and the sizes say how much of
    // it counts.
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

// transport: what the exchange calls, dropped after it; null if it has its own.
PyExchange held(std::unique_ptr<Exchange> exchange,
                std::shared_ptr<PyTransport> transport = nullptr) {
  return {{exchange.release(),
           [transport = std::move(transport)](Exchange* old) { DeleteWithoutLock()(old); }}};
}

PyExchange connect(nb::callable all_to_all_v, int rank, int world, double timeout) {
  const Timeout wait = timeout_of(timeout);
  // What holds a Python function goes with the interpreter lock, whoever drops the exchange last;
  // and stays where the interpreter itself drops it at its end, when the lock can no longer be
  // asked for.
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

// Python's part of a collective call, which has failed before any of it came here.
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
      "One rank's end of what connects it with others: for MoeLayer's exchange. Made by\n"
      "ThreadGroup.join, torch_exchange or callback_exchange. All ranks make the same calls in "
      "the\n"
      "same order; a rank that is gone or late is named by those that wait for it.")
      .def_prop_ro(
          "rank", [](const PyExchange& self) { return self.exchange->rank(); },
          "This rank, from 0.")
      .def_prop_ro(
          "world", [](const PyExchange& self) { return self.exchange->world(); },
          "How many ranks there are.")
      .def(
          "barrier",
          [](const PyExchange& self) {
            const std::shared_ptr<Exchange> exchange = self.exchange;
            const WithoutLock unlocked;
            check(exchange->barrier());
          },
          "Waits until every rank is here. Raises IoError, naming who is missing.")
      .def("use_nccl", &connect_devices, nb::arg("device"), nb::arg("library") = nb::none(),
           nb::arg("communicator") = nb::none(),
           "Gives the exchange NCCL between GPUs, this rank's being device (\"cuda:1\"): what a "
           "layer over it on a GPU "
           "needs.\n"
           "Collective, once, before the first such layer.\n\n"
           "library: a path or name; None takes this process's own copy (torch's), else "
           "libnccl.so.2; 2.18 or later.\n"
           "communicator: the address of an ncclComm_t of the same ranks as an integer, which "
           "stays the caller's; None\n"
           "makes one. Raises on every rank, naming the one that cannot: ValueError for a device "
           "that is none or an\n"
           "exchange that has NCCL already, Unsupported where this build, machine or NCCL cannot, "
           "IoError where a rank\n"
           "does not come.")
      .def("use_peers", &connect_memory, nb::arg("device"),
           "Instead of NCCL: the ranks' kernels write into each other's device memory, this rank's "
           "device being device\n"
           "(\"cuda:1\"). For at most 16 GPUs of one host that reach each other (NVLink, or PCIe "
           "with peer access).\n"
           "Collective, once, before the first layer over it.\n\n"
           "Runs of layers over it follow each other on each rank's device: in one stream, or "
           "ordered by events. What "
           "waits\n"
           "for a rank that does not come ends after the exchange's timeout, in a captured graph "
           "too: out is NaN and "
           "the next\n"
           "call raises IoError. Raises on every rank, naming the one that cannot: ValueError for "
           "a device that is none "
           "or an\n"
           "exchange that has NCCL or peers already, Unsupported where ranks are on several hosts "
           "or do not reach each "
           "other,\n"
           "with both devices named and why.")
      .def(
          "abort",
          [](const PyExchange& self, const std::string& message) {
            const std::shared_ptr<Exchange> exchange = self.exchange;
            const WithoutLock unlocked;
            exchange->abort(Status(Code::kCancelled, message));
          },
          nb::arg("message"),
          "Ends the exchange: what waits for this rank, or calls it later, raises Cancelled with "
          "the message. Over a\n"
          "caller's function a call of other ranks that is in flight ends by its timeout.");
  m.def("report_to_ranks", &report, nb::arg("exchange"), nb::arg("raised"));
  nb::class_<PyThreadGroup>(m, "ThreadGroup", "Connects ranks that are threads of this process.")
      .def(
          "__init__",
          [](PyThreadGroup* self, int world) {
            new (self) PyThreadGroup{take(ThreadGroup::make(world)), world};
          },
          nb::arg("world"))
      .def("join", &join, nb::arg("rank"), nb::arg("timeout") = 30.0,
           "This thread as a rank; waits for all, at most timeout seconds. When its Exchange and "
           "the layers over it "
           "are\n"
           "dropped, the rank has left.");
  m.def("propose_placement", &propose, nb::arg("load"), nb::arg("world"), nb::arg("slots_per_rank"),
        "A placement under which ranks have about equally much to do: the expert of each slot, "
        "rank by rank.\n\n"
        "load: how often each expert was chosen (MoeLayer.expert_load()). slots_per_rank: at least "
        "experts / world; "
        "more of\n"
        "them hold second slots of the experts with the most load. The same on all ranks for the "
        "same load. Raises\n"
        "ValueError where the slots do not hold every expert.");
  m.def("connect_exchange", &connect, nb::arg("all_to_all_v"), nb::arg("rank"), nb::arg("world"),
        nb::arg("timeout"),
        nb::sig("def connect_exchange(all_to_all_v: Callable[[memoryview, list[int], memoryview, "
                "list[int], float], "
                "None], rank: int, world: int, timeout: float) -> Exchange"));
}

}  // namespace nvfp4_moe::internal::python
