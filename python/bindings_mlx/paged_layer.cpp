#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/mlx_ext/paged_layer_arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {

formats::Format page_format(const std::string& name) {
  if (const auto format = formats::format_from_name(name)) return *format;
  throw InvalidArgument("[StreamFormat] a format must be one of " + formats::format_names() +
                        ", got " + name);
}

namespace {

using cache::PagedGroup;
using cache::StreamFormat;
using mlx_ext::PagedLayerArrays;
using Array = PagedLayerArrays::array;

StreamFormat stream_format(const std::string& recent,
                           const std::vector<std::pair<std::string, std::int64_t>>& tiers) {
  StreamFormat format{page_format(recent), {}};
  for (const auto& [name, after_tokens] : tiers) {
    format.tiers.push_back({after_tokens, page_format(name), nullptr});
  }
  return format;
}

/// Evaluates what another thread left behind without the GIL; a call does it only then.
PagedLayerArrays& ready(PagedLayerArrays& layer) {
  if (layer.has_left_behind()) {
    const nb::gil_scoped_release released;
    layer.catch_up();
  }
  return layer;
}

/// Blocks that are lacking may be those of readers on their way, which are waited for once.
template <class Append>
auto appended(PagedLayerArrays& layer, Append append) {
  try {
    return append();
  } catch (const BlockPoolExhausted&) {
    const nb::gil_scoped_release released;
    if (!layer.await_blocks()) throw;
  }
  return append();
}

void append_batch(const std::vector<PagedLayerArrays*>& layers, const Array& keys,
                  const Array& values, const std::vector<std::int64_t>& counts) {
  if (counts.size() != layers.size()) {
    throw InvalidArgument("[append_batch] counts must be of " + std::to_string(layers.size()) +
                          " layers, got " + std::to_string(counts.size()));
  }
  const auto n = static_cast<std::int64_t>(layers.size());
  for (std::int64_t i = 0; i < n; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (counts[at] == 0) continue;
    if (layers[at] == nullptr)
      throw InvalidArgument("[append_batch] layers must be PagedLayers, got None");
    PagedLayerArrays& layer = ready(*layers[at]);
    appended(layer, [&] { layer.append(keys, values, n, i, counts[at]); });
  }
}

}  // namespace

void bind_paged_layer(nb::module_& m) {
  nb::class_<StreamFormat>(m, "StreamFormat", "What a layer's keys or values are kept in.")
      .def(nb::new_(&stream_format), "recent"_a = "fp16",
           "tiers"_a = std::vector<std::pair<std::string, std::int64_t>>{},
           "`recent` for new tokens; a tier (format, n) for full blocks older than the newest n.");

  nb::class_<PagedLayerArrays>(m, "PagedLayer", "One layer of a request: arrays in and out.")
      .def(nb::new_([](const std::shared_ptr<PagedGroup>& group, std::int64_t n_kv_heads,
                       std::int64_t key_dim, std::int64_t value_dim, const StreamFormat& keys,
                       const StreamFormat& values, std::int64_t window) {
             return std::make_unique<PagedLayerArrays>(
                 group,
                 cache::PagedLayerSpec{n_kv_heads, key_dim, value_dim, keys, values, window});
           }),
           "group"_a, "n_kv_heads"_a, "key_dim"_a, "value_dim"_a, "keys"_a = StreamFormat{},
           "values"_a = StreamFormat{}, "window"_a = 0,
           "Behind the layers that the group has: in the order in which a step visits them.")
      .def_prop_ro("group", [](const PagedLayerArrays& self) { return self.layer().group(); })
      .def_prop_ro("window",
                   [](const PagedLayerArrays& self) { return self.layer().spec().window; })
      .def_prop_ro(
          "offset", [](PagedLayerArrays& self) { return ready(self).offset(); },
          "Tokens appended and not trimmed, those behind a window included.")
      .def_prop_ro(
          "n_rows", [](PagedLayerArrays& self) { return ready(self).n_rows(); },
          "Tokens that keys_and_values returns.")
      .def_prop_ro(
          "n_blocks", [](const PagedLayerArrays& self) { return self.layer().n_blocks(); },
          "Blocks held, keys and values together.")
      .def_prop_ro(
          "nbytes", [](const PagedLayerArrays& self) { return self.layer().nbytes(); },
          "Bytes of their pages.")
      .def_prop_ro("is_trimmable",
                   [](const PagedLayerArrays& self) { return self.layer().is_trimmable(); })
      .def(
          "update_and_fetch",
          [](PagedLayerArrays& self, const Array& keys, const Array& values) {
            ready(self);
            return appended(self, [&] { return self.update_and_fetch(keys, values); });
          },
          "keys"_a, "values"_a,
          "Appends tokens; returns all that a query is to see, gathered when evaluated.")
      .def(
          "keys_and_values", [](PagedLayerArrays& self) { return ready(self).fetch(); },
          "What update_and_fetch last returned, anew; None while empty.")
      .def(
          "adopt",
          [](PagedLayerArrays& self, const Array& keys, const Array& values, std::int64_t offset) {
            self.load(keys, values, offset);
          },
          "keys"_a, "values"_a, "offset"_a,
          "Puts tokens in place of those held; offset is the position after the last one.")
      .def_prop_ro(
          "order", [](PagedLayerArrays& self) { return ready(self).order_token(); },
          "An array whose evaluation runs the appends so far, and gathers nothing.")
      .def(
          "trim",
          [](PagedLayerArrays& self, std::int64_t n_tokens) { return ready(self).trim(n_tokens); },
          "n_tokens"_a, "Drops the newest tokens and returns how many.")
      .def_prop_ro(
          "is_torn", [](const PagedLayerArrays& self) { return self.layer().is_torn(); },
          "A step was cut short, and this layer's next append takes it back.")
      .def(
          "roll_back",
          [](PagedLayerArrays& self, std::int64_t n_tokens) { ready(self).roll_back(n_tokens); },
          "n_tokens"_a, "Takes tokens of the last step back, of this layer alone.")
      .def("reset", &PagedLayerArrays::reset, "Gives this layer's blocks back.")
      .def(
          "fork",
          [](PagedLayerArrays& self, const std::shared_ptr<PagedGroup>& group) {
            return ready(self).fork(group);
          },
          "group"_a, "A copy at the end of another group, which shares every block.");

  m.def("append_batch", &append_batch, "layers"_a, "keys"_a, "values"_a, "counts"_a,
        "Appends the first counts[i] tokens of sequence i of keys and values, [sequences, heads,\n"
        "tokens, dims], to layer i. Where a layer refuses, those before it have moved.");
  m.def(
      "fetch_batch",
      [](const std::vector<PagedLayerArrays*>& layers) {
        for (PagedLayerArrays* layer : layers) {
          if (layer == nullptr)
            throw InvalidArgument("[fetch_batch] layers must be PagedLayers, got None");
          ready(*layer);
        }
        return mlx_ext::fetch_batch(layers);
      },
      "layers"_a,
      "Keys and values of a ragged batch, one layer a sequence; shorter ones are padded with\n"
      "zeros on their left. Attention reads the pages, as for those of one layer.");
}

}  // namespace kvpool::bindings
