#include <nanobind/nanobind.h>

#include <string>

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
  // Knows the types of the arrays that cross; loading it first also brings libmlx.
  nb::module_::import_("mlx.core");
  nb::set_leak_warnings(false);
}
