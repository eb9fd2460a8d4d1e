// The interpreter lock around the library's work, for threads that the interpreter may leave
// behind, and signals that arrive meanwhile.
//
// When the interpreter ends, daemon threads may be in the middle of a run. One that then asks for
// the interpreter lock is ended by CPython before 3.14 with pthread_exit: that unwinds the stack as
// an exception does, and aborts the process at a destructor or a handler that lets nothing through,
// of which every C++ module is full. From 3.14 on CPython lets such a thread sleep until the
// process is gone; what is here does so in every version.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>

namespace nvfp4_moe::internal::python {

// For a thread that outlived the interpreter.
[[noreturn]] inline void sleep_for_ever() {
  while (true) pause();
}

inline bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// Once, when the module is loaded: the unwinder that is linked into it (-static-libgcc) sets itself
// up at the first exception, and until then aborts when libpthread's unwinder reaches the module's
// handlers.
inline void prepare_to_be_unwound() {
  try {
    throw 0;
  } catch (int) {
  }
}

// function(), which runs Python code.
template <class Function>
decltype(auto) in_python(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (abi::__forced_unwind&) {  // must be thrown on, or never left
    sleep_for_ever();
  }
}

// Without the lock for a scope, whose end takes it again.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  ~WithoutLock() {
    if (!ending_ && interpreter_is_ending()) sleep_for_ever();
    in_python([this] { PyEval_RestoreThread(state_); });  // or it ends while this waits
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  // and this is the thread that ends it, which goes on
  const bool ending_ = interpreter_is_ending();
  PyThreadState* const state_;
};

// With the lock for a scope.
class WithLock {
 public:
  WithLock() : state_(take()) {}
  ~WithLock() { PyGILState_Release(state_); }
  WithLock(const WithLock&) = delete;
  WithLock& operator=(const WithLock&) = delete;

 private:
  static PyGILState_STATE take() {
    if (interpreter_is_ending()) sleep_for_ever();
    return in_python([] { return PyGILState_Ensure(); });
  }
  const PyGILState_STATE state_;
};

// The deleter of what Python holds and whose end may wait: freed memory of a device waits for the
// device's work, which may be that of ranks whose threads need the lock to bring theirs.
struct DeleteWithoutLock {
  template <class T>
  void operator()(T* old) const {
    if (interpreter_is_ending() ||
        PyGILState_Check() == 0) {  // no other thread runs Python any more; or has no lock
      delete old;
      return;
    }
    const WithoutLock unlocked;
    delete old;
  }
};

// Whether Ctrl-C, or another signal with a handler in Python, asks long work to stop. Handlers run
// in the main thread, and only when it polls.
class Signals {
 public:
  // Seldom enough that a busy interpreter's lock is not in the way of the work, often enough for
  // whoever waits.
  static constexpr std::chrono::milliseconds kInterval{50};

  // True if a handler raised, which `raised` then is. Called without the lock, or with it.
  bool pending(std::unique_ptr<nanobind::python_error>& raised) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < kInterval) return false;
    last_ = now;
    const WithLock lock;
    if (in_python([] { return PyErr_CheckSignals(); }) == 0) return false;
    raised = std::make_unique<nanobind::python_error>();
    return true;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace nvfp4_moe::internal::python
