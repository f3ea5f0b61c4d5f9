#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>

#include "kvpool/base/error.h"

namespace kvpool::mlx_ext::cuda {
namespace {

// Numbers of CUDA's driver API.
constexpr int kMultiprocessors = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kSharedBytes = 97;
constexpr int kMaxDynamicSharedBytes = 8;  // of a function

void* open_library(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return library;
  }
  throw Error("[cuda::Driver] cannot load " + std::string(*names.begin()));
}

template <class Function>
void look_up(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Error("[cuda::Driver] no function " + std::string(name));
}

}  // namespace

const Driver& Driver::get() {
  // Never destroyed: the process may end while work is on its way.
  static const Driver* const driver = new Driver;
  return *driver;
}

Driver::Driver() : process_(getpid()) {
  void* const cuda = open_library({"libcuda.so.1"});
  look_up(mem_alloc_, cuda, "cuMemAlloc_v2");
  look_up(mem_free_, cuda, "cuMemFree_v2");
  look_up(copy_to_device_, cuda, "cuMemcpyHtoD_v2");
  look_up(set_bytes_, cuda, "cuMemsetD8_v2");
  look_up(stream_synchronize_, cuda, "cuStreamSynchronize");
  look_up(push_context_, cuda, "cuCtxPushCurrent_v2");
  look_up(pop_context_, cuda, "cuCtxPopCurrent_v2");
  look_up(module_load_, cuda, "cuModuleLoadData");
  look_up(module_function_, cuda, "cuModuleGetFunction");
  look_up(function_attribute_, cuda, "cuFuncSetAttribute");
  look_up(error_string_, cuda, "cuGetErrorString");
  void* const compiler = open_library({"libnvrtc.so.13", "libnvrtc.so.12"});
  int (*version)(int*, int*) = nullptr;
  look_up(version, compiler, "nvrtcVersion");
  look_up(create_program_, compiler, "nvrtcCreateProgram");
  look_up(compile_program_, compiler, "nvrtcCompileProgram");
  look_up(destroy_program_, compiler, "nvrtcDestroyProgram");
  look_up(code_size_, compiler, "nvrtcGetCUBINSize");
  look_up(code_, compiler, "nvrtcGetCUBIN");
  look_up(log_size_, compiler, "nvrtcGetProgramLogSize");
  look_up(log_, compiler, "nvrtcGetProgramLog");

  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*get_name)(char*, int, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  int (*retain)(CUctx_st**, int) = nullptr;
  look_up(init, cuda, "cuInit");
  look_up(device_get, cuda, "cuDeviceGet");
  look_up(get_name, cuda, "cuDeviceGetName");
  look_up(attribute, cuda, "cuDeviceGetAttribute");
  look_up(retain, cuda, "cuDevicePrimaryCtxRetain");
  int device = 0;
  check(init(0), "cuInit");
  check(device_get(&device, 0), "cuDeviceGet");
  check(retain(&context_, device), "cuDevicePrimaryCtxRetain");
  int major = 0;
  int minor = 0;
  check(attribute(&major, kCapabilityMajor, device), "cuDeviceGetAttribute");
  check(attribute(&minor, kCapabilityMinor, device), "cuDeviceGetAttribute");
  check(attribute(&multiprocessors_, kMultiprocessors, device), "cuDeviceGetAttribute");
  check(attribute(&shared_bytes_, kSharedBytes, device), "cuDeviceGetAttribute");
  std::array<char, 256> name{};
  check(get_name(name.data(), static_cast<int>(name.size()) - 1, device), "cuDeviceGetName");
  device_name_ = name.data();
  if (major < 8) {
    throw Error("[cuda::Driver] the kernels need compute capability 8.0, " + device_name_ +
                " has " + std::to_string(major) + "." + std::to_string(minor));
  }
  options_ = {"--gpu-architecture=sm_" + std::to_string(major) + std::to_string(minor),
              "--std=c++20", "--device-as-default-execution-space"};
  int compiler_major = 0;
  int compiler_minor = 0;
  check(version(&compiler_major, &compiler_minor), "nvrtcVersion");
  compiler_ = "NVRTC " + std::to_string(compiler_major) + "." + std::to_string(compiler_minor);
  for (const std::string& option : options_) compiler_ += " " + option;
}

void Driver::check(int result, const char* call) const {
  if (result == 0) return;
  const char* text = nullptr;
  error_string_(result, &text);
  throw Error("[cuda::Driver] " + std::string(call) + ": " +
              (text != nullptr ? text : std::to_string(result)));
}

bool Driver::in_child() const noexcept { return getpid() != process_; }

/// The device's context is the thread's as long as this lives; then the one before is again.
class Driver::Context {
 public:
  explicit Context(const Driver& driver) noexcept
      : driver_(driver),
        is_current_(!driver.in_child() && driver.push_context_(driver.context_) == 0) {}
  ~Context() {
    CUctx_st* popped = nullptr;
    if (is_current_) driver_.pop_context_(&popped);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  bool is_current() const noexcept { return is_current_; }
  void require() const {
    if (is_current_) return;
    throw Error("[cuda::Driver] the device cannot be used here: in a child of fork()?");
  }

 private:
  const Driver& driver_;
  bool is_current_;
};

std::uint64_t Driver::allocate(std::size_t bytes) const noexcept {
  const Context context(*this);
  std::uint64_t address = 0;
  return context.is_current() && mem_alloc_(&address, bytes) == 0 ? address : 0;
}

void Driver::free(std::uint64_t address) const noexcept {
  const Context context(*this);
  if (context.is_current()) mem_free_(address);
}

void Driver::upload(std::uint64_t to, const void* from, std::size_t bytes) const {
  const Context context(*this);
  context.require();
  check(copy_to_device_(to, from, bytes), "cuMemcpyHtoD");
  check(stream_synchronize_(nullptr), "cuStreamSynchronize");
}

void Driver::zero(std::uint64_t at, std::size_t bytes) const {
  const Context context(*this);
  context.require();
  check(set_bytes_(at, 0, bytes), "cuMemsetD8");
  check(stream_synchronize_(nullptr), "cuStreamSynchronize");
}

std::string Driver::compile(const std::vector<Source>& sources,
                            const std::vector<std::string>& macros) const {
  std::vector<std::string> texts, names, options = options_;
  for (const Source& source : sources) {
    texts.emplace_back(source.text);
    names.emplace_back(source.name);
  }
  for (const std::string& macro : macros) options.push_back("--define-macro=" + macro);
  std::vector<const char*> header_texts, header_names, option_list;
  for (std::size_t i = 1; i < sources.size(); ++i) {
    header_texts.push_back(texts[i].c_str());
    header_names.push_back(names[i].c_str());
  }
  for (const std::string& option : options) option_list.push_back(option.c_str());

  _nvrtcProgram* program = nullptr;
  if (create_program_(&program, texts[0].c_str(), names[0].c_str(),
                      static_cast<int>(header_texts.size()), header_texts.data(),
                      header_names.data()) != 0) {
    throw Error("[cuda::Driver::compile] cannot take " + names[0]);
  }
  const int result =
      compile_program_(program, static_cast<int>(option_list.size()), option_list.data());
  std::string text;
  std::size_t size = 0;
  if (result != 0) {
    log_size_(program, &size);
    text.resize(size);
    log_(program, text.data());
  } else {
    code_size_(program, &size);
    text.resize(size);
    code_(program, text.data());
  }
  destroy_program_(&program);
  if (result != 0) throw Error("[cuda::Driver::compile] " + names[0] + ": " + text);
  return text;
}

CUmod_st* Driver::load(const std::string& machine_code) const {
  const Context context(*this);
  context.require();
  CUmod_st* module = nullptr;
  check(module_load_(&module, machine_code.data()), "cuModuleLoadData");
  return module;
}

CUfunc_st* Driver::function(CUmod_st* module, const char* name) const {
  const Context context(*this);
  context.require();
  CUfunc_st* function = nullptr;
  check(module_function_(&function, module, name), "cuModuleGetFunction");
  return function;
}

void Driver::allow_shared_bytes(CUfunc_st* function, int bytes) const {
  const Context context(*this);
  context.require();
  check(function_attribute_(function, kMaxDynamicSharedBytes, bytes), "cuFuncSetAttribute");
}

}  // namespace kvpool::mlx_ext::cuda
