#include "bindings.h"
#include "block.h"
#include "errors.h"

NB_MODULE(_native, m) {
  m.doc() = "The C++ part of kvpool that needs no MLX; use the package's own modules instead.";
  m.attr("__version__") = KVPOOL_VERSION;
  // The MLX that kvpool._mlx was built for; None where it was not built.
#ifdef KVPOOL_MLX_VERSION
  m.attr("__mlx_version__") = KVPOOL_MLX_VERSION;
#else
  m.attr("__mlx_version__") = nanobind::none();
#endif
  // A pool that is alive when the interpreter exits is no leak to print about.
  nanobind::set_leak_warnings(false);
  kvpool::bindings::register_exceptions();
  kvpool::bindings::add_block_type(m.ptr());
  kvpool::bindings::bind_block_pool(m);
  kvpool::bindings::bind_leases(m);
  kvpool::bindings::bind_block_storage(m);
  kvpool::bindings::bind_exact_cache(m);
  kvpool::bindings::bind_formats(m);
  kvpool::bindings::bind_methods(m);
  kvpool::bindings::bind_stream_lease(m);
}
