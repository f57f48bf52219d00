// Ends the program when a test hangs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

/// Aborts the program, naming the test, unless destroyed within `limit`.
class Watchdog {
 public:
  explicit Watchdog(const char* test, std::chrono::seconds limit = std::chrono::seconds{60})
      : thread_{[this, test, limit] {
          std::unique_lock lock{mutex_};
          if (ended_cv_.wait_for(lock, limit, [this] { return ended_; })) return;
          std::fprintf(stderr, "%s: hangs\n", test);
          std::abort();
        }} {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::scoped_lock lock{mutex_};
      ended_ = true;
    }
    ended_cv_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_cv_;
  bool ended_ = false;
  std::thread thread_;
};
