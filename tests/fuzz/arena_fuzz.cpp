// Random programs over an arena, held against a model: live buffers lie apart, keep what was written to them, and are
// counted by role; everything comes back.
#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

#include "fuzz.hpp"

namespace {

using namespace fuzz;

template <class Space>
class Program {
  using ArenaType = Arena<Checked, Space>;
  using Buffer = typename ArenaType::Buffer;
  static constexpr bool on_device = std::is_same_v<Space, DeviceSpace>;

  struct Live {
    Buffer buffer;
    std::uint64_t bytes;
    Role role;
    std::string name;
    StreamRef stream;  ///< of the last use: what is put on it comes after every use
    StreamRef freed_on;  ///< by the destructor
    std::uint64_t serial = 0;  ///< of its content; 0: none yet
  };

 public:
  Program(Checked& device, Input& input) : device_{device}, in_{input} {
    for (int i = 0; i < 5; ++i) streams_.push_back(device.create_stream("stream " + std::to_string(i)));
  }

  void run() {
    large_ = in_.one_in(16);
    const std::uint64_t capacity = large_ ? (std::uint64_t{5} << 20) + in_.below(4) * 256 : 256 * in_.between(1, 200);
    const ArenaOptions options{
        .max_blocks = in_.between(1, 24), .max_streams = in_.between(1, 4), .fill_freed = !large_ && in_.flip()};
    max_blocks_ = options.max_blocks;
    memory_span<std::byte, Space> adopted;
    const bool adopts = in_.flip();
    if (adopts) {
      if constexpr (on_device) {
        adopted = device_.allocate_device(Bytes{capacity});
      } else {
        adopted = device_.allocate_pinned(Bytes{capacity});
      }
      arena_.emplace(device_, adopted, options);
    } else {
      arena_.emplace(device_, Bytes{capacity + in_.below(256)}, options);
    }
    capacity_ = capacity;
    require(arena_->capacity().count() == capacity, "the capacity is not what was asked for");
    for (int steps = 0; steps < 400 && !in_.empty(); ++steps) {
      const std::uint32_t failing = in_.one_in(6) ? in_.between(1, 4) : 0, times = in_.between(1, 3);
      device_.inner().fail_call(failing, times);
      step();
      device_.inner().fail_call(0);
      check_usage();
    }
    end();
    arena_.reset();
    if (adopts) {
      if constexpr (on_device) {
        device_.free_device(adopted);
      } else {
        device_.free_pinned(adopted);
      }
    }
  }

 private:
  void step() {
    switch (in_.below(9)) {
      case 0:
      case 1:
      case 2:
        return allocate();
      case 3:
        return with_one([&](Live& live) { touch(live); });
      case 4:  // explicitly, on any stream
        return with_one([&](Live& live) {
          const StreamRef stream = any_stream();
          order(device_, stream, live.stream);
          try {
            live.buffer.free(stream);
          } catch (const DeviceError&) {
            require(static_cast<bool>(live.buffer), "a free that failed took the buffer");
            if (in_.flip()) {
              live.stream = stream;
              if (arena_->options().fill_freed) live.serial = 0;  // the fill may have come before what failed
              return touch(live);  // it is alive as before
            }
            again([&] { live.buffer.free(stream); });
          }
          require(!live.buffer && live.buffer.bytes().empty() && live.buffer.name().empty(),
                  "a freed buffer is not empty");
          forget(live);
        });
      case 5:  // by the destructor
        return with_one([&](Live& live) {
          order(device_, live.freed_on, live.stream);
          forget(live);
        });
      case 6:
        return with_one([&](Live& live) {
          const StreamRef stream = any_stream();
          live.buffer.move_to(stream);
          live.freed_on = stream;
        });
      case 7:
        return with_one([&](Live& live) {
          live.name = std::string(in_.below(60), 'n') + std::to_string(++names_);
          live.buffer.rename(live.name);
          check_name(live);
        });
      default:
        return with_one([&](Live& live) {  // moved
          Buffer other{std::move(live.buffer)};
          require(!live.buffer && live.buffer.bytes().empty(), "a moved-from buffer is not empty");
          live.buffer = std::move(other);
          live.buffer = std::move(*&live.buffer);
          check_name(live);
        });
    }
  }

  std::uint64_t size() {
    constexpr std::uint64_t sizes[] = {0, 1, 255, 256, 257, 512, 1024, 3000};
    constexpr std::uint64_t large_sizes[] = {(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 20) - 8704, 1 << 19};
    const std::uint32_t kind = in_.below(4);
    if (large_ && kind < 3) return in_.pick(large_sizes);
    if (kind == 0) return in_.pick(sizes);
    if (kind == 1) return arena_->usage().largest_free.count() - (in_.flip() && capacity_ > 256 ? 1 : 0);
    if (kind == 2) return std::uint64_t{in_.byte()} * 128;
    const std::uint64_t share = capacity_ / in_.between(1, 5);
    return share + in_.below(2);
  }

  void allocate() {
    const std::uint64_t bytes = size() % (capacity_ + 300);
    const StreamRef stream = any_stream();
    const auto role = static_cast<Role>(in_.below(role_count));
    const std::string name = "buffer " + std::to_string(++names_);
    std::optional<Buffer> got;
    bool full = false;
    if (in_.flip()) {
      again([&] { got = arena_->try_allocate(Bytes{bytes}, name, role, stream); });
      full = !got;
    } else {
      again([&] {
        try {
          got = arena_->allocate(Bytes{bytes}, name, role, stream);
        } catch (const OutOfMemory& error) {
          full = true;
          require(error.details().requested.count() == bytes, "an arena that is full gives another size");
        }
      });
    }
    const std::uint64_t need = arena_footprint(Bytes{bytes}).count();
    if (full) {
      require(bytes != 0, "no room for nothing");
      const ArenaUsage usage = arena_->usage();
      require(bytes > capacity_ || blocks() == max_blocks_ || usage.largest_free.count() < need,
              "an arena has room and says that it is full");
      if (bytes <= capacity_) exactly_live(usage);  // whatever was kept for a stream has been looked through
      return;
    }
    Live live{std::move(*got), bytes, role, name, stream, stream};
    require(live.buffer.bytes().count() == bytes, "a buffer has another size than asked for");
    if (bytes != 0) {
      require(reinterpret_cast<std::uintptr_t>(live.buffer.bytes().data()) % 256 == 0, "a buffer is not aligned");
      for (const Live& other : live_) {
        const auto *a = live.buffer.bytes().data(), *b = other.buffer.bytes().data();
        require(other.bytes == 0 || a >= b + other.bytes || b >= a + bytes, "two buffers overlap");
      }
    }
    check_name(live);
    if (in_.flip()) touch(live);
    live_.push_back(std::move(live));
  }

  // Checks the content, and writes it anew.
  void touch(Live& live) {
    const StreamRef stream = any_stream();
    order(device_, stream, live.stream);
    live.stream = stream;
    if (live.bytes == 0) return;
    const auto memory = live.buffer.bytes();
    // Of large ones only the ends, which is where others could lie.
    const std::uint64_t n = std::min<std::uint64_t>(live.bytes, large_ ? 64 : live.bytes);
    const auto head = memory.subspan(0, n), tail = memory.subspan(live.bytes - n, n);
    if (live.serial != 0) {
      launch("check", stream, {head, tail}, {}, [=, serial = live.serial, bytes = live.bytes] {
        for (std::uint64_t i = 0; i < n; ++i) {
          require(head.data()[i] == content_byte(serial, i), "a buffer lost its content");
          require(tail.data()[i] == content_byte(serial, bytes - n + i), "a buffer lost its content");
        }
      });
    }
    live.serial = ++serials_;
    launch("write", stream, {}, {head, tail}, [=, serial = live.serial, bytes = live.bytes] {
      for (std::uint64_t i = 0; i < n; ++i) {
        head.data()[i] = content_byte(serial, i);
        tail.data()[i] = content_byte(serial, bytes - n + i);
      }
    });
  }
  template <class F>
  void launch(const char* label, StreamRef stream, AccessList reads, AccessList writes, F f) {
    device_.note_access(stream, label, reads, writes);
    again([&] {
      if constexpr (on_device) {
        device_.enqueue(stream, f, {.name = label});
      } else {
        device_.host_func(stream, f);
      }
    });
  }

  void check_name(const Live& live) {
    require(live.buffer.name() == (live.bytes == 0 ? "" : live.name.substr(0, ArenaType::max_name)),
            "a buffer has another name");
  }
  void check_usage() {
    const ArenaUsage usage = arena_->usage();
    Bytes sum, live[role_count] = {};
    for (const Live& l : live_) live[static_cast<std::uint32_t>(l.role)] += arena_footprint(Bytes{l.bytes});
    for (std::uint32_t r = 0; r < role_count; ++r) {
      sum += usage.by_role[r];
      require(usage.by_role[r] >= live[r], "a role holds less than its live buffers");
    }
    require(sum == usage.used, "the roles do not sum to what is used");
    require(usage.used + usage.free == usage.capacity && usage.capacity.count() == capacity_, "used and free differ");
    require(usage.largest_free <= usage.free && usage.high_water >= usage.used, "impossible usage");
  }
  void exactly_live(const ArenaUsage& usage) {
    Bytes live[role_count] = {};
    for (const Live& l : live_) live[static_cast<std::uint32_t>(l.role)] += arena_footprint(Bytes{l.bytes});
    for (std::uint32_t r = 0; r < role_count; ++r)
      require(usage.by_role[r] == live[r], "a full arena still keeps freed blocks");
  }
  // Live buffers that take a block.
  std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(
        std::count_if(live_.begin(), live_.end(), [](const Live& l) { return l.bytes != 0; }));
  }

  void end() {
    while (!live_.empty()) {
      Live& live = live_.back();
      touch(live);
      order(device_, live.freed_on, live.stream);
      live_.pop_back();
    }
    // The whole arena as one buffer: nothing was lost on the way.
    std::uint64_t most = capacity_;
    while (arena_footprint(Bytes{most}).count() > capacity_) most -= 256;
    auto all = arena_->try_allocate(Bytes{most}, "all", Role::other, any_stream());
    require(all.has_value(), "memory is missing after everything was freed");
    if (large_) return;
    Live live{std::move(*all), most, Role::other, "all", streams_[0], streams_[0]};
    // Allocated on a stream of its own choice: use it there.
    live.buffer.move_to(live.stream = live.freed_on = last_stream());
    touch(live);
    order(device_, live.freed_on, live.stream);
  }

  StreamRef any_stream() {
    last_ = in_.below(streams_.size());
    return streams_[last_];
  }
  StreamRef last_stream() const { return streams_[last_]; }
  template <class F>
  void with_one(F&& f) {
    if (!live_.empty()) f(live_[in_.below(live_.size())]);
  }
  void forget(Live& live) { live_.erase(live_.begin() + (&live - live_.data())); }

  Checked& device_;
  Input& in_;
  std::vector<Checked::Stream> streams_;
  std::optional<ArenaType> arena_;
  std::vector<Live> live_;
  std::uint64_t capacity_ = 0;
  std::uint32_t max_blocks_ = 0;
  std::uint32_t last_ = 0;
  bool large_ = false;
  std::uint64_t serials_ = 0, names_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input{data, size};
  with_device([&](Checked& device) {
    if (input.flip()) {
      Program<DeviceSpace>{device, input}.run();
    } else {
      Program<PinnedSpace>{device, input}.run();
    }
  });
  return 0;
}
