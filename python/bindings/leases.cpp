#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "bindings.h"
#include "kvpool/cache/layer_lease.h"
#include "kvpool/cache/lease_group.h"
#include "pool_object.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using cache::BufferGrowth;
using cache::BufferShape;
using cache::LayerLease;
using cache::LeaseGroup;

std::shared_ptr<LeaseGroup> make_group(const PoolObject* pool, OwnerId owner) {
  return std::make_shared<LeaseGroup>(pool == nullptr ? nullptr : pool->pool, owner);
}

// What decoding asks once a layer and token is one number: the row where the tokens start where the
// buffers have room; -1 where the step is torn; -2 less that row where the buffers are to get
// another length.
std::int64_t append(LayerLease& lease, std::int64_t batch, std::int64_t n_tokens,
                    std::int64_t rows) {
  const auto shape = lease.append(batch, n_tokens);
  if (!shape) return -1;
  const std::int64_t start = shape->offset - n_tokens;
  return shape->rows == rows ? start : -2 - start;
}

}  // namespace

void bind_leases(nb::module_& m) {
  nb::class_<BufferGrowth>(m, "BufferGrowth", "How a layer's buffers get room for more tokens.")
      .def_static("exact", &BufferGrowth::exact, "step"_a, "Whole steps, as mlx-lm's KVCache.")
      .def_static("spare", &BufferGrowth::spare, "quantum"_a, "block_size"_a,
                  "By half again, less where the pool is short.")
      .def_static("ring", &BufferGrowth::ring, "max_size"_a, "keep"_a, "step"_a, "block_size"_a = 0,
                  "A window, as mlx-lm's RotatingKVCache.");

  nb::class_<LeaseGroup>(m, "LeaseGroup", "The blocks behind all layers of one request.")
      .def(nb::new_(&make_group), "pool"_a.none(), "owner"_a)
      .def_prop_ro("n_layers", &LeaseGroup::n_layers)
      .def_prop_ro("n_blocks", &LeaseGroup::n_blocks, "Blocks held, keys and values together.")
      .def("prepare", &LeaseGroup::prepare, "pairs"_a, "call"_a,
           "Reserves blocks for replacements of the layers' buffers to come.")
      .def("has_at_hand", &LeaseGroup::has_at_hand, "pairs"_a,
           "Whether the pool has that many pairs of blocks without growing.")
      .def("pairs_for", &LeaseGroup::pairs_for, "batch"_a, "rows"_a,
           "Pairs of blocks that the rows of a batch take.")
      .def("end_step", &LeaseGroup::end_step, "Ends the step under way; undo its layers first.")
      .def("release", &LeaseGroup::release, "Gives every block back.")
      .def("check_invariants", &LeaseGroup::check_invariants);

  nb::class_<LayerLease>(m, "LayerLease", "The blocks behind one layer's keys and values.")
      .def(nb::init<std::shared_ptr<LeaseGroup>, const BufferGrowth&>(), "group"_a, "growth"_a)
      .def_prop_ro("group", &LayerLease::group)
      .def_prop_ro("offset", &LayerLease::offset)
      .def_prop_ro(
          "steady_offset",
          [](const LayerLease& self) { return self.is_torn() ? -1 : self.offset(); },
          "The offset; -1 where append would find the step torn.")
      .def_prop_ro("rows", [](const LayerLease& self) { return self.shape().rows; })
      .def_prop_ro("index", [](const LayerLease& self) { return self.shape().index; })
      .def_prop_ro("batch", &LayerLease::batch)
      .def_prop_ro("n_blocks", &LayerLease::n_blocks, "Blocks held, keys and values together.")
      .def_prop_ro("is_trimmable", &LayerLease::is_trimmable)
      .def_prop_ro("has_moved", &LayerLease::has_moved)
      .def_prop_ro("is_torn", &LayerLease::is_torn)
      .def_prop_ro("in_torn_step", &LayerLease::in_torn_step)
      .def("append", &append, "batch"_a, "n_tokens"_a, "rows"_a,
           "Moves the layer on and returns the row where its tokens start. -1 where the step is\n"
           "torn, -2 less that row where the buffers are not to keep their length, rows.")
      .def("fits_tightened", &LayerLease::fits_tightened, "batch"_a, "n_tokens"_a,
           "Whether append would find room once every layer has given its spare rows back.")
      .def("tighten", &LayerLease::tighten, "Gives spare rows back; returns the rows left.")
      .def("commit", &LayerLease::commit, "The buffers show what append charged.")
      .def(
          "undo", [](LayerLease& self, std::int64_t rows) { (void)self.undo(rows); },
          "rows_in_buffer"_a, "Takes the step under way back, or the last one.")
      .def("trim", &LayerLease::trim, "n_tokens"_a, "Drops the newest tokens and returns how many.")
      .def(
          "replace",
          [](LayerLease& self, std::int64_t batch, std::int64_t offset, std::int64_t rows,
             std::int64_t index,
             const char* call) { self.replace(batch, BufferShape{offset, rows, index}, call); },
          "batch"_a, "offset"_a, "rows"_a, "index"_a, "call"_a = "LayerLease::replace",
          "Charges buffers put in place from outside.")
      .def("set_padding", &LayerLease::set_padding, "first"_a, "counts"_a,
           "Counts rows as held but unused.")
      .def("set_formats", &LayerLease::set_formats, "keys"_a, "values"_a)
      .def("supersede", &LayerLease::supersede, "growth"_a, "format"_a,
           "A new layer in this one's place; this one becomes a group of its own.")
      .def("copy_into", &LayerLease::copy_into, "group"_a, "call"_a,
           "A copy at the end of another group, charged there.");
}

}  // namespace kvpool::bindings
