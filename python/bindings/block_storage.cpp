#include "kvpool/storage/block_storage.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "arguments.h"
#include "bindings.h"
#include "block.h"
#include "errors.h"
#include "pool_object.h"
#include "rows_array.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpool::bindings {
namespace {

constexpr const char* kWrite = "MLXBlockStorage::write";

struct StorageObject {
  StorageObject(const PoolObject& of, std::int64_t row_width,
                const storage::StorageOptions& options)
      : pool(of.pool), storage(*pool, row_width, options) {}

  std::shared_ptr<core::BlockPoolAllocator> pool;  // outlives the storage
  storage::BlockStorage storage;
};

core::BlockHandle handle(const char* call, nb::handle block) {
  try {
    return block_argument(call, "block", block.ptr());
  } catch (const PythonErrorSet&) {
    throw nb::python_error();
  }
}

std::string_view name(formats::Format format) { return formats::traits(format).name; }

nb::tuple numpy_rows(const StorageObject& self, const storage::BlockRows& rows) {
  return nb::make_tuple(name(rows.format), rows_to_numpy(rows.format, rows.bytes, rows.n_rows,
                                                         self.storage.row_width()));
}

nb::object writable(StorageObject& self, nb::handle block) {
  constexpr const char* kCall = "MLXBlockStorage::writable";
  const core::BlockHandle shared = handle(kCall, block);
  core::BlockHandle copy;
  if (const auto shortage = self.storage.try_writable(shared, copy)) {
    raise_exhausted(*shortage, kCall);
    throw nb::python_error();
  }
  if (copy == shared) return nb::borrow(block);
  const BlockObject* object = as_block(block.ptr());
  PyObject* made = new_block(object->pool, copy, object->format);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace

void bind_block_storage(nb::module_& m) {
  m.attr("MAX_ROW_WIDTH") = storage::BlockStorage::kMaxRowWidth;
  nb::class_<StorageObject>(m, "BlockStorage",
                            "The bytes of a pool's blocks; MLXBlockStorage is its public face.")
      .def(
          "__init__",
          [](StorageObject* self, nb::handle pool, std::int64_t row_width, bool scrub_on_free,
             std::size_t idle_limit_bytes) {
            new (self) StorageObject(pool_argument("MLXBlockStorage", pool.ptr()), row_width,
                                     {scrub_on_free, idle_limit_bytes});
          },
          "pool"_a, "row_width"_a, nb::kw_only(), "scrub_on_free"_a = false,
          "idle_limit_bytes"_a = storage::StorageOptions{}.idle_limit_bytes,
          nb::sig("def __init__(self, pool: BlockPool, row_width: int, *, "
                  "scrub_on_free: bool = False, idle_limit_bytes: int = 67108864) -> None"))
      .def(
          "format",
          [](const StorageObject& self, nb::handle block) {
            return name(self.storage.format(handle("MLXBlockStorage::format", block)));
          },
          "block"_a, nb::sig("def format(self, block: Block) -> str"))
      .def(
          "write",
          [](StorageObject& self, nb::handle block, std::int64_t offset, const RowsArray& values,
             bool bfloat16) {
            const core::BlockHandle target = handle(kWrite, block);
            const formats::Format format = self.storage.format(target);
            self.storage.write(target, offset, format,
                               encode_rows(kWrite, format, values, bfloat16));
          },
          "block"_a, "offset"_a, "values"_a, "bfloat16"_a = false,
          nb::sig("def write(self, block: Block, offset: int, values: "
                  "numpy.typing.NDArray[numpy.generic], bfloat16: bool = False) -> None"))
      .def(
          "read",
          [](StorageObject& self, nb::handle block) {
            const core::BlockHandle target = handle("MLXBlockStorage::read", block);
            return numpy_rows(self, self.storage.read(target));
          },
          "block"_a,
          nb::sig("def read(self, block: Block) -> "
                  "tuple[str, numpy.typing.NDArray[numpy.generic]]"))
      .def(
          "read_all",
          [](StorageObject& self, nb::handle block) {
            const core::BlockHandle target = handle("MLXBlockStorage::buffer_for", block);
            return numpy_rows(self, self.storage.read_all(target));
          },
          "block"_a,
          nb::sig("def read_all(self, block: Block) -> "
                  "tuple[str, numpy.typing.NDArray[numpy.generic]]"))
      .def("writable", writable, "block"_a, nb::sig("def writable(self, block: Block) -> Block"))
      .def(
          "release",
          [](StorageObject& self, nb::handle block) {
            self.storage.release(handle("MLXBlockStorage::release", block));
          },
          "block"_a, nb::sig("def release(self, block: Block) -> None"))
      .def("resident_bytes",
           [](const StorageObject& self) { return self.storage.resident_bytes(); })
      .def("idle_bytes", [](const StorageObject& self) { return self.storage.idle_bytes(); })
      .def("drop_idle", [](StorageObject& self) { self.storage.drop_idle(); })
      .def("check_invariants", [](const StorageObject& self) { self.storage.check_invariants(); });
}

}  // namespace kvpool::bindings
