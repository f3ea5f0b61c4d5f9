#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

struct CUfunc_st;
struct CUmod_st;
struct CUctx_st;
struct CUstream_st;
struct _nvrtcProgram;

namespace kvpool::mlx_ext::cuda {

/// The part of CUDA's driver and run-time compiler that is used here, looked up in the libraries
/// that MLX's CUDA build has loaded: nothing of CUDA is needed to build.
class Driver {
 public:
  /// Looked up once; throws Error naming what is missing. A working Driver has a device of compute
  /// capability 8.0 or more, the first one.
  static const Driver& get();

  // Any thread may call; the device that it uses otherwise stays what it was. In a child of
  // fork(2), which cannot use the device, there is no memory, nothing is freed, and the others
  // throw.

  bool in_child() const noexcept;

  /// Device memory, or 0.
  std::uint64_t allocate(std::size_t bytes) const noexcept;
  void free(std::uint64_t address) const noexcept;
  /// Return when the bytes are there.
  void upload(std::uint64_t to, const void* from, std::size_t bytes) const;
  void zero(std::uint64_t at, std::size_t bytes) const;

  struct Source {
    std::string_view name;
    std::string_view text;
  };
  /// Machine code of `sources[0]`, which may include the others, with macros "NAME=value".
  std::string compile(const std::vector<Source>& sources,
                      const std::vector<std::string>& macros) const;
  /// What the machine code depends on beside those: the compiler's version and its options.
  const std::string& compiler() const noexcept { return compiler_; }
  CUmod_st* load(const std::string& machine_code) const;
  CUfunc_st* function(CUmod_st* module, const char* name) const;
  /// Lets the function have this much dynamic shared memory.
  void allow_shared_bytes(CUfunc_st* function, int bytes) const;

  /// Of a block, where a kernel asks for it.
  int shared_bytes() const noexcept { return shared_bytes_; }
  int multiprocessors() const noexcept { return multiprocessors_; }
  const std::string& device_name() const noexcept { return device_name_; }

 private:
  Driver();
  void check(int result, const char* call) const;

  int (*mem_alloc_)(std::uint64_t*, std::size_t) = nullptr;
  int (*mem_free_)(std::uint64_t) = nullptr;
  int (*copy_to_device_)(std::uint64_t, const void*, std::size_t) = nullptr;
  int (*set_bytes_)(std::uint64_t, unsigned char, std::size_t) = nullptr;
  int (*stream_synchronize_)(CUstream_st*) = nullptr;
  int (*push_context_)(CUctx_st*) = nullptr;
  int (*pop_context_)(CUctx_st**) = nullptr;
  int (*module_load_)(CUmod_st**, const void*) = nullptr;
  int (*module_function_)(CUfunc_st**, CUmod_st*, const char*) = nullptr;
  int (*function_attribute_)(CUfunc_st*, int, int) = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
  int (*create_program_)(_nvrtcProgram**, const char*, const char*, int, const char* const*,
                         const char* const*) = nullptr;
  int (*compile_program_)(_nvrtcProgram*, int, const char* const*) = nullptr;
  int (*destroy_program_)(_nvrtcProgram**) = nullptr;
  int (*code_size_)(_nvrtcProgram*, std::size_t*) = nullptr;
  int (*code_)(_nvrtcProgram*, char*) = nullptr;
  int (*log_size_)(_nvrtcProgram*, std::size_t*) = nullptr;
  int (*log_)(_nvrtcProgram*, char*) = nullptr;

  class Context;

  CUctx_st* context_ = nullptr;
  int process_ = 0;
  int shared_bytes_ = 0;
  int multiprocessors_ = 0;
  std::vector<std::string> options_;  // of every compilation
  std::string compiler_;
  std::string device_name_;
};

}  // namespace kvpool::mlx_ext::cuda
