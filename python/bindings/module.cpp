#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "The C++ part of kvpool that needs no MLX; use the package's own modules instead.";
  m.attr("__version__") = KVPOOL_VERSION;
}
