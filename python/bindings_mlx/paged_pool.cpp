#include "kvpool/cache/paged_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "bindings.h"
#include "kvpool/base/error.h"
#include "kvpool/cache/paged_group.h"
#include "kvpool/kernels/worker_pool.h"
#include "kvpool/mlx_ext/backend.h"
#include "pool_object.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using cache::PagedGroup;
using cache::PagedPool;

mlx_ext::Backend backend_argument(const std::optional<std::string>& name) {
  if (!name) return mlx_ext::default_backend();
  if (const auto backend = mlx_ext::backend_from_name(*name)) return *backend;
  throw InvalidArgument("[PagedPool::of] backend must be cpu, cuda or gather, got " + *name);
}

/// The paged pool of a pool, made where there is none. A pool has one budget: the first call sets
/// it.
std::shared_ptr<PagedPool> paged_pool_of(nb::handle pool, std::optional<std::int64_t> byte_budget,
                                         std::optional<int> n_threads,
                                         const std::optional<std::string>& backend) {
  PoolObject& object = pool_argument("PagedPool::of", pool.ptr());
  if (object.paged == nullptr) {
    storage::PageStoreOptions store = mlx_ext::store_options(backend_argument(backend));
    store.byte_budget = byte_budget;
    object.paged = std::make_shared<PagedPool>(
        object.pool, store, std::make_shared<kernels::WorkerPool>(n_threads.value_or(0)));
  } else if ((byte_budget && byte_budget != object.paged->store().options().byte_budget) ||
             (n_threads && *n_threads != object.paged->workers()->n_threads())) {
    const auto number = [](const auto& value) { return value ? std::to_string(*value) : "none"; };
    throw InvalidArgument(
        "[PagedPool::of] byte_budget and n_threads are set once, before the pool's first paged "
        "cache: they are " +
        number(object.paged->store().options().byte_budget) + " and " +
        std::to_string(object.paged->workers()->n_threads()) + ", got " + number(byte_budget) +
        " and " + number(n_threads));
  } else if (backend && backend_argument(backend) != mlx_ext::backend_of(*object.paged)) {
    throw InvalidArgument("[PagedPool::of] backend is " +
                          std::string(mlx_ext::name_of(mlx_ext::backend_of(*object.paged))) +
                          " since the pool's first paged cache, got " + *backend);
  }
  return object.paged;
}

}  // namespace

void bind_paged_pool(nb::module_& m) {
  m.def(
      "default_backend", [] { return std::string(mlx_ext::name_of(mlx_ext::default_backend())); },
      "Where the pages of a pool lie unless its maker says otherwise, by MLX's default device.");
  m.def(
      "describe_backend",
      [](const std::string& name) { return mlx_ext::describe(backend_argument(name)); }, "name"_a,
      "What a backend runs on, or why there is none, for people.");
  m.def("gpu_memory", &mlx_ext::gpu_memory,
        "Bytes that pages, tables and buffers take on the GPU, beside MLX's memory, and the most "
        "that\n"
        "they took.");
  m.def("reset_peak_gpu_memory", &mlx_ext::reset_peak_gpu_memory, "Starts anew with the most.");
  nb::class_<PagedPool>(m, "PagedPool", "The pages and threads behind the paged caches of a pool.")
      .def_static(
          "of", &paged_pool_of, "pool"_a, "byte_budget"_a = nb::none(), "n_threads"_a = nb::none(),
          "backend"_a = nb::none(),
          "The one of this pool. Its budget (bytes that pages may take; none: no limit)\n"
          "and threads (none: one a processor) are set by the call that makes it, and so is where\n"
          "pages lie: \"cpu\", \"cuda\", or \"gather\" (as cpu, and attention is MLX's own over\n"
          "gathered keys and values); none: what fits MLX's default device.")
      .def_prop_ro("backend",
                   [](const PagedPool& self) {
                     return std::string(mlx_ext::name_of(mlx_ext::backend_of(self)));
                   })
      .def_prop_ro("byte_budget",
                   [](const PagedPool& self) { return self.store().options().byte_budget; })
      .def_prop_ro("n_threads", [](const PagedPool& self) { return self.workers()->n_threads(); })
      .def_prop_ro(
          "used_bytes", [](const PagedPool& self) { return self.store().stats().used_bytes; },
          "Bytes of pages in use, by size class: what the budget limits.")
      .def_prop_ro("peak_used_bytes",
                   [](const PagedPool& self) { return self.store().stats().peak_used_bytes; })
      .def_prop_ro(
          "committed_bytes",
          [](const PagedPool& self) { return self.store().stats().committed_bytes; },
          "Bytes taken from the system.")
      .def("check_invariants", [](const PagedPool& self) { self.store().check_invariants(); });

  nb::class_<PagedGroup>(m, "PagedGroup", "The layers of one request, which move together.")
      .def(nb::new_([](nb::handle pool, std::int64_t owner) {
             return std::make_shared<PagedGroup>(
                 paged_pool_of(pool, std::nullopt, std::nullopt, std::nullopt), owner);
           }),
           "pool"_a, "owner"_a)
      .def_prop_ro("owner", &PagedGroup::owner)
      .def_prop_ro("n_layers", &PagedGroup::n_layers)
      .def_prop_ro("n_blocks", &PagedGroup::n_blocks, "Blocks held, keys and values together.")
      .def_prop_ro("nbytes", &PagedGroup::nbytes, "Bytes of their pages.")
      .def("roll_back_step", &PagedGroup::roll_back_step, "Takes the step under way back, if any.")
      .def("release", &PagedGroup::release, "Gives every block back; all layers are empty then.")
      .def("check_invariants", &PagedGroup::check_invariants);
}

}  // namespace kvpool::bindings
