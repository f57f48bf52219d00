// The process's handler of memory faults, while there are devices that want to see some of them.
#pragma once

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include <signal.h>
#if defined(__linux__)
#include <ucontext.h>
#endif

namespace hbmoff::detail {

/// A touch of memory that was not accessible in this way.
struct MemoryFault {
  std::byte* address;
  bool write;
  bool kind_known;  ///< else `write` says nothing
};

/// Takes faults of any thread, between `watch` and `unwatch`, in a signal handler.
class FaultWatcher {
 public:
  FaultWatcher() = default;
  FaultWatcher(const FaultWatcher&) = delete;
  FaultWatcher& operator=(const FaultWatcher&) = delete;

  /// Makes the memory accessible, so that the access succeeds when it is made again; or says that the fault is none of
  /// its own. Async-signal-safe. One call at a time.
  virtual bool take(const MemoryFault& fault) noexcept = 0;

 protected:
  ~FaultWatcher() = default;

 private:
  friend class FaultHandler;
  FaultWatcher* next_ = nullptr;
};

/// While one lives, the process's SIGSEGV handler is `FaultHandler`'s. A fault that no watcher takes goes to the
/// handler before it.
class FaultHandler {
 public:
  FaultHandler() {
    const std::scoped_lock lock{installing};
    if (users++ > 0) return;
    struct sigaction current{};
    ::sigaction(SIGSEGV, nullptr, &current);
    if (is_ours(current)) return;  // left there by the last user
    {
      const SpinLock spin;
      handler_before = current;
    }
    struct sigaction ours{};
    ours.sa_sigaction = &handle;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;  // the handler before may be there for stacks that overflow
    ::sigemptyset(&ours.sa_mask);
    ::sigaction(SIGSEGV, &ours, nullptr);
  }
  ~FaultHandler() {
    const std::scoped_lock lock{installing};
    if (--users > 0) return;
    struct sigaction current{};
    ::sigaction(SIGSEGV, nullptr, &current);
    // One that was installed over ours may call it for the rest of the process's life.
    if (is_ours(current)) ::sigaction(SIGSEGV, &handler_before, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

  static void watch(FaultWatcher& watcher) noexcept {
    const SpinLock spin;
    watcher.next_ = watchers;
    watchers = &watcher;
  }
  /// When it returns, `take` has been called for the last time.
  static void unwatch(FaultWatcher& watcher) noexcept {
    const SpinLock spin;
    FaultWatcher** link = &watchers;
    while (*link != &watcher) link = &(*link)->next_;
    *link = watcher.next_;
  }

 private:
  /// Of handlers and of threads that cannot fault while they hold it; so no handler interrupts a holder.
  class SpinLock {
   public:
    SpinLock() noexcept {
      while (held.test_and_set(std::memory_order_acquire)) {
      }
    }
    ~SpinLock() { held.clear(std::memory_order_release); }
    SpinLock(const SpinLock&) = delete;
    SpinLock& operator=(const SpinLock&) = delete;
  };

  static bool is_ours(const struct sigaction& action) noexcept {
    return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &handle;
  }

  static void handle(int signal, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    const bool taken = info->si_code > 0 && take(info, context);  // else sent by a process, not by an access
    errno = saved_errno;
    if (!taken) pass_on(signal, info, context);
  }

  static bool take(const siginfo_t* info, [[maybe_unused]] const void* context) noexcept {
    MemoryFault fault{static_cast<std::byte*>(info->si_addr), false, false};
#if defined(__linux__) && (defined(__x86_64__) || defined(__i386__))
    const auto code = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR];  // of the page fault
    if ((code & 16) != 0) return false;  // an instruction fetch
    fault.write = (code & 2) != 0;
    fault.kind_known = true;
#endif
    const SpinLock spin;
    for (FaultWatcher* watcher = watchers; watcher != nullptr; watcher = watcher->next_) {
      if (watcher->take(fault)) return true;
    }
    return false;
  }

  /// As if the handler before were the process's.
  static void pass_on(int signal, siginfo_t* info, void* context) {
    struct sigaction previous{};
    {
      const SpinLock spin;
      previous = handler_before;
    }
    if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(signal, info, context);
    const bool ignored = previous.sa_handler == SIG_IGN, sent = info->si_code <= 0;
    if (!ignored && previous.sa_handler != SIG_DFL) return previous.sa_handler(signal);
    if (ignored && sent) return;
    // The default, also where a fault would be ignored: the process ends when the access, or the signal, comes again.
    previous.sa_handler = SIG_DFL;
    ::sigaction(SIGSEGV, &previous, nullptr);
    if (sent) static_cast<void>(::raise(signal));
  }

  static inline std::mutex installing;
  static inline std::uint64_t users = 0;
  static inline std::atomic_flag held;
  static inline struct sigaction handler_before{};
  static inline FaultWatcher* watchers = nullptr;
};

}  // namespace hbmoff::detail
