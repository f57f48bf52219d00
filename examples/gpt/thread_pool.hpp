// A handful of threads that share the fixed blocks of a kernel. Which thread runs which block changes no bit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace gpt {

/// Runs blocks [0, n) of a kernel on the calling thread and `threads - 1` others. One kernel at a time.
class ThreadPool {
 public:
  explicit ThreadPool(std::uint32_t threads) {
    for (std::uint32_t t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    {
      const std::scoped_lock lock{mutex_};
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  [[nodiscard]] std::uint32_t threads() const { return static_cast<std::uint32_t>(workers_.size()) + 1; }

  /// Calls `body(block, thread)` once for each block; returns when all are done. `thread` is below `threads()` and tells
  /// bodies that run at the same time apart, for scratch memory. Allocates nothing. `body` does not throw.
  template <class Body>
  void run(std::uint64_t blocks, const Body& body) {
    if (workers_.empty() || blocks < 2) {
      for (std::uint64_t block = 0; block < blocks; ++block) body(block, std::uint32_t{0});
      return;
    }
    {
      const std::scoped_lock lock{mutex_};
      body_ = &body;
      call_ = [](const void* f, std::uint64_t block, std::uint32_t thread) {
        (*static_cast<const Body*>(f))(block, thread);
      };
      blocks_ = blocks;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<std::uint32_t>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    take_blocks(0);
    std::unique_lock lock{mutex_};
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_blocks(std::uint32_t thread) {
    for (std::uint64_t block; (block = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;)
      call_(body_, block, thread);
  }

  void work(std::uint32_t thread) {
    std::uint64_t seen = 0;
    std::unique_lock lock{mutex_};
    while (true) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      lock.unlock();
      take_blocks(thread);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const void* body_ = nullptr;
  void (*call_)(const void*, std::uint64_t, std::uint32_t) = nullptr;
  std::uint64_t blocks_ = 0;
  std::atomic<std::uint64_t> next_{0};
  std::uint32_t busy_ = 0;
  std::uint64_t generation_ = 0;
  bool stop_ = false;
};

}  // namespace gpt
