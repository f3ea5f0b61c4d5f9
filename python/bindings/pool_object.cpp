#include "pool_object.h"

#include <algorithm>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "arguments.h"

namespace kvpool::bindings {

FormatStrings::~FormatStrings() {
  for (PyObject* string : strings_) Py_XDECREF(string);
}

core::FormatTag FormatStrings::tag(core::BlockPoolAllocator& pool, const char* call,
                                   PyObject* name) {
  for (std::size_t i = 0; i < strings_.size(); ++i) {
    if (strings_[i] == name) return static_cast<core::FormatTag>(i);
  }
  if (!PyUnicode_Check(name)) refuse(PyExc_TypeError, call, "format must be a str, got %R", name);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) throw PythonErrorSet{};
    PyErr_Clear();
    refuse(PyExc_ValueError, call, "format must be encodable text, got %R", name);
  }
  const core::FormatTag tag = pool.intern_format({text, static_cast<std::size_t>(size)});
  if (PyUnicode_CheckExact(name)) remember(tag, name);
  return tag;
}

PyObject* FormatStrings::name(const core::BlockPoolAllocator& pool, core::FormatTag tag) {
  const auto index = static_cast<std::size_t>(tag);
  if (index < strings_.size() && strings_[index] != nullptr) return strings_[index];
  const std::string text = pool.format_name(tag);
  PyObject* string = PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (string == nullptr) return nullptr;
  remember(tag, string);
  Py_DECREF(string);
  return strings_[index];
}

void FormatStrings::remember(core::FormatTag tag, PyObject* name) {
  const auto index = static_cast<std::size_t>(tag);
  if (index >= strings_.size()) strings_.resize(index + 1, nullptr);
  if (strings_[index] == nullptr) strings_[index] = Py_NewRef(name);
}

HandleBuffer::HandleBuffer(HandleMemory& memory, std::size_t n, std::size_t most)
    : memory_(memory), n_(n) {
  if (n <= kSmall) {
    data_ = reinterpret_cast<core::BlockHandle*>(small_);
    return;
  }
  if (n > most) {
    data_ = nullptr;
    return;
  }
  data_ = std::exchange(memory.data_, nullptr);
  capacity_ = std::exchange(memory.capacity_, 0);
  if (capacity_ >= n) return;
  std::free(data_);
  data_ = static_cast<core::BlockHandle*>(std::malloc(n * sizeof(core::BlockHandle)));
  if (data_ == nullptr) throw std::bad_alloc{};
  capacity_ = n;
}

HandleBuffer::~HandleBuffer() {
  if (capacity_ == 0) return;
  constexpr std::size_t kKept = 65'536;
  if (capacity_ > kKept || capacity_ <= memory_.capacity_) {
    std::free(data_);
    return;
  }
  std::free(memory_.data_);
  memory_.data_ = data_;
  memory_.capacity_ = capacity_;
}

namespace {

std::size_t most_blocks_of(const core::PoolConfig& config) {
  constexpr std::int64_t kMost = core::PoolConfig::kMaxBlocks;
  return static_cast<std::size_t>(config.grow_on_exhaustion
                                      ? std::min(kMost, config.max_blocks.value_or(kMost))
                                      : config.n_blocks);
}

}  // namespace

PoolObject::PoolObject(const core::PoolConfig& config)
    : pool(std::make_shared<core::BlockPoolAllocator>(config)),
      id(pool->pool_id()),
      most_blocks(most_blocks_of(config)),
      separate_kv(config.separate_kv) {}

PoolObject& pool_argument(const char* call, PyObject* pool) {
  if (!nanobind::isinstance<PoolObject>(nanobind::handle(pool))) {
    PyErr_Format(PyExc_TypeError, "[%s] pool must be a BlockPoolAllocator, got %R", call, pool);
    throw nanobind::python_error();
  }
  return pool_object(pool);
}

}  // namespace kvpool::bindings
