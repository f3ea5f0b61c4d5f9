#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/kernels/row_kernels.h"
#include "kvpool/methods/quantized_kv_cache.h"
#include "kvpool/methods/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using methods::KVCacheConfig;
using methods::Method;
using methods::MethodInfo;
using methods::QuantizedKVCache;
using methods::SpectralCalibration;

using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

std::int64_t extent(const Heads& heads, std::size_t axis) {
  return static_cast<std::int64_t>(heads.shape(axis));
}

formats::Format float_format(std::string_view name) {
  const auto format = formats::format_from_name(name);
  if (format && formats::traits(*format).kind == formats::Kind::kFloat) return *format;
  throw InvalidArgument("[KVCacheConfig] precision must be fp32, fp16 or bf16, got '" +
                        std::string(name) + "'");
}

std::shared_ptr<const SpectralCalibration> calibration_of(
    const std::optional<std::tuple<Matrix, Matrix, std::int64_t, std::int64_t>>& given) {
  if (!given) return nullptr;
  const auto& [keys, values, key_dims, value_dims] = *given;
  auto calibration = std::make_shared<SpectralCalibration>();
  calibration->key_vectors.assign(keys.data(), keys.data() + keys.size());
  calibration->value_vectors.assign(values.data(), values.data() + values.size());
  calibration->key_signal_dims = key_dims;
  calibration->value_signal_dims = value_dims;
  return calibration;
}

nb::dict row_of(const MethodInfo& info) {
  const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
  nb::dict row;
  for (const auto& [name, value] : {std::pair{"name", info.name},
                                    {"title", info.title},
                                    {"authors", info.authors},
                                    {"arxiv", info.arxiv},
                                    {"summary", info.summary}}) {
    row[name] = text(value);
  }
  row["min_bits"] = info.min_bits;
  row["max_bits"] = info.max_bits;
  row["head_dim_multiple"] = info.head_dim_multiple;
  row["default_residual_length"] = info.default_residual_length;
  nb::list parameters;
  for (const methods::ParameterInfo& parameter : info.parameters) {
    parameters.append(nb::make_tuple(text(parameter.name), text(parameter.default_value),
                                     text(parameter.limits), text(parameter.what)));
  }
  row["parameters"] = parameters;
  return row;
}

void append(QuantizedKVCache& self, const Heads& keys, const Heads& values) {
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (keys.shape(axis) != values.shape(axis) ||
        (axis == 3 && extent(keys, 3) != self.head_dim())) {
      throw InvalidArgument(
          "[QuantizedKVCache::append] keys and values must be of one shape that "
          "ends in head_dim " +
          std::to_string(self.head_dim()));
    }
  }
  nb::gil_scoped_release unlocked;  // milliseconds for a prompt
  self.append(keys.data(), values.data(), {extent(keys, 0), extent(keys, 1)}, extent(keys, 2));
}

nb::object attend(const QuantizedKVCache& self, const Heads& queries,
                  std::optional<std::int64_t> causal_offset, std::optional<float> scale) {
  if (extent(queries, 3) != self.head_dim()) {
    throw InvalidArgument("[QuantizedKVCache::attend] queries must end in head_dim " +
                          std::to_string(self.head_dim()));
  }
  auto output = std::make_unique<float[]>(queries.size());
  {
    nb::gil_scoped_release unlocked;
    self.attend({.data = queries.data(),
                 .batch = extent(queries, 0),
                 .n_heads = extent(queries, 1),
                 .n_queries = extent(queries, 2),
                 .causal_offset = causal_offset,
                 .scale = scale},
                output.get());
  }
  float* data = output.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  output.release();
  return nb::cast(nb::ndarray<nb::numpy, float>(
      data, {queries.shape(0), queries.shape(1), queries.shape(2), queries.shape(3)}, owner));
}

const float* row_of(const QuantizedKVCache& self, const char* call, const Row& row) {
  if (static_cast<std::int64_t>(row.size()) == self.head_dim()) return row.data();
  throw InvalidArgument("[QuantizedKVCache::" + std::string(call) + "] needs " +
                        std::to_string(self.head_dim()) + " numbers, got " +
                        std::to_string(row.size()));
}

}  // namespace

void bind_methods(nb::module_& m) {
  m.def(
      "method_table",
      [] {
        nb::list table;
        for (const MethodInfo& info : methods::methods()) table.append(row_of(info));
        return table;
      },
      "The rows of the registry of methods.",
      nb::sig("def method_table() -> list[dict[str, Any]]"));
  m.def("row_kernels_target", [] { return kernels::row_kernels().target; });

  nb::class_<Method>(m, "Method", "A quantisation method made from its parameters.")
      .def(nb::new_([](std::string method, std::int64_t head_dim, std::int64_t bit_width_inlier,
                       std::optional<std::int64_t> value_bits, std::optional<std::int64_t> jl_dim,
                       std::int64_t seed, std::optional<std::int64_t> capacity,
                       std::optional<std::int64_t> residual_length, std::string_view precision,
                       std::int64_t n_outlier_channels, std::int64_t n_calib_tokens,
                       std::int64_t kivi_group_size, std::int64_t spectral_key_d_eff,
                       std::int64_t spectral_val_d_eff, bool spectral_apply_qjl,
                       std::optional<std::tuple<Matrix, Matrix, std::int64_t, std::int64_t>>
                           spectral_calibration,
                       std::optional<std::array<std::int64_t, 4>> polar_level_bits,
                       std::optional<bool> unbiased_scores, bool as_published) {
             return methods::make_method({
                 .method = std::move(method),
                 .head_dim = head_dim,
                 .bit_width_inlier = bit_width_inlier,
                 .value_bits = value_bits,
                 .jl_dim = jl_dim,
                 .seed = seed,
                 .capacity = capacity,
                 .residual_length = residual_length,
                 .precision = float_format(precision),
                 .n_outlier_channels = n_outlier_channels,
                 .n_calib_tokens = n_calib_tokens,
                 .kivi_group_size = kivi_group_size,
                 .spectral_key_d_eff = spectral_key_d_eff,
                 .spectral_val_d_eff = spectral_val_d_eff,
                 .spectral_apply_qjl = spectral_apply_qjl,
                 .spectral_calibration = calibration_of(spectral_calibration),
                 .polar_level_bits = polar_level_bits,
                 .unbiased_scores = unbiased_scores,
                 .as_published = as_published,
             });
           }),
           "method"_a, nb::kw_only(), "head_dim"_a, "bit_width_inlier"_a, "value_bits"_a,
           "jl_dim"_a, "seed"_a, "capacity"_a, "residual_length"_a, "precision"_a,
           "n_outlier_channels"_a, "n_calib_tokens"_a, "kivi_group_size"_a, "spectral_key_d_eff"_a,
           "spectral_val_d_eff"_a, "spectral_apply_qjl"_a, "spectral_calibration"_a,
           "polar_level_bits"_a, "unbiased_scores"_a, "as_published"_a)
      .def_prop_ro("residual_length",
                   [](const Method& self) { return self.config.residual_length.value_or(0); })
      .def_prop_ro("group", [](const Method& self) { return self.keys->group(); })
      .def("key_bytes_per_token",
           [](const Method& self) {
             return static_cast<double>(self.keys->page_bytes(self.keys->group())) /
                    static_cast<double>(self.keys->group());
           })
      .def("bytes_per_token", methods::coded_bytes_per_token)
      .def("constant_bytes", [](const Method& self) {
        return self.keys->constant_bytes() + self.values->constant_bytes();
      });

  nb::class_<QuantizedKVCache>(m, "QuantizedKVCache",
                               "The C++ part of kvpool.cache.QuantizedKVCache.")
      .def(nb::init<std::shared_ptr<const Method>>(), "method"_a)
      .def(
          "append_key",
          [](QuantizedKVCache& self, const Row& key) {
            self.append_key(row_of(self, "append_key", key));
          },
          "key"_a,
          nb::sig("def append_key(self, key: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def(
          "append_value",
          [](QuantizedKVCache& self, const Row& value) {
            self.append_value(row_of(self, "append_value", value));
          },
          "value"_a,
          nb::sig("def append_value(self, value: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def("append", append, "keys"_a, "values"_a,
           nb::sig("def append(self, keys: numpy.typing.NDArray[numpy.float32], "
                   "values: numpy.typing.NDArray[numpy.float32]) -> None"))
      .def("attend", attend, "queries"_a, "causal_offset"_a = nb::none(), "scale"_a = nb::none(),
           nb::sig("def attend(self, queries: numpy.typing.NDArray[numpy.float32], "
                   "causal_offset: int | None = None, scale: float | None = None) -> "
                   "numpy.typing.NDArray[numpy.float32]"))
      .def("discard_key", &QuantizedKVCache::discard_key)
      .def("memory_bytes", &QuantizedKVCache::memory_bytes)
      .def("reset", &QuantizedKVCache::reset)
      .def("check_invariants", &QuantizedKVCache::check_invariants)
      .def_prop_ro("has_pending_key", &QuantizedKVCache::has_pending_key)
      .def_prop_ro("offset", &QuantizedKVCache::end)
      .def_prop_ro("n_exact", &QuantizedKVCache::n_exact)
      .def_prop_ro("shape",
                   [](const QuantizedKVCache& self) {
                     return std::tuple{self.shape().batch, self.shape().n_kv_heads};
                   })
      .def("__len__", &QuantizedKVCache::size);
}

}  // namespace kvpool::bindings
