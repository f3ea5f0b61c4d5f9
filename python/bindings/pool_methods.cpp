#include "pool_methods.h"

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "arguments.h"
#include "block.h"
#include "errors.h"
#include "pool_object.h"

// None of these releases the GIL: their C++ part is shorter than that would take. Python code may
// run in each while arguments are converted and while a list is made, never while the pool's lock
// is held.
namespace kvpool::bindings {
namespace {

struct Reference {
  PyObject* object;
  explicit Reference(PyObject* owned) : object(owned) {
    if (object == nullptr) throw PythonErrorSet{};
  }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_DECREF(object); }
};

// --- arguments -----------------------------------------------------------------------------------

core::Stream stream_argument(const PoolObject& pool, const char* call, PyObject* stream) {
  if (!pool.separate_kv) return core::Stream::kShared;
  static PyObject* const k = PyUnicode_InternFromString("k");
  static PyObject* const v = PyUnicode_InternFromString("v");
  if (stream == k || stream == nullptr) return core::Stream::kKey;
  if (stream == v) return core::Stream::kValue;
  if (PyUnicode_Check(stream)) {
    if (PyUnicode_CompareWithASCIIString(stream, "k") == 0) return core::Stream::kKey;
    if (PyUnicode_CompareWithASCIIString(stream, "v") == 0) return core::Stream::kValue;
  }
  refuse(PyExc_ValueError, call, "stream must be 'k' or 'v', got %R", stream);
}

core::FormatTag format_argument(PoolObject& pool, const char* call, PyObject* format) {
  return format == nullptr ? core::FormatTag{} : pool.formats.tag(*pool.pool, call, format);
}

std::int64_t count_argument(const char* call, const char* name, PyObject* value,
                            std::int64_t least) {
  const std::int64_t number = value == nullptr ? 1 : int_argument(call, name, value);
  if (number < least) {
    refuse(PyExc_ValueError, call, "%s must be >= %lld, got %lld", name,
           static_cast<long long>(least), static_cast<long long>(number));
  }
  return number;
}

// Blocks of `layers` runs of n_tokens. A number that no pool can have stays one, without overflow.
std::int64_t blocks_of_layers(const core::BlockPoolAllocator& pool, std::int64_t n_tokens,
                              std::int64_t layers) {
  constexpr std::int64_t kBeyond = std::numeric_limits<std::int64_t>::max() / 2;
  const std::int64_t blocks = pool.blocks_for_tokens(n_tokens);
  return blocks > kBeyond / layers ? kBeyond : blocks * layers;
}

// The handles behind an iterable of Blocks. `sequence` must be a list or tuple.
void handles_of(const char* call, PyObject* self, const PoolObject& pool, PyObject* sequence,
                std::span<core::BlockHandle> out) {
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (is_block(items[i]) && as_block(items[i])->pool == self) [[likely]] {
      const BlockObject& block = *as_block(items[i]);
      out[i] = {.pool = pool.id,
                .serial = block.serial,
                .record = block.record,
                .reference = block.reference,
                .id = block.id,
                .stream = block.stream};
    } else {
      char name[40];
      PyOS_snprintf(name, sizeof name, "blocks[%zu]", i);
      out[i] = block_argument(call, name, items[i]);
    }
  }
}

// A list or tuple as it is; a list of what any other iterable yields.
PyObject* materialised(const char* call, PyObject* blocks) {
  if (PyList_CheckExact(blocks) || PyTuple_CheckExact(blocks)) return Py_NewRef(blocks);
  if (Py_TYPE(blocks)->tp_iter == nullptr && !PySequence_Check(blocks)) {
    refuse(PyExc_TypeError, call, "blocks must be an iterable of Block, got %R", blocks);
  }
  return PySequence_List(blocks);
}

// --- results -------------------------------------------------------------------------------------

PyObject* none() noexcept { return Py_NewRef(Py_None); }

// Blocks just checked out, given back where there is no memory for their objects.
PyObject* new_blocks(PyObject* self, const PoolObject& pool,
                     std::span<const core::BlockHandle> handles, core::FormatTag format) {
  PyObject* list = new_block_list(self, handles, format);
  if (list == nullptr) pool.pool->free(handles);
  return list;
}

// Blocks checked out before, of any format.
PyObject* known_blocks(PyObject* self, PoolObject& pool,
                       const std::vector<core::BlockHandle>& handles) {
  if (pool.formats.only_default()) return new_block_list(self, handles, {});
  Reference list(PyList_New(0));
  for (const core::BlockHandle& handle : handles) {
    const auto info = pool.pool->info(handle);
    Reference block(new_block(self, handle, info ? info->format : core::FormatTag{}));
    if (PyList_Append(list.object, block.object) < 0) return nullptr;
  }
  return Py_NewRef(list.object);
}

}  // namespace

// --- allocate and free ---------------------------------------------------------------------------

PyObject* allocate(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::allocate", 3, 4,
                                            {"stream", "n_tokens", "owner", "format", "layers"});
  return guarded([&]() -> PyObject* {
    PyObject* given[5] = {};
    parameters.bind(args, n_args, kwnames, given);
    const char* call = parameters.call();
    PoolObject& pool = pool_object(self);
    const std::int64_t n_tokens = int_argument(call, "n_tokens", given[1]);
    const OwnerId owner = int_argument(call, "owner", given[2]);
    const core::FormatTag format = format_argument(pool, call, given[3]);
    const std::int64_t layers = count_argument(call, "layers", given[4], 1);
    if (n_tokens < 1) count_argument(call, "n_tokens", given[1], 1);
    const core::Stream stream = stream_argument(pool, call, given[0]);

    const std::int64_t n = blocks_of_layers(*pool.pool, n_tokens, layers);
    HandleBuffer buffer(pool.handle_memory, static_cast<std::size_t>(n), pool.most_blocks);
    const auto handles = buffer.handles();
    if (const auto shortage =
            pool.pool->try_allocate(stream, n_tokens, owner, format, handles, layers)) {
      return raise_exhausted(*shortage, call);
    }
    return new_blocks(self, pool, handles, format);
  });
}

PyObject* allocate_kv(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters(
      "BlockPoolAllocator::allocate_kv", 2, 3,
      {"n_tokens", "owner", "format", "value_format", "layers"});
  return guarded([&]() -> PyObject* {
    PyObject* given[5] = {};
    parameters.bind(args, n_args, kwnames, given);
    const char* call = parameters.call();
    PoolObject& pool = pool_object(self);
    const std::int64_t n_tokens = int_argument(call, "n_tokens", given[0]);
    const OwnerId owner = int_argument(call, "owner", given[1]);
    const core::FormatTag key_format = format_argument(pool, call, given[2]);
    const core::FormatTag value_format = given[3] == nullptr || given[3] == Py_None
                                             ? key_format
                                             : format_argument(pool, call, given[3]);
    const std::int64_t layers = count_argument(call, "layers", given[4], 1);
    if (n_tokens < 1) count_argument(call, "n_tokens", given[0], 1);

    const auto n = static_cast<std::size_t>(blocks_of_layers(*pool.pool, n_tokens, layers));
    HandleBuffer buffer(pool.handle_memory, 2 * n, pool.most_blocks);
    const auto keys = buffer.half(0);
    const auto values = buffer.half(1);
    if (const auto shortage = pool.pool->try_allocate_kv(n_tokens, owner, key_format, value_format,
                                                         keys, values, layers)) {
      return raise_exhausted(*shortage, call);
    }
    PyObject* key_blocks = new_block_list(self, keys, key_format);
    PyObject* value_blocks =
        key_blocks == nullptr ? nullptr : new_block_list(self, values, value_format);
    PyObject* both = value_blocks == nullptr ? nullptr : PyTuple_Pack(2, key_blocks, value_blocks);
    Py_XDECREF(key_blocks);
    Py_XDECREF(value_blocks);
    if (both == nullptr) pool.pool->free(buffer.handles());
    return both;
  });
}

PyObject* free_blocks(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::free", 1, 1, {"blocks"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    Reference blocks(materialised(parameters.call(), given[0]));
    PoolObject& pool = pool_object(self);
    HandleBuffer buffer(pool.handle_memory,
                        static_cast<std::size_t>(PySequence_Fast_GET_SIZE(blocks.object)));
    handles_of(parameters.call(), self, pool, blocks.object, buffer.handles());
    pool.pool->free(buffer.handles());
    return none();
  });
}

PyObject* free_all(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::free_all", 1, 1, {"owner"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    pool_object(self).pool->free_all(int_argument(parameters.call(), "owner", given[0]));
    return none();
  });
}

PyObject* mark_used(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::mark_used", 2, 2,
                                            {"block", "n_used"});
  return guarded([&] {
    PyObject* given[2] = {};
    parameters.bind(args, n_args, kwnames, given);
    const char* call = parameters.call();
    PoolObject& pool = pool_object(self);
    const std::int64_t n_used = int_argument(call, "n_used", given[1]);
    if (is_block(given[0])) {
      pool.pool->mark_used(block_argument(call, "block", given[0]), n_used);
      return none();
    }
    Reference blocks(materialised(call, given[0]));
    HandleBuffer buffer(pool.handle_memory,
                        static_cast<std::size_t>(PySequence_Fast_GET_SIZE(blocks.object)));
    handles_of(call, self, pool, blocks.object, buffer.handles());
    pool.pool->mark_used(buffer.handles(), n_used);
    return none();
  });
}

// --- owners --------------------------------------------------------------------------------------

PyObject* register_owner(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::register_owner", 1, 1, {"owner"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    pool_object(self).pool->register_owner(int_argument(parameters.call(), "owner", given[0]));
    return none();
  });
}

PyObject* release_owner(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::release_owner", 1, 1, {"owner"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    pool_object(self).pool->release_owner(int_argument(parameters.call(), "owner", given[0]));
    return none();
  });
}

PyObject* is_active(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::is_active", 1, 1, {"owner"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    const OwnerId owner = int_argument(parameters.call(), "owner", given[0]);
    return PyBool_FromLong(pool_object(self).pool->is_active(owner));
  });
}

PyObject* new_owner(PyObject* self, PyObject*) {
  return guarded([&] { return PyLong_FromLongLong(pool_object(self).pool->new_owner()); });
}

// --- share ---------------------------------------------------------------------------------------

PyObject* fork(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::fork", 1, 2,
                                            {"owner", "new_owner"});
  return guarded([&] {
    PyObject* given[2] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(parameters.call(), "owner", given[0]);
    const OwnerId new_owner = given[1] == nullptr || given[1] == Py_None
                                  ? pool.pool->new_owner()
                                  : int_argument(parameters.call(), "new_owner", given[1]);
    return known_blocks(self, pool, pool.pool->fork(owner, new_owner));
  });
}

PyObject* writable(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::writable", 1, 1, {"block"});
  return guarded([&]() -> PyObject* {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const core::BlockHandle block = block_argument(parameters.call(), "block", given[0]);
    core::BlockHandle own;
    if (const auto shortage = pool.pool->try_writable(block, own)) {
      return raise_exhausted(*shortage, parameters.call());
    }
    if (own == block) return Py_NewRef(given[0]);
    const auto info = pool.pool->info(own);
    return new_block(self, own, info ? info->format : as_block(given[0])->format);
  });
}

// --- reservations and queries --------------------------------------------------------------------

PyObject* reserve(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::reserve", 2, 2,
                                            {"owner", "n_tokens", "layers"});
  return guarded([&] {
    PyObject* given[3] = {};
    parameters.bind(args, n_args, kwnames, given);
    const char* call = parameters.call();
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(call, "owner", given[0]);
    const std::int64_t n_tokens = count_argument(call, "n_tokens", given[1], 0);
    const std::int64_t layers = count_argument(call, "layers", given[2], 1);
    const std::int64_t n = blocks_of_layers(*pool.pool, n_tokens, layers);
    const auto shortage = pool.pool->try_reserve(owner, n, n);
    return shortage ? raise_exhausted(*shortage, call) : none();
  });
}

PyObject* reserve_blocks(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::reserve_blocks", 3, 3,
                                            {"owner", "n_key_blocks", "n_value_blocks"});
  return guarded([&] {
    PyObject* given[3] = {};
    parameters.bind(args, n_args, kwnames, given);
    const char* call = parameters.call();
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(call, "owner", given[0]);
    const std::int64_t n_keys = count_argument(call, "n_key_blocks", given[1], 0);
    const std::int64_t n_values = count_argument(call, "n_value_blocks", given[2], 0);
    const auto shortage = pool.pool->try_reserve(owner, n_keys, n_values);
    return shortage ? raise_exhausted(*shortage, call) : none();
  });
}

PyObject* n_reserved(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::n_reserved", 2, 2,
                                            {"stream", "owner"});
  return guarded([&] {
    PyObject* given[2] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(parameters.call(), "owner", given[1]);
    const core::Stream stream = stream_argument(pool, parameters.call(), given[0]);
    return PyLong_FromLongLong(pool.pool->n_reserved(stream, owner));
  });
}

PyObject* n_allocatable(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::n_allocatable", 2, 2,
                                            {"stream", "owner"});
  return guarded([&] {
    PyObject* given[2] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(parameters.call(), "owner", given[1]);
    const core::Stream stream = stream_argument(pool, parameters.call(), given[0]);
    return PyLong_FromLongLong(pool.pool->n_allocatable(stream, owner));
  });
}

PyObject* n_free(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::n_free", 0, 1, {"stream"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const core::Stream stream = stream_argument(pool, parameters.call(), given[0]);
    return PyLong_FromLongLong(pool.pool->n_free(stream));
  });
}

PyObject* n_available(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::n_available", 0, 1, {"stream"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const core::Stream stream = stream_argument(pool, parameters.call(), given[0]);
    return PyLong_FromLongLong(pool.pool->n_available(stream));
  });
}

PyObject* blocks_for(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::blocks_for", 1, 1, {"owner"});
  return guarded([&] {
    PyObject* given[1] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const OwnerId owner = int_argument(parameters.call(), "owner", given[0]);
    return known_blocks(self, pool, pool.pool->blocks_for(owner));
  });
}

PyObject* shrink(PyObject* self, Arguments args, Py_ssize_t n_args, PyObject* kwnames) {
  static constinit ParameterList parameters("BlockPoolAllocator::shrink", 2, 2,
                                            {"stream", "target_free"});
  return guarded([&] {
    PyObject* given[2] = {};
    parameters.bind(args, n_args, kwnames, given);
    PoolObject& pool = pool_object(self);
    const std::int64_t target = count_argument(parameters.call(), "target_free", given[1], 0);
    const core::Stream stream = stream_argument(pool, parameters.call(), given[0]);
    return PyLong_FromLongLong(pool.pool->shrink(stream, target));
  });
}

PyObject* check_invariants(PyObject* self, PyObject*) {
  return guarded([&] {
    pool_object(self).pool->check_invariants();
    return none();
  });
}

}  // namespace kvpool::bindings
