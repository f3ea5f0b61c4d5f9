#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/mlx_ext/padding_mask.h"
#include "kvpool/mlx_ext/paged_attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using Array = mlx::core::array;
using mlx_ext::Attended;

/// `mask` as mlx.core.fast takes it: None, "causal" or an array.
Attended attended(const Array& queries, const Array& keys, const Array& values, float scale,
                  nb::handle mask, const std::optional<Array>& sinks) {
  if (mask.is_none()) return mlx_ext::attend(queries, keys, values, scale, {}, {}, sinks);
  if (PyUnicode_Check(mask.ptr())) {
    const char* mode = PyUnicode_AsUTF8(mask.ptr());
    if (mode == nullptr) throw nb::python_error();
    return mlx_ext::attend(queries, keys, values, scale, mode, {}, sinks);
  }
  return mlx_ext::attend(queries, keys, values, scale, {}, nb::cast<const Array&>(mask), sinks);
}

nb::object attend(const Array& queries, const Array& keys, const Array& values, float scale,
                  nb::handle mask, const std::optional<Array>& sinks) {
  const Attended answer = attended(queries, keys, values, scale, mask, sinks);
  if (const auto* output = std::get_if<Array>(&answer)) return nb::cast(*output);
  if (const auto* not_covered = std::get_if<mlx_ext::NotCovered>(&answer)) {
    return nb::str(not_covered->reason.data(), not_covered->reason.size());
  }
  return nb::none();
}

Array paged_attention(const Array& queries, const Array& keys, const Array& values, float scale,
                      nb::handle mask, const std::optional<Array>& sinks) {
  const Attended answer = attended(queries, keys, values, scale, mask, sinks);
  if (const auto* output = std::get_if<Array>(&answer)) return *output;
  const auto* not_covered = std::get_if<mlx_ext::NotCovered>(&answer);
  throw InvalidArgument(
      not_covered == nullptr
          ? "[paged_attention] keys and values must come from a paged cache, not evaluated"
          : "[paged_attention] the kernels do not cover this call: " +
                std::string(not_covered->reason));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend", &attend, "queries"_a, "keys"_a, "values"_a, "scale"_a, "mask"_a = nb::none(),
        "sinks"_a = nb::none(),
        nb::sig("def attend(queries: mlx.core.array, keys: mlx.core.array, values: mlx.core.array, "
                "scale: float, mask: mlx.core.array | str | None = None, "
                "sinks: mlx.core.array | None = None) -> mlx.core.array | str | None"),
        "scaled_dot_product_attention over the pages behind keys and values, which must be the\n"
        "very arrays that a paged layer returned, not evaluated. None where they are not; a str\n"
        "says why a call over pages is not covered.");
  m.def("paged_attention", &paged_attention, "queries"_a, "keys"_a, "values"_a, "scale"_a,
        "mask"_a = nb::none(), "sinks"_a = nb::none(),
        nb::sig("def paged_attention(queries: mlx.core.array, keys: mlx.core.array, "
                "values: mlx.core.array, scale: float, mask: mlx.core.array | str | None = None, "
                "sinks: mlx.core.array | None = None) -> mlx.core.array"),
        "The same, raising ValueError where attend returns no array.");
  m.def(
      "padding_mask",
      [](const Array& mask, std::vector<std::int64_t> n_rows) {
        return mlx_ext::padding_mask(mask, std::move(n_rows));
      },
      "mask"_a, "n_rows"_a,
      nb::sig("def padding_mask(mask: mlx.core.array, n_rows: collections.abc.Sequence[int]) -> "
              "mlx.core.array"),
      "The mask, [sequences, 1, 1, columns] of booleans, as one that hides what is before the "
      "last\n"
      "n_rows[i] columns of sequence i and nothing else: attend over the pages of those sequences\n"
      "answers as if there were none.");
}

}  // namespace kvpool::bindings
