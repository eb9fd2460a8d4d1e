// The exception classes of the module, and the translation of a Failure into them.
#include "errors.h"

#include <nanobind/stl/string.h>

#include <array>

namespace nvfp4_moe::python {

namespace nb = nanobind;

namespace {

struct ErrorClass {
  Code code;
  const char* name;
  const char* doc;
};
constexpr std::array<ErrorClass, 8> kClasses = {{
    {Code::kCheckFailed, "CheckFailed", "A comparison ran and did not hold."},
    {Code::kUnsupported, "Unsupported", "Legal, but nothing here takes it."},
    {Code::kBadInput, "BadInput", "A file's content is wrong."},
    {Code::kIo, "IoError", "The operating system refused a file operation."},
    {Code::kOutOfMemory, "OutOfMemory", "An allocation failed."},
    {Code::kBusy, "Busy", "The object is in use elsewhere."},
    {Code::kInternal, "Internal", "A fault of the library."},
    {Code::kCancelled, "Cancelled", "A progress callback asked to stop."},
}};

// Indexed by Code. Owned references that live as long as the process, as the module does.
std::array<PyObject*, 16> classes{};

void translate(const std::exception_ptr& exception, void*) {
  try {
    std::rethrow_exception(exception);
  } catch (const Failure& failure) {
    PyObject* type = classes[static_cast<size_t>(failure.code())];
    PyErr_SetString(type != nullptr ? type : PyExc_ValueError, failure.what());
  }
}

PyObject* make_class(nb::module_& m, const char* name, const char* doc, PyObject* base, Code code) {
  const std::string full_name = nb::cast<std::string>(m.attr("__name__")) + "." + name;
  nb::dict attributes;
  attributes["code"] = static_cast<int>(code);
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base, attributes.ptr());
  if (type == nullptr) nb::raise_python_error();
  m.attr(name) = nb::handle(type);
  return type;
}

}  // namespace

void bind_errors(nb::module_& m) {
  PyObject* base = make_class(m, "Error", "Base of this library's errors; `code` is the command line's status.",
                              PyExc_RuntimeError, Code::kInternal);
  for (const ErrorClass& entry : kClasses) {
    classes[static_cast<size_t>(entry.code)] = make_class(m, entry.name, entry.doc, base, entry.code);
  }
  nb::register_exception_translator(translate);
}

}  // namespace nvfp4_moe::python
