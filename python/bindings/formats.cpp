#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "arguments.h"
#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/formats/format.h"
#include "kvpool/formats/page_layout.h"
#include "kvpool/kernels/simd_target.h"

namespace nb = nanobind;

namespace kvpool::bindings {
namespace {

// Throws nanobind::python_error.
std::int64_t page_bytes(const formats::FormatTraits& self, nb::handle n_heads,
                        nb::handle block_size, nb::handle head_dim) {
  constexpr const char* kCall = "Format::page_bytes";
  try {
    const formats::PageLayout layout{self.format,
                                     {int_argument(kCall, "n_heads", n_heads.ptr()),
                                      int_argument(kCall, "block_size", block_size.ptr()),
                                      int_argument(kCall, "head_dim", head_dim.ptr())}};
    formats::check_page(kCall, layout);
    return layout.page_bytes();
  } catch (const PythonErrorSet&) {
    throw nb::python_error();
  } catch (const InvalidArgument& error) {
    throw nb::value_error(error.what());
  }
}

// Throws nanobind::python_error.
std::size_t row_width(nb::handle width) {
  constexpr const char* kCall = "Format::row_bytes";
  constexpr std::int64_t kMost = std::int64_t{1} << 48;  // whose bytes do not overflow
  try {
    const std::int64_t number = int_argument(kCall, "width", width.ptr());
    if (number < 0 || number > kMost) {
      refuse(PyExc_ValueError, kCall, "width must be in 0..%lld, got %R",
             static_cast<long long>(kMost), width.ptr());
    }
    return static_cast<std::size_t>(number);
  } catch (const PythonErrorSet&) {
    throw nb::python_error();
  }
}

}  // namespace

void bind_formats(nb::module_& m) {
  using formats::FormatTraits;
  nb::class_<FormatTraits>(m, "Format", "How the numbers of a block lie in memory.")
      .def_prop_ro(
          "name", [](const FormatTraits& self) { return self.name; }, "The tag that blocks carry.")
      .def_ro("bits", &FormatTraits::bits, "Bits of a number.")
      .def_prop_ro(
          "is_float", [](const FormatTraits& self) { return self.kind == formats::Kind::kFloat; },
          "False for packed unsigned codes.")
      .def_prop_ro(
          "max_code",
          [](const FormatTraits& self) -> nb::object {
            if (self.kind == formats::Kind::kFloat) return nb::none();
            return nb::int_(self.max_code());
          },
          "The largest code, None for a float format.", nb::sig("def max_code(self) -> int | None"))
      .def(
          "row_bytes",
          [](const FormatTraits& self, nb::handle width) {
            return formats::row_bytes(self.format, row_width(width));
          },
          nb::arg("width"), "Bytes of a row of `width` numbers, the last one filled up.",
          nb::sig("def row_bytes(self, width: int) -> int"))
      .def("page_bytes", &page_bytes, nb::arg("n_heads"), nb::arg("block_size"),
           nb::arg("head_dim"),
           "Bytes of a page of a paged cache, scales and minimums of codes among them.",
           nb::sig("def page_bytes(self, n_heads: int, block_size: int, head_dim: int) -> int"))
      .def("__repr__",
           [](const FormatTraits& self) { return nb::str("Format('{}')").format(self.name); });
  nb::list all;
  for (const FormatTraits& traits : formats::kFormats) {
    all.append(nb::cast(&traits, nb::rv_policy::reference));
  }
  m.attr("FORMATS") = nb::tuple(all);

  m.def("simd_target_name", &kernels::simd_target_name,
        "The vector instructions that the kernels use on this machine, or 'scalar'.");
}

}  // namespace kvpool::bindings
