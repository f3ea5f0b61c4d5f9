#include "block.h"

#include <cstdint>
#include <memory>

#include "arguments.h"
#include "errors.h"
#include "pool_object.h"

namespace kvpool::bindings {

// The fields of a block that no pool knows. All are immutable Python objects, so that the type
// needs no garbage collection.
struct DetachedBlock {
  enum Field { kBlockId, kStream, kFormat, kNUsed, kOwner, kEverAllocated, kCount };
  static constexpr const char* kNames[kCount] = {"block_id", "stream", "format",
                                                 "n_used",   "owner",  "ever_allocated"};
  PyObject* fields[kCount] = {};

  DetachedBlock() = default;
  DetachedBlock(const DetachedBlock&) = delete;
  DetachedBlock& operator=(const DetachedBlock&) = delete;
  ~DetachedBlock() {
    for (PyObject* field : fields) Py_XDECREF(field);
  }
};

namespace {

using Field = DetachedBlock::Field;

PyTypeObject* g_block_type = nullptr;

// --- memory --------------------------------------------------------------------------------------

// Dropped blocks, threaded through BlockObject::pool; guarded by the GIL. Bounded, so that one huge
// list does not stay for good.
constexpr std::size_t kKeptBlocks = 32'768;
BlockObject* g_dropped = nullptr;
std::size_t g_n_dropped = 0;

BlockObject* new_object() noexcept {
  void* memory = g_dropped;
  if (memory != nullptr) {
    g_dropped = reinterpret_cast<BlockObject*>(g_dropped->pool);
    --g_n_dropped;
  } else {
    memory = PyObject_Malloc(sizeof(BlockObject));
    if (memory == nullptr) return nullptr;
  }
  auto* block = static_cast<BlockObject*>(memory);
  PyObject_Init(reinterpret_cast<PyObject*>(block), g_block_type);
  return block;
}

void drop_object(BlockObject* block) noexcept {
  if (g_n_dropped < kKeptBlocks) {
    block->pool = reinterpret_cast<PyObject*>(g_dropped);
    g_dropped = block;
    ++g_n_dropped;
  } else {
    PyObject_Free(block);
  }
}

void dealloc(PyObject* self) {
  BlockObject* block = as_block(self);
  PyObject* pool = block->pool;
  if (pool == nullptr) delete block->detached;
  drop_object(block);
  Py_DECREF(g_block_type);
  Py_XDECREF(pool);  // last: it may run Python code
}

// --- fields --------------------------------------------------------------------------------------

// Interned "k", "v", "kv".
PyObject* stream_name(core::Stream stream) noexcept {
  static PyObject* names[core::kStreamCount] = {};
  PyObject*& name = names[static_cast<int>(stream)];
  if (name == nullptr) name = PyUnicode_InternFromString(core::name(stream).data());
  return Py_XNewRef(name);
}

PyObject* attached_field(BlockObject& block, Field field) {
  PoolObject& pool = pool_object(block.pool);
  switch (field) {
    case Field::kBlockId:
      return PyLong_FromUnsignedLong(value(block.id));
    case Field::kStream:
      return stream_name(block.stream);
    case Field::kEverAllocated:
      return Py_NewRef(Py_True);
    default:
      break;
  }
  const auto info = pool.pool->info(handle_of(block));
  switch (field) {
    case Field::kFormat:
      if (info) block.format = info->format;
      return Py_XNewRef(pool.formats.name(*pool.pool, block.format));
    case Field::kNUsed:
      return PyLong_FromLongLong(info ? info->n_used : 0);
    default:
      return info ? PyLong_FromLongLong(info->owner) : Py_NewRef(Py_None);
  }
}

PyObject* field_of(PyObject* self, Field field) noexcept {
  BlockObject& block = *as_block(self);
  if (block.pool == nullptr) return Py_NewRef(block.detached->fields[field]);
  return guarded([&] { return attached_field(block, field); });
}

// The value as a detached block keeps it. Throws PythonErrorSet.
PyObject* checked_field(Field field, PyObject* value) {
  const char* name = DetachedBlock::kNames[field];
  auto expect = [&](bool right, const char* what) {
    if (!right) refuse(PyExc_TypeError, "Block", "%s must be %s, got %R", name, what, value);
  };
  switch (field) {
    case Field::kStream:
    case Field::kFormat:
      expect(PyUnicode_CheckExact(value), "a str");
      return Py_NewRef(value);
    case Field::kEverAllocated:
      expect(PyBool_Check(value), "a bool");
      return Py_NewRef(value);
    case Field::kOwner:
      if (value == Py_None) return Py_NewRef(value);
      [[fallthrough]];
    default:
      PyObject* number = PyLong_FromLongLong(int_argument("Block", name, value));
      if (number == nullptr) throw PythonErrorSet{};
      return number;
  }
}

PyObject* get_field(PyObject* self, void* closure) {
  return field_of(self, static_cast<Field>(reinterpret_cast<std::intptr_t>(closure)));
}

int set_field(PyObject* self, PyObject* value, void* closure) {
  const auto field = static_cast<Field>(reinterpret_cast<std::intptr_t>(closure));
  const char* name = DetachedBlock::kNames[field];
  BlockObject& block = *as_block(self);
  auto set = [&] {
    if (value == nullptr) refuse(PyExc_AttributeError, "Block", "%s cannot be deleted", name);
    if (block.pool == nullptr) {
      PyObject* checked = checked_field(field, value);  // may run code that sets this very field
      Py_SETREF(block.detached->fields[field], checked);
      return 0;
    }
    PoolObject& pool = pool_object(block.pool);
    if (field == Field::kNUsed) {
      pool.pool->mark_used(handle_of(block), int_argument("Block", name, value));
    } else if (field == Field::kFormat) {
      const core::FormatTag tag = pool.formats.tag(*pool.pool, "Block", value);
      pool.pool->set_format(handle_of(block), tag);
      block.format = tag;
    } else {
      refuse(PyExc_AttributeError, "Block", "%s of a pool's block is read-only", name);
    }
    return 0;
  };
  return guarded(set, -1);
}

// All six fields, owned; null with the Python error set.
PyObject* fields_tuple(PyObject* self) noexcept {
  PyObject* fields = PyTuple_New(Field::kCount);
  if (fields == nullptr) return nullptr;
  for (int i = 0; i < Field::kCount; ++i) {
    PyObject* value = field_of(self, static_cast<Field>(i));
    if (value == nullptr) {
      Py_DECREF(fields);
      return nullptr;
    }
    PyTuple_SET_ITEM(fields, i, value);
  }
  return fields;
}

// --- the type ------------------------------------------------------------------------------------

PyObject* construct(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"block_id", "stream",         "format", "n_used",
                                   "owner",    "ever_allocated", nullptr};
  PyObject* given[Field::kCount] = {};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OOOOO:Block", const_cast<char**>(keywords),
                                   &given[0], &given[1], &given[2], &given[3], &given[4],
                                   &given[5])) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    auto fields = std::make_unique<DetachedBlock>();
    auto keep = [&](Field field, auto&& fallback) {
      fields->fields[field] =
          given[field] != nullptr ? checked_field(field, given[field]) : fallback();
      if (fields->fields[field] == nullptr) throw PythonErrorSet{};
    };
    keep(Field::kBlockId, [] { return nullptr; });
    keep(Field::kStream, [] { return stream_name(core::Stream::kShared); });
    keep(Field::kFormat, [] { return PyUnicode_InternFromString("fp16"); });
    keep(Field::kNUsed, [] { return PyLong_FromLong(0); });
    keep(Field::kOwner, [] { return Py_NewRef(Py_None); });
    keep(Field::kEverAllocated, [] { return Py_NewRef(Py_False); });
    BlockObject* block = new_object();
    if (block == nullptr) return PyErr_NoMemory();
    block->pool = nullptr;
    block->detached = fields.release();
    return reinterpret_cast<PyObject*>(block);
  });
}

PyObject* repr(PyObject* self) {
  PyObject* fields = fields_tuple(self);
  if (fields == nullptr) return nullptr;
  PyObject* text = PyUnicode_FromFormat(
      "Block(block_id=%R, stream=%R, format=%R, n_used=%R, owner=%R, ever_allocated=%R)",
      PyTuple_GET_ITEM(fields, 0), PyTuple_GET_ITEM(fields, 1), PyTuple_GET_ITEM(fields, 2),
      PyTuple_GET_ITEM(fields, 3), PyTuple_GET_ITEM(fields, 4), PyTuple_GET_ITEM(fields, 5));
  Py_DECREF(fields);
  return text;
}

PyObject* compare(PyObject* self, PyObject* other, int op) {
  if (!is_block(other) || (op != Py_EQ && op != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
  PyObject* ours = fields_tuple(self);
  PyObject* theirs = ours == nullptr ? nullptr : fields_tuple(other);
  PyObject* result = theirs == nullptr ? nullptr : PyObject_RichCompare(ours, theirs, op);
  Py_XDECREF(ours);
  Py_XDECREF(theirs);
  return result;
}

PyObject* copy(PyObject* self, PyObject*) {
  const BlockObject& block = *as_block(self);
  if (block.pool != nullptr) return new_block(block.pool, handle_of(block), block.format);
  PyObject* fields = fields_tuple(self);
  if (fields == nullptr) return nullptr;
  PyObject* made = PyObject_CallObject(reinterpret_cast<PyObject*>(g_block_type), fields);
  Py_DECREF(fields);
  return made;
}

PyObject* reduce(PyObject* self, PyObject*) {
  PyObject* fields = fields_tuple(self);
  if (fields == nullptr) return nullptr;
  return Py_BuildValue("(ON)", g_block_type, fields);
}

constexpr const char* kDoc =
    "Block(block_id, stream='kv', format='fp16', n_used=0, owner=None, ever_allocated=False)\n"
    "--\n\n"
    "One owner's reference to a fixed-size block of a pool.\n\n"
    "A pool returns blocks from allocate, allocate_kv, fork, writable and blocks_for. Their "
    "fields\n"
    "are the pool's own at the moment of reading. Once the reference is freed, owner is None and\n"
    "n_used 0, freeing it again does nothing and any other use is a ValueError, also when the\n"
    "block has been handed out again. Writing n_used goes through BlockPoolAllocator.mark_used,\n"
    "writing format re-tags the block; the other fields are read-only. A copy is the same\n"
    "reference; a pickle holds the values alone.\n\n"
    "One made by this constructor is plain values: it belongs to no pool, and pools refuse it.\n"
    "Blocks compare by value and cannot be hashed.";

#define KVPOOL_FIELD(field, doc)                            \
  {DetachedBlock::kNames[field], get_field, set_field, doc, \
   reinterpret_cast<void*>(static_cast<std::intptr_t>(field))}
PyGetSetDef g_fields[] = {
    KVPOOL_FIELD(Field::kBlockId, "Id of the block: stable, and never used again once retired."),
    KVPOOL_FIELD(Field::kStream, "\"k\", \"v\", or \"kv\" in a pool with separate_kv=False."),
    KVPOOL_FIELD(Field::kFormat, "Format tag of the data in the block."),
    KVPOOL_FIELD(Field::kNUsed, "Token slots in use, 0 to block_size."),
    KVPOOL_FIELD(Field::kOwner, "Whose reference this is; None once it is freed."),
    KVPOOL_FIELD(Field::kEverAllocated, "Whether the block was ever handed out."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
#undef KVPOOL_FIELD

PyMethodDef g_methods[] = {
    {"__copy__", copy, METH_NOARGS, "__copy__($self, /)\n--\n\nThe same reference."},
    {"__deepcopy__", copy, METH_O, "__deepcopy__($self, memo, /)\n--\n\nThe same reference."},
    {"__reduce__", reduce, METH_NOARGS, "__reduce__($self, /)\n--\n\nThe values alone."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyTypeObject* block_type() noexcept { return g_block_type; }

void add_block_type(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>(kDoc)},
      {Py_tp_new, reinterpret_cast<void*>(construct)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_repr, reinterpret_cast<void*>(repr)},
      {Py_tp_richcompare, reinterpret_cast<void*>(compare)},
      {Py_tp_hash, reinterpret_cast<void*>(PyObject_HashNotImplemented)},
      {Py_tp_getset, g_fields},
      {Py_tp_methods, g_methods},
      {0, nullptr},
  };
  static PyType_Spec spec = {"kvpool._native.Block", sizeof(BlockObject), 0, Py_TPFLAGS_DEFAULT,
                             slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, "Block", type) < 0) {
    throw nanobind::python_error();
  }
  g_block_type = reinterpret_cast<PyTypeObject*>(type);
}

core::BlockHandle handle_of(const BlockObject& block) noexcept {
  return {.pool = nanobind::inst_ptr<PoolObject>(block.pool)->id,
          .serial = block.serial,
          .record = block.record,
          .reference = block.reference,
          .id = block.id,
          .stream = block.stream};
}

core::BlockHandle block_argument(const char* call, const char* name, PyObject* object) {
  if (!is_block(object)) refuse(PyExc_TypeError, call, "%s must be a Block, got %R", name, object);
  const BlockObject& block = *as_block(object);
  if (block.pool == nullptr) {
    refuse(PyExc_ValueError, call, "%s belongs to no pool: %R", name, object);
  }
  return handle_of(block);
}

PyObject* new_block(PyObject* pool, const core::BlockHandle& handle,
                    core::FormatTag format) noexcept {
  BlockObject* block = new_object();
  if (block == nullptr) return PyErr_NoMemory();
  block->pool = Py_NewRef(pool);
  block->serial = handle.serial;
  block->record = handle.record;
  block->reference = handle.reference;
  block->id = handle.id;
  block->format = format;
  block->stream = handle.stream;
  return reinterpret_cast<PyObject*>(block);
}

PyObject* new_block_list(PyObject* pool, std::span<const core::BlockHandle> handles,
                         core::FormatTag format) noexcept {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(handles.size()));
  if (list == nullptr) return nullptr;
  for (std::size_t i = 0; i < handles.size(); ++i) {
    PyObject* block = new_block(pool, handles[i], format);
    if (block == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), block);
  }
  return list;
}

}  // namespace kvpool::bindings
