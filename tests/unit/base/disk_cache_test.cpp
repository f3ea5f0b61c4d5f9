#include "kvpool/base/disk_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kvpool {
namespace {

namespace fs = std::filesystem;

class DiskCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "kvpool-disk-cache-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path folder() const { return root_ / "a" / "b"; }

  /// As a process of its own would.
  std::string get(const std::string& key, const std::string& made = "bytes") {
    return DiskCache(folder()).get(key, [&] {
      ++n_made_;
      return made;
    });
  }

  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder())) found.push_back(entry.path());
    return found;
  }

  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return (std::ostringstream() << file.rdbuf()).str();
  }
  static void write(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }

  fs::path root_;
  int n_made_ = 0;
};

TEST_F(DiskCacheTest, makes_once_for_each_key) {
  const std::string bytes("\0 machine code \xff", 16);
  EXPECT_EQ(get("key", bytes), bytes);
  EXPECT_EQ(get("key", "never asked for"), bytes);
  EXPECT_EQ(n_made_, 1);
  EXPECT_EQ(get("another key", ""), "");
  EXPECT_EQ(get("another key", "never asked for"), "");
  EXPECT_EQ(n_made_, 2);
  EXPECT_EQ(files().size(), 2U);
}

TEST_F(DiskCacheTest, without_a_folder_keeps_nothing) {
  for (int i = 1; i <= 2; ++i) {
    EXPECT_EQ(DiskCache({}).get("key", [&] { return std::to_string(i); }), std::to_string(i));
  }
}

TEST_F(DiskCacheTest, what_make_throws_passes_and_nothing_is_kept) {
  const DiskCache cache(folder());
  EXPECT_THROW(cache.get("key", []() -> std::string { throw std::domain_error("no"); }),
               std::domain_error);
  EXPECT_EQ(get("key"), "bytes");
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(DiskCacheTest, a_damaged_file_is_made_anew) {
  get("key");
  const fs::path path = files().front();
  const std::string whole = read(path);
  std::vector<std::string> damaged = {"", "x", whole.substr(0, 32), whole + "x"};
  damaged.push_back(whole.substr(0, whole.size() - 1));
  for (const std::size_t at : {std::size_t{0}, std::size_t{31}, whole.size() - 1}) {
    damaged.push_back(whole);
    damaged.back()[at] ^= 1;
  }
  for (const std::string& bytes : damaged) {
    write(path, bytes);
    n_made_ = 0;
    EXPECT_EQ(get("key", "new bytes"), "new bytes");
    EXPECT_EQ(get("key", "never asked for"), "new bytes");
    EXPECT_EQ(n_made_, 1);
  }
  EXPECT_EQ(files().size(), 1U);
}

TEST_F(DiskCacheTest, a_file_of_another_key_is_not_taken) {
  get("key", "of key");
  const fs::path path = files().front();
  const std::string of_key = read(path);
  fs::remove(path);
  get("another", "of another");
  write(files().front(), of_key);
  EXPECT_EQ(get("another", "of another"), "of another");
}

TEST_F(DiskCacheTest, a_file_that_others_may_write_is_not_taken) {
  get("key", "old");
  fs::permissions(files().front(), fs::perms::others_write, fs::perm_options::add);
  EXPECT_EQ(get("key", "new"), "new");
  EXPECT_EQ(get("key", "never asked for"), "new");  // replaced by one of this user's alone
}

TEST_F(DiskCacheTest, neither_a_link_nor_a_pipe_nor_a_folder_is_read) {
  get("key", "old");
  const fs::path path = files().front();
  fs::rename(path, root_ / "elsewhere");
  fs::create_symlink(root_ / "elsewhere", path);
  EXPECT_EQ(get("key", "new"), "new");
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(get("key", "newer"), "newer");  // and does not wait for a writer
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_EQ(get("key", "newest"), "newest");
  EXPECT_EQ(files().size(), 1U);  // what could not be put there is gone
}

TEST_F(DiskCacheTest, a_folder_that_cannot_be_made_is_no_fault) {
  write(root_ / "a", "a file where the folder would be");
  EXPECT_EQ(get("key"), "bytes");
  EXPECT_EQ(get("key"), "bytes");
  EXPECT_EQ(n_made_, 2);
}

TEST_F(DiskCacheTest, a_read_only_folder_is_read_and_not_written) {
  get("key");
  // Root may write anywhere, so a child that has given its rights up looks into the folder.
  for (const fs::path& path : {root_, root_ / "a"}) fs::permissions(path, fs::perms::all);
  fs::permissions(files().front(), static_cast<fs::perms>(0444));
  fs::permissions(folder(), static_cast<fs::perms>(0555));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (geteuid() == 0 && seteuid(65534) != 0) _exit(3);
    const bool kept = get("key", "not asked for") == "bytes";
    const bool made = get("other", "made") == "made" && get("other", "again") == "again";
    _exit(kept && made ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files().size(), 1U);
  fs::permissions(folder(), fs::perms::owner_all);
}

TEST_F(DiskCacheTest, threads_and_processes_share_a_folder) {
  const std::string bytes(100000, 'b');
  const auto work = [&] {
    const DiskCache cache(folder());
    bool good = true;
    for (int i = 0; i < 50; ++i) {
      const std::string key = std::to_string(i % 7);
      good &= cache.get(key, [&] { return key + bytes; }) == key + bytes;
      // Some of the files are spoiled under the others' eyes.
      if (i % 10 == 9) {
        for (const auto& entry : fs::directory_iterator(folder())) {
          if (entry.path().filename().string().size() != 64) continue;
          std::error_code gone;
          fs::resize_file(entry.path(), 1000, gone);
          break;
        }
      }
    }
    return good;
  };
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      bool good = false;
      try {
        good = work();
      } catch (...) {
      }
      _exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  std::atomic<int> n_good = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back([&] { n_good += work() ? 1 : 0; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_good, 3);
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(files().size(), 7U);
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Environment() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

TEST(DiskCacheFolder, follows_the_environment) {
  const auto folder = [] { return DiskCache::folder_for("KVPOOL_TEST_FOLDER", "things").string(); };
  const Environment home("HOME", "/home/user");
  const Environment none("KVPOOL_TEST_FOLDER", nullptr);
  {
    const Environment xdg("XDG_CACHE_HOME", nullptr);
    EXPECT_EQ(folder(), "/home/user/.cache/kvpool/things");
    const Environment nowhere("HOME", nullptr);
    EXPECT_EQ(folder(), "");
  }
  {
    const Environment xdg("XDG_CACHE_HOME", "relative");
    EXPECT_EQ(folder(), "/home/user/.cache/kvpool/things");
  }
  const Environment xdg("XDG_CACHE_HOME", "/var/cache/user");
  EXPECT_EQ(folder(), "/var/cache/user/kvpool/things");
  {
    const Environment own("KVPOOL_TEST_FOLDER", "/elsewhere");
    EXPECT_EQ(folder(), "/elsewhere");
  }
  const Environment off("KVPOOL_TEST_FOLDER", "");
  EXPECT_EQ(folder(), "");
}

}  // namespace
}  // namespace kvpool
