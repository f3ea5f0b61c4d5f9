#include "kvpool/cache/stream_lease.h"

#include <nanobind/nanobind.h>

#include <cstdint>

#include "arguments.h"
#include "bindings.h"
#include "errors.h"
#include "pool_object.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

using cache::StreamLease;

void construct(StreamLease* self, nb::handle pool, nb::handle owner, nb::handle format) {
  constexpr const char* kCall = "PooledKVCache";
  try {
    PoolObject& of = pool_argument(kCall, pool.ptr());
    const OwnerId id = int_argument(kCall, "owner", owner.ptr());
    new (self) StreamLease(of.pool, id, of.formats.tag(*of.pool, kCall, format.ptr()));
  } catch (const PythonErrorSet&) {
    throw nb::python_error();
  }
}

void resize(StreamLease& self, std::int64_t n_keys, std::int64_t n_values) {
  if (const auto shortage = self.try_resize(n_keys, n_values)) {
    raise_exhausted(*shortage, "PooledKVCache::append");
    throw nb::python_error();
  }
}

}  // namespace

void bind_stream_lease(nb::module_& m) {
  nb::class_<StreamLease>(m, "StreamLease", "The blocks that a PooledKVCache holds.")
      .def("__init__", construct, "pool"_a, nb::arg("owner").none(), nb::arg("format").none(),
           nb::sig("def __init__(self, pool: BlockPool, owner: int, format: str) -> None"))
      .def("resize", resize, "n_keys"_a, "n_values"_a)
      .def("verify", &StreamLease::verify)
      .def("release", &StreamLease::release)
      .def("check_invariants", &StreamLease::check_invariants)
      .def_prop_ro("owner", &StreamLease::owner)
      .def_prop_ro("n_keys", &StreamLease::n_keys)
      .def_prop_ro("n_values", &StreamLease::n_values)
      .def_prop_ro("n_blocks", &StreamLease::n_blocks);
}

}  // namespace kvpool::bindings
