// Releasing and taking the interpreter lock around the library's work, including threads that
// outlive the interpreter; and signals that arrive during the work.
//
// When the interpreter ends, daemon threads may be in the middle of a run. If one then takes the
// interpreter lock, CPython before 3.14 ends it with pthread_exit. That unwinds the stack like an
// exception and aborts the process at the first noexcept destructor or handler. From 3.14 on
// CPython lets such a thread sleep until the process exits. The code here does so in every version.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>

namespace nvfp4_moe::internal::python {

// Called by a thread that has outlived the interpreter.
[[noreturn]] inline void sleep_for_ever() {
  while (true) pause();
}

inline bool interpreter_is_ending() {
#if defined(Py_LIMITED_API)
  // The stable ABI of 3.12 has no Py_IsFinalizing. From 3.12 on both change in consecutive
  // statements, and a thread that comes between them ends up in in_python.
  return Py_IsInitialized() == 0;
#elif PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

// Called once, when the module is loaded. The unwinder that is linked into the module
// (-static-libgcc) initializes itself at the first exception. Before that it aborts if libpthread's
// unwinder reaches the module's handlers.
inline void prepare_to_be_unwound() {
  try {
    throw 0;
  } catch (int) {
  }
}

// Calls function(), which runs Python code.
template <class Function>
decltype(auto) in_python(Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (abi::__forced_unwind&) {  // must be rethrown, or the handler must never return
    sleep_for_ever();
  }
}

inline bool this_thread_has_the_lock() {
#if defined(Py_LIMITED_API)
  // Null if no thread state is attached to this thread. The stable ABI has no PyGILState_Check.
  return PyThreadState_GetDict() != nullptr;
#else
  return PyGILState_Check() != 0;
#endif
}

// Releases the lock for a scope and takes it again at its end.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  ~WithoutLock() {
    if (!ending_ && interpreter_is_ending()) sleep_for_ever();
    in_python([this] { PyEval_RestoreThread(state_); });  // the interpreter may end during the wait
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  // if it is ending, this is the thread that ends it, which continues
  const bool ending_ = interpreter_is_ending();
  PyThreadState* const state_;
};

// Takes the lock for a scope.
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

// Deletes objects that Python holds and whose destructor may wait. Freeing device memory waits for
// the device's work. Other ranks may have to finish that work, and their threads need the lock.
struct DeleteWithoutLock {
  template <class T>
  void operator()(T* old) const {
    if (interpreter_is_ending() || !this_thread_has_the_lock()) {  // no other thread waits for it
      delete old;
      return;
    }
    const WithoutLock unlocked;
    delete old;
  }
};

// Polls for Ctrl-C and other signals with a Python handler, so that long work can stop. Handlers
// run in the main thread, and only when it polls.
class Signals {
 public:
  // Rare enough that waiting for a busy interpreter's lock does not slow the work down, and often
  // enough for a user who waits.
  static constexpr std::chrono::milliseconds kInterval{50};

  // Returns true if a handler raised, and sets `raised`. Called with or without the lock.
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
