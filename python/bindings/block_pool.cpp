#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "kvpool/metrics/prometheus.h"
#include "pool_methods.h"
#include "pool_object.h"

namespace nb = nanobind;

namespace kvpool::bindings {
namespace {

using Call = PyObject* (*)(PyObject*, Arguments, Py_ssize_t, PyObject*);

PyMethodDef method(const char* name, Call call, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

// The first line of each is what inspect.signature reads; python/kvpool/_native.pyi has the types.
PyMethodDef g_methods[] = {
    method("allocate", allocate,
           "allocate($self, /, stream, n_tokens, owner, format='fp16', *, layers=1)\n--\n\n"
           "Checks out the blocks that hold n_tokens token slots: all or none.\n\n"
           "An owner that is not active becomes so; a further call for it is the same request\n"
           "growing. All blocks are marked full but the last, whose n_used is the remainder.\n\n"
           "Args:\n"
           "    stream: 'k' or 'v'; any value where the pool has separate_kv=False.\n"
           "    n_tokens: Token slots needed, >= 1.\n"
           "    owner: The request, any 64-bit int.\n"
           "    format: Tag to record on each block.\n"
           "    layers: Runs of n_tokens to check out in one call, one after the other.\n\n"
           "Returns:\n"
           "    ceil(n_tokens / block_size) blocks for each layer, the block freed last first.\n\n"
           "Raises:\n"
           "    BlockPoolExhaustedError: Too few blocks are free and the pool cannot grow enough.\n"
           "    ValueError: An argument is out of range.\n"
           "    TypeError: n_tokens, owner or layers is no int, or format no str."),
    method("allocate_kv", allocate_kv,
           "allocate_kv($self, /, n_tokens, owner, format='fp16', *, value_format=None, layers=1)\n"
           "--\n\n"
           "Checks out blocks for keys and for values of n_tokens: both or none.\n\n"
           "Args:\n"
           "    n_tokens: Token slots needed of each, >= 1.\n"
           "    owner: The request, any 64-bit int.\n"
           "    format: Tag of the key blocks.\n"
           "    value_format: Tag of the value blocks, format where None.\n"
           "    layers: Runs of n_tokens to check out, one after the other.\n\n"
           "Returns:\n"
           "    (key_blocks, value_blocks), each as allocate returns them.\n\n"
           "Raises:\n"
           "    As allocate."),
    method("free", free_blocks,
           "free($self, /, blocks)\n--\n\n"
           "Gives back the reference behind each block, once; blocks freed before are skipped.\n\n"
           "Takes any iterable, which is read to its end before anything changes. A block goes on\n"
           "the free list when its last reference is gone. Costs the same for each block in any\n"
           "order.\n\n"
           "Raises:\n"
           "    ValueError: A block of another pool or of none; nothing was freed.\n"
           "    TypeError: Something else than Blocks; nothing was freed."),
    method("free_all", free_all,
           "free_all($self, /, owner)\n--\n\n"
           "Gives back every block of owner and ends its registration and its reservation."),
    method("blocks_for", blocks_for,
           "blocks_for($self, /, owner)\n--\n\n"
           "The blocks of owner in allocation order; [] for an unknown owner."),
    method(
        "mark_used", mark_used,
        "mark_used($self, /, block, n_used)\n--\n\n"
        "Sets the token slots in use of a block, or of each of an iterable of blocks.\n\n"
        "Raises:\n"
        "    ValueError: n_used is not in 0..block_size, a block is not checked out of this\n"
        "        pool, or the value would change a block that others refer to. No block changed."),
    method(
        "register_owner", register_owner,
        "register_owner($self, /, owner)\n--\n\n"
        "Marks owner active until release_owner or free_all.\n\n"
        "allocate does so by itself for an owner it has not seen; call this to catch an id that\n"
        "is still in use.\n\n"
        "Raises:\n"
        "    OwnerAlreadyActiveError: owner has blocks or is registered."),
    method("release_owner", release_owner,
           "release_owner($self, /, owner)\n--\n\n"
           "Ends a registration and a reservation. Does nothing for an unknown owner.\n\n"
           "Raises:\n"
           "    ValueError: owner still has blocks."),
    method("is_active", is_active,
           "is_active($self, /, owner)\n--\n\n"
           "Whether owner has blocks, a registration or a reservation."),
    {"new_owner", new_owner, METH_NOARGS,
     "new_owner($self, /)\n--\n\n"
     "An owner id that no caller uses: such ids are refused unless they come from here."},
    method("fork", fork,
           "fork($self, /, owner, new_owner=None)\n--\n\n"
           "Gives new_owner a reference to each block of owner; no block leaves the free list.\n\n"
           "A shared block is not to be written: ask writable for one that may be.\n\n"
           "Args:\n"
           "    owner: Whose blocks to share.\n"
           "    new_owner: An owner without blocks; None for a new id, the owner of the result.\n\n"
           "Returns:\n"
           "    The new references, in the owner's order."),
    method(
        "writable", writable,
        "writable($self, /, block)\n--\n\n"
        "The block itself where nobody else refers to it, otherwise a fresh one in its place.\n\n"
        "The fresh block has the same stream, format and n_used and takes its place in\n"
        "blocks_for, while the given reference is dropped. The bytes are the storage's to copy.\n\n"
        "Raises:\n"
        "    BlockPoolExhaustedError: A fresh block is needed and there is none.\n"
        "    ValueError: The block is not checked out of this pool."),
    method("reserve", reserve,
           "reserve($self, /, owner, n_tokens, *, layers=1)\n--\n\n"
           "Keeps blocks of both streams for owner: what n_tokens take in each of the layers.\n\n"
           "The owner's own allocations draw on them and nobody else's may; they stay on the free\n"
           "list until then. Replaces the owner's earlier reservation; n_tokens=0 cancels it, as\n"
           "free_all does. Grows the pool where its config allows.\n\n"
           "Raises:\n"
           "    BlockPoolExhaustedError: Too few blocks; the earlier reservation stands."),
    method("reserve_blocks", reserve_blocks,
           "reserve_blocks($self, /, owner, n_key_blocks, n_value_blocks)\n--\n\n"
           "As reserve, by blocks; with separate_kv=False the sum is kept of the one list."),
    method("n_reserved", n_reserved,
           "n_reserved($self, /, stream, owner)\n--\n\n"
           "Blocks of stream still kept for owner."),
    method("n_free", n_free,
           "n_free($self, /, stream='k')\n--\n\n"
           "Blocks on the free list of stream, reserved ones included."),
    method("n_available", n_available,
           "n_available($self, /, stream='k')\n--\n\n"
           "Free blocks of stream that nobody has reserved."),
    method("n_allocatable", n_allocatable,
           "n_allocatable($self, /, stream, owner)\n--\n\n"
           "Blocks of stream that owner alone could allocate now: free ones not reserved by\n"
           "others, and those the pool may still grow by."),
    method(
        "shrink", shrink,
        "shrink($self, /, stream, target_free)\n--\n\n"
        "Retires free blocks of stream until target_free are left.\n\n"
        "Blocks that were never used go first, then those free the longest. Reserved blocks and\n"
        "blocks in use stay. Retired ids never come back.\n\n"
        "Returns:\n"
        "    How many blocks were retired.\n\n"
        "Raises:\n"
        "    ValueError: target_free < 0, or stream is neither 'k' nor 'v'."),
    {"check_invariants", check_invariants, METH_NOARGS,
     "check_invariants($self, /)\n--\n\n"
     "Raises RuntimeError naming the first book that does not add up. For tests: O(blocks)."},
};

using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                       std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

Row row_of(const core::AllocationStats& s) {
  return {s.n_blocks,         s.n_allocations,    s.n_frees,   s.n_reused,
          s.n_exhausted,      s.n_grown,          s.n_retired, s.peak_blocks_in_use,
          s.fragmented_count, s.unused_slot_count};
}

core::AllocationStats stats_of(const Row& row) {
  return std::apply([](auto... counters) { return core::AllocationStats{counters...}; }, row);
}

// Reads a pool's counters without holding its Python object, which holds the reader.
struct StatsReader {
  std::shared_ptr<const core::BlockPoolAllocator> pool;
};

}  // namespace

void bind_block_pool(nb::module_& m) {
  m.attr("MAX_BLOCK_SIZE") = core::PoolConfig::kMaxBlockSize;
  m.attr("MAX_BLOCKS") = core::PoolConfig::kMaxBlocks;
  m.def(
      "to_prometheus",
      [](const Row& counters, std::string_view prefix) {
        return metrics::to_prometheus(stats_of(counters), prefix);
      },
      nb::arg("counters"), nb::arg("prefix"),
      "Counters, in the order of AllocationStats' fields, as Prometheus text.");

  nb::class_<StatsReader>(m, "StatsReader", "Reads the counters of a pool.")
      .def(
          "__call__", [](const StatsReader& reader) { return row_of(reader.pool->stats()); },
          "All counters at one moment, in the order of AllocationStats' fields.");

  auto pool = nb::class_<PoolObject>(m, "BlockPool", "The C++ part of BlockPoolAllocator.");
  pool.def(
      "__init__",
      [](PoolObject* self, std::int64_t block_size, std::int64_t n_blocks, bool separate_kv,
         bool grow_on_exhaustion, std::optional<std::int64_t> max_blocks) {
        new (self) PoolObject({.block_size = block_size,
                               .n_blocks = n_blocks,
                               .separate_kv = separate_kv,
                               .grow_on_exhaustion = grow_on_exhaustion,
                               .max_blocks = max_blocks});
      },
      nb::arg("block_size"), nb::arg("n_blocks"), nb::arg("separate_kv"),
      nb::arg("grow_on_exhaustion"), nb::arg("max_blocks").none());
  pool.def(
      "_stats_reader", [](const PoolObject& self) { return StatsReader{self.pool}; },
      "A reader of this pool's counters.");
  pool.def(
      "_history",
      [](const PoolObject& self) {
        std::vector<Row> rows;
        for (const core::AllocationStats& stats : self.pool->history()) {
          rows.push_back(row_of(stats));
        }
        return rows;
      },
      "The recorded counters, oldest first.");
  auto* type = reinterpret_cast<PyTypeObject*>(pool.ptr());
  for (PyMethodDef& def : g_methods) {
    pool.attr(def.ml_name) = nb::steal(PyDescr_NewMethod(type, &def));
  }
}

}  // namespace kvpool::bindings
