#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cstddef>
#include <string_view>

#include "bindings.h"
#include "kvpool/formats/format.h"
#include "kvpool/kernels/simd_target.h"

namespace nb = nanobind;

namespace kvpool::bindings {

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
          [](const FormatTraits& self, std::size_t width) {
            return formats::row_bytes(self.format, width);
          },
          nb::arg("width"), "Bytes of a row of `width` numbers, the last one filled up.")
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
