#include "kvpool/cache/method_formats.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {

void bind_method_formats(nb::module_& m) {
  using methods::Method;  // kvpool._native binds it
  m.def(
      "method_keys",
      [](const std::shared_ptr<const Method>& method, std::int64_t n_heads, std::int64_t block_size,
         const std::string& recent) {
        return cache::method_keys(method, n_heads, block_size, page_format(recent));
      },
      "method"_a, "n_heads"_a, "block_size"_a, "recent"_a = "fp16",
      "Keys whose full blocks a method encodes; `recent` for those that are not full yet.",
      nb::sig("def method_keys(method: kvpool._native.Method, n_heads: int, block_size: int, "
              "recent: str = 'fp16') -> StreamFormat"));
  m.def(
      "method_values",
      [](const std::shared_ptr<const Method>& method, std::int64_t n_heads, std::int64_t block_size,
         const std::string& recent) {
        return cache::method_values(method, n_heads, block_size, page_format(recent));
      },
      "method"_a, "n_heads"_a, "block_size"_a, "recent"_a = "fp16", "The same for values.",
      nb::sig("def method_values(method: kvpool._native.Method, n_heads: int, block_size: int, "
              "recent: str = 'fp16') -> StreamFormat"));
}

}  // namespace kvpool::bindings
