#include "kernels.h"

#include <map>
#include <mutex>

#include "driver.h"
#include "kvpool/base/disk_cache.h"
#include "kvpool/base/error.h"

namespace kvpool::mlx_ext::cuda {
namespace {

constexpr std::string_view kHeaders[] = {"attention_parameters.cuh", "attention_products.cuh",
                                         "attention_splits.cuh",     "attention_tiles.cuh",
                                         "page_format.cuh",          "ptx.cuh"};

struct Compiled {
  const DiskCache on_disk{DiskCache::folder_for("KVPOOL_KERNEL_CACHE_DIR", "kernels")};
  std::mutex lock;
  std::map<std::string, CUmod_st*> modules;
  std::map<std::string, CUfunc_st*> functions;
};

/// Machine code is the process's: it is kept, and never unloaded.
Compiled& compiled() {
  static Compiled* const all = new Compiled;
  return *all;
}

/// Machine code from disk, compiled where it is not there.
std::string machine_code(const std::vector<Driver::Source>& sources,
                         const std::vector<std::string>& macros) {
  const Driver& driver = Driver::get();
  std::string key = "kvpool " KVPOOL_VERSION;
  const auto add = [&key](std::string_view part) {
    key += "\n" + std::to_string(part.size()) + " ";
    key += part;
  };
  add(driver.compiler());
  for (const std::string& macro : macros) add(macro);
  for (const Driver::Source& source : sources) {
    add(source.name);
    add(source.text);
  }
  return compiled().on_disk.get(key, [&] { return driver.compile(sources, macros); });
}

}  // namespace

CUfunc_st* kernel(std::string_view file, const char* name, const std::vector<std::string>& macros,
                  int shared_bytes) {
  std::string key(file);
  for (const std::string& macro : macros) key += " " + macro;
  Compiled& all = compiled();
  const std::lock_guard lock(all.lock);
  CUfunc_st*& function = all.functions[key + " " + name];
  if (function != nullptr) return function;
  const Driver& driver = Driver::get();
  CUmod_st*& module = all.modules[key];
  if (module == nullptr) {
    std::vector<Driver::Source> sources;
    sources.push_back({file, kernel_source(file)});
    for (const std::string_view header : kHeaders) {
      sources.push_back({header, kernel_source(header)});
    }
    module = driver.load(machine_code(sources, macros));
  }
  CUfunc_st* const found = driver.function(module, name);
  if (shared_bytes > 0) driver.allow_shared_bytes(found, shared_bytes);
  return function = found;
}

}  // namespace kvpool::mlx_ext::cuda
