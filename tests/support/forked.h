#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

namespace kvpool::testing {

/// Runs `body` in a child of fork(2). Whether it returned true; false where it threw, died, or took
/// longer than ten seconds, as it does when it waits for a lock that nobody will release.
template <typename Body>
bool holds_in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    bool held = false;
    try {
      held = body();
    } catch (const std::exception&) {
    }
    ::_exit(held ? 0 : 1);
  }
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

}  // namespace kvpool::testing
