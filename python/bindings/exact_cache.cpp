#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/cache/exact_kv_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using cache::ExactKVCache;
using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const float> numbers(const Row& row) { return {row.data(), row.size()}; }

formats::Format format_named(std::string_view name) {
  if (const auto format = formats::format_from_name(name)) return *format;
  throw InvalidArgument("[ExactKVCache] dtype must be fp32, fp16 or bf16, got '" +
                        std::string(name) + "'");
}

nb::object attend(const ExactKVCache& self, const Rows& queries) {
  const std::size_t n = queries.shape(0);
  const std::size_t width = queries.shape(1);
  auto output = std::make_unique<float[]>(n * width);
  // The GIL stays: another thread's append could move the rows that are being read.
  self.attend({queries.data(), n * width}, {output.get(), n * width});
  float* data = output.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  output.release();
  return nb::cast(nb::ndarray<nb::numpy, float>(data, {n, width}, owner));
}

}  // namespace

void bind_exact_cache(nb::module_& m) {
  nb::class_<ExactKVCache>(m, "ExactKVCache", "The C++ part of kvpool.cache.ExactKVCache.")
      .def(
          "__init__",
          [](ExactKVCache* self, std::int64_t head_dim, std::string_view format,
             std::optional<std::int64_t> capacity) {
            new (self) ExactKVCache({head_dim, format_named(format), capacity});
          },
          "head_dim"_a, "format"_a, "capacity"_a = nb::none())
      .def(
          "append_key", [](ExactKVCache& self, const Row& key) { self.append_key(numbers(key)); },
          "key"_a,
          nb::sig("def append_key(self, key: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def(
          "append_value",
          [](ExactKVCache& self, const Row& value) { self.append_value(numbers(value)); },
          "value"_a,
          nb::sig("def append_value(self, value: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def(
          "append",
          [](ExactKVCache& self, const Row& key, const Row& value) {
            self.append(numbers(key), numbers(value));
          },
          "key"_a, "value"_a,
          nb::sig("def append(self, key: numpy.typing.NDArray[numpy.float32], "
                  "value: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def("attend", attend, "queries"_a,
           nb::sig("def attend(self, queries: numpy.typing.NDArray[numpy.float32]) -> "
                   "numpy.typing.NDArray[numpy.float32]"))
      .def("discard_key", &ExactKVCache::discard_key)
      .def("memory_bytes", &ExactKVCache::memory_bytes)
      .def("reset", &ExactKVCache::reset)
      .def("check_invariants", &ExactKVCache::check_invariants)
      .def_prop_ro("has_pending_key", &ExactKVCache::has_pending_key)
      .def("__len__", &ExactKVCache::size);
}

}  // namespace kvpool::bindings
