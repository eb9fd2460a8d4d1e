// nvfp4_moe._core: the compiled half of the Python package. It checks all arguments except for what
// depends on a framework, which the package checks. Python makes no decisions.
#include <nanobind/nanobind.h>

#include "errors.h"
#include "interpreter.h"
#include "moe/registry.h"

NB_MODULE(_core, m) {
  // torch.library keeps the operators' functions until the process exits, which nanobind would
  // report to every user as a leak.
  nanobind::set_leak_warnings(false);
  nvfp4_moe::internal::python::prepare_to_be_unwound();
  m.attr("__version__") = NVFP4_MOE_VERSION;
  m.attr("built_with_cuda") = nvfp4_moe::internal::find_backend("cuda") != nullptr;
  nvfp4_moe::internal::python::bind_errors(m);
  nvfp4_moe::internal::python::bind_formats(m);
  nvfp4_moe::internal::python::bind_codecs(m);
  nvfp4_moe::internal::python::bind_checkpoint(m);
  nvfp4_moe::internal::python::bind_quantize_checkpoint(m);
  nvfp4_moe::internal::python::bind_exchange(m);
  nvfp4_moe::internal::python::bind_layer(m);
  nvfp4_moe::internal::python::bind_layer_open(m);
  nvfp4_moe::internal::python::bind_linear(m);
  nvfp4_moe::internal::python::bind_router(m);
#if defined(NVFP4_MOE_WITH_CLI)
  nvfp4_moe::internal::python::bind_tool(m);
#endif
}
