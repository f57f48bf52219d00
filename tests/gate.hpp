// What the device tests share: a gate that holds a stream, and the error that a call throws.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

/// Holds a stream until the test opens it, so that "still pending" is a fact and not a matter of timing.
class Gate {
 public:
  /// A callable for a stream; it ends once the gate is open. On a no-touch device hand it to `host_func`.
  [[nodiscard]] auto pass() const {
    return [open = open_] { open->wait(false); };
  }
  void open() {
    open_->store(true);
    open_->notify_all();
  }
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);  // outlives a waiting worker
};

/// The error of type `E` that `call` throws, if it does.
template <class E, class Call>
std::optional<E> thrown_by(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error;
  }
  return std::nullopt;
}
