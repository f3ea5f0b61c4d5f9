#include <nanobind/nanobind.h>

#include <string>

#include "bindings.h"
#include "kvpool/mlx_ext/mlx_version.h"

namespace nb = nanobind;

NB_MODULE(_mlx, m) {
  m.doc() = "The C++ part of kvpool that holds MLX arrays; use the package's own modules instead.";
  const std::string built_for = kvpool::mlx_ext::compiled_mlx_version();
  const std::string loaded = kvpool::mlx_ext::loaded_mlx_version();
  if (built_for != loaded) {
    throw nb::import_error(
        ("kvpool was built for MLX " + built_for + ", and MLX " + loaded + " is loaded").c_str());
  }
  m.attr("__mlx_version__") = built_for.c_str();
  // It binds the arrays that cross. The pool and the exceptions are bound by kvpool._native, which
  // the package imports before this.
  nb::module_::import_("mlx.core");
  nb::set_leak_warnings(false);
  kvpool::bindings::bind_paged_pool(m);
  kvpool::bindings::bind_paged_layer(m);
  kvpool::bindings::bind_method_formats(m);
  kvpool::bindings::bind_attention(m);
}
