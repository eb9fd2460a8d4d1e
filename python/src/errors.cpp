// The exception classes of the module, and the translation of Failure and std::bad_alloc into them
// for every function of the module.
#include "errors.h"

#include <nanobind/stl/string.h>

#include <array>
#include <new>

namespace nvfp4_moe::internal::python {

namespace nb = nanobind;

namespace {

struct ErrorClass {
  Code code;
  const char* name;
  PyObject* const* builtin;  // the second base, after Error
  const char* doc;
};
const std::array<ErrorClass, 9> kClasses = {{
    {Code::kCheckFailed, "CheckFailed", &PyExc_RuntimeError, "A comparison failed."},
    {Code::kInvalidArgument, "InvalidArgument", &PyExc_ValueError,
     "An option, shape, dtype or value is wrong."},
    {Code::kUnsupported, "Unsupported", &PyExc_NotImplementedError,
     "The request is legal, but no backend, device or build here supports it."},
    {Code::kBadInput, "BadInput", &PyExc_ValueError,
     "The content of a file or of a weight array is wrong."},
    {Code::kIo, "IoError", &PyExc_OSError, "The operating system refused a file operation."},
    {Code::kOutOfMemory, "OutOfMemory", &PyExc_MemoryError, "An allocation failed."},
    {Code::kBusy, "Busy", &PyExc_RuntimeError, "The object is in use elsewhere."},
    {Code::kInternal, "Internal", &PyExc_RuntimeError, "A bug in the library."},
    {Code::kCancelled, "Cancelled", &PyExc_RuntimeError, "A progress callback asked to stop."},
}};

// Indexed by Code. Owned references, never released: the module lives as long as the process.
std::array<PyObject*, 16> classes{};

// Always leaves a Python error set.
void raise(const Failure& failure) {
  PyObject* const type = classes[static_cast<size_t>(failure.code())];
  const std::string text = failure.what();
  // A message may quote a file. Bytes that are not UTF-8 are replaced.
  PyObject* const message =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (message == nullptr) return;
  PyObject* const error = PyObject_CallFunctionObjArgs(type, message, nullptr);
  Py_DECREF(message);
  if (error == nullptr) return;
  if (const std::string finding = failure.finding(); !finding.empty()) {
    PyObject* const id = PyUnicode_FromString(finding.c_str());
    if (id == nullptr || PyObject_SetAttrString(error, "finding", id) != 0) PyErr_Clear();
    Py_XDECREF(id);
  }
  PyErr_SetObject(type, error);
  Py_DECREF(error);
}

void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const Failure& failure) {
    raise(failure);
  } catch (const std::bad_alloc&) {
    raise(Failure(caught_exception()));
  }
}

PyObject* make_class(nb::module_& m, const char* name, const char* doc, const nb::tuple& bases,
                     Code code) {
  const std::string full_name = nb::cast<std::string>(m.attr("__name__")) + "." + name;
  nb::dict attributes;
  attributes["status"] = static_cast<int>(code);
  attributes["finding"] = nb::none();
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), attributes.ptr());
  if (type == nullptr) nb::raise_python_error();
  m.attr(name) = nb::handle(type);
  return type;
}

// "TypeError: its text", like the end of a traceback; only the class if there is no text.
std::string text_of(const nb::python_error& raised) {
  const nb::object name =
      nb::steal(in_python([&] { return PyObject_GetAttrString(raised.type().ptr(), "__name__"); }));
  const char* const utf8_name =
      name.is_valid() ? PyUnicode_AsUTF8AndSize(name.ptr(), nullptr) : nullptr;
  if (utf8_name == nullptr) PyErr_Clear();
  std::string text = utf8_name != nullptr ? utf8_name : "exception";
  const nb::object said = nb::steal(in_python([&] { return PyObject_Str(raised.value().ptr()); }));
  const char* const utf8 = said.is_valid() ? PyUnicode_AsUTF8AndSize(said.ptr(), nullptr) : nullptr;
  if (utf8 == nullptr) {
    PyErr_Clear();
  } else if (*utf8 != 0) {
    text.append(": ").append(utf8);
  }
  return text;
}

Code code_of(const nb::python_error& raised) {
  for (const ErrorClass& entry : kClasses)
    if (raised.matches(classes[static_cast<size_t>(entry.code)])) return entry.code;
  if (raised.matches(PyExc_TypeError) || raised.matches(PyExc_ValueError))
    return Code::kInvalidArgument;
  if (raised.matches(PyExc_MemoryError)) return Code::kOutOfMemory;
  return raised.matches(PyExc_Exception) ? Code::kInternal : Code::kCancelled;  // Ctrl-C
}

}  // namespace

Status status_of(const std::exception& raised) {
  if (const auto* failure = dynamic_cast<const Failure*>(&raised)) return failure->status();
  if (const auto* error = dynamic_cast<const nb::python_error*>(&raised))
    return {code_of(*error), text_of(*error)};
  if (dynamic_cast<const std::bad_alloc*>(&raised) != nullptr)
    return {Code::kOutOfMemory, "out of memory"};
  // Exceptions that nanobind turns into TypeError and similar ones.
  const bool argument = dynamic_cast<const nb::builtin_exception*>(&raised) != nullptr ||
                        dynamic_cast<const nb::cast_error*>(&raised) != nullptr;
  return {argument ? Code::kInvalidArgument : Code::kInternal, raised.what()};
}

void bind_errors(nb::module_& m) {
  PyObject* const base =
      make_class(m, "Error",
                 "Base class of this library's errors.\n\n"
                 "status: the status code, as on the command line. finding: the id of the "
                 "checkpoint's finding\nthat caused the error, as nvfp4_moe.inspect lists them, or "
                 "None.",
                 nb::make_tuple(nb::handle(PyExc_Exception)), Code::kInternal);
  for (const ErrorClass& entry : kClasses)
    classes[static_cast<size_t>(entry.code)] =
        make_class(m, entry.name, entry.doc,
                   nb::make_tuple(nb::handle(base), nb::handle(*entry.builtin)), entry.code);
  nb::register_exception_translator(translate);
}

}  // namespace nvfp4_moe::internal::python
