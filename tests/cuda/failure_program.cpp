// A training on CudaDevice that makes every call again when it fails. failure_walk.py runs it with each call of the CUDA
// runtime failing in turn. Says in its last line how it went:
//
//   failures N     N calls failed; the bits are the model's
//   lost NAME      the context was lost, with the error NAME; everything said so, and ended
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "hbmoff/cuda.hpp"
#include "support/adamw_model.hpp"

using namespace hbmoff;

namespace {

constexpr std::uint64_t steps = 2;
constexpr std::uint32_t layers = 4;
int failures = 0;

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

// What a user does: makes the call again. A lost context goes on up.
template <class Call>
auto again(Call&& call) -> decltype(call()) {
  while (true) {
    try {
      return call();
    } catch (const OutOfMemory& error) {
      require(error.details().requested > Bytes{} && !error.details().what_for.empty(), "what OutOfMemory says");
      require(++failures == 1, "one failure, told once");
    } catch (const CudaError& error) {
      if (error.context_lost()) throw;
      require(!error.api().empty() && error.where().line() > 0, "what CudaError says");
      require(++failures == 1, "one failure, told once");
    }
  }
}

std::vector<std::byte> bytes_of(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::byte> all(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    all[i] = static_cast<std::byte>(random_numbers::hash(seed * 4099 + i) & 0xffu);
  }
  return all;
}

class Training {
 public:
  explicit Training(CudaDevice& device) : device_{device} {}
  ~Training() {
    store_.reset();
    optimizer_.reset();
    buffers_.clear();
    gradients_.clear();
    staging_ = {};
  }

  void run() {
    set_up();
    for (std::uint64_t s = 1; s <= steps; ++s) {
      for (std::uint32_t l = 0; l < layers; ++l) {
        auto saved = again([&] { return store_->save(l, *stream_); });
        const auto memory = saved.template tensor<float>(0).bytes();
        send(memory, bytes_of(memory.count(), s * 100 + l));
        again([&] { saved.commit(); });
      }
      for (std::uint32_t l = layers; l-- > 0;) {
        auto saved = again([&] { return store_->restore(l, *stream_); });
        const auto memory = saved.template tensor<float>(0).bytes();
        require(receive(memory) == bytes_of(memory.count(), s * 100 + l), "activations that come back");
      }
      const adamw_test::GradientSource source{.seed = 5, .step = s};
      const AdamWStep options{.max_norm = 0.5f};
      for (std::uint32_t t = 0; t < specs_.size(); ++t) {
        std::vector<std::byte> content(specs_[t].count * 4);
        for (std::uint64_t i = 0; i < specs_[t].count; ++i) {
          adamw_test::store(content.data(), DType::fp32, i, source.at(t, i));
        }
        send(gradients_[t].bytes(), content);
      }
      again([&] {
        if (optimizer_->unfinished()) return optimizer_->resume(*stream_);
        optimizer_->step(*stream_, options);
      });
      const StepReport expected = model_.step(source, {AdamWGroup{}}, options);
      const StepReport report = again([&] { return optimizer_->report(s); });
      require(again([&] { return optimizer_->try_report(s); }).has_value(), "the report is there");
      require(report.applied == expected.applied && report.norm == expected.norm, "the report");
    }
    for (std::uint32_t t = 0; t < specs_.size(); ++t) {
      require(receive(buffers_[t].bytes()) == model_.tensors[t].weight, "the weights");
      for (const OptimizerState state : {OptimizerState::first_moment, OptimizerState::second_moment}) {
        std::vector<float> values(specs_[t].count);
        again([&] { optimizer_->read(specs_[t].name, state, values); });
        require(adamw_test::same_bits(
                    values, state == OptimizerState::first_moment ? model_.tensors[t].m : model_.tensors[t].v),
                "the moments");
      }
    }
    // Everything can be given back, and nothing is left in the arenas.
    again([&] { device_.synchronize(CudaDevice::StreamRef{*stream_}); });
  }

  // Behind the loss of the context.
  void check_lost() {
    require(device_.lost(), "the device says that it is lost");
    const auto says_so = [](auto&& call) {
      try {
        call();
      } catch (const CudaError& error) {
        return error.context_lost();
      } catch (const InvalidArgument&) {  // of an operation that was cut short and is not to be had again
        return true;
      }
      return false;
    };
    require(says_so([&] { static_cast<void>(device_.create_stream()); }), "create_stream says so");
    require(says_so([&] { static_cast<void>(device_.allocate_device(1_KiB)); }), "allocate_device says so");
    if (stream_) require(says_so([&] { device_.synchronize(CudaDevice::StreamRef{*stream_}); }), "synchronize says so");
    if (stream_ && optimizer_ && optimizer_->steps() != 0) {
      require(says_so([&] { optimizer_->step(*stream_, {}); }) || optimizer_->failed(), "the optimizer says so");
    }
  }

 private:
  void set_up() {
    stream_.emplace(again([&] { return device_.create_stream("compute"); }));
    hbm_ = again([&] { return std::make_unique<HbmArena<CudaDevice>>(device_, 64_KiB); });
    host_ = again([&] { return std::make_unique<PinnedHostArena<CudaDevice>>(device_, 64_KiB); });
    staging_ = again([&] { return host_->allocate(2_KiB, "staging", Role::other, *stream_); });
    optimizer_ = again([&] { return std::make_unique<Optimizer>(*hbm_, *host_, policy_, options_); });
    for (std::uint32_t t = 0; t < specs_.size(); ++t) {
      const adamw_test::TensorSpec& spec = specs_[t];
      const Bytes size = Bytes{spec.count * 4};
      buffers_.push_back(again([&] { return hbm_->allocate(size, spec.name, Role::weight, *stream_); }));
      gradients_.push_back(again([&] { return hbm_->allocate(size, spec.name, Role::gradient, *stream_); }));
      send(buffers_[t].bytes(), model_.tensors[t].weight);
      optimizer_->add({.name = spec.name, .count = spec.count}, buffers_[t].as<float>(),
                      device_span<const float>{gradients_[t].as<float>()});
    }
    again([&] { optimizer_->unfinished() ? optimizer_->resume(*stream_) : optimizer_->prepare(*stream_); });
    for (std::uint32_t t = 0; t < specs_.size(); ++t) {
      again([&] { optimizer_->write(specs_[t].name, OptimizerState::first_moment, model_.tensors[t].m); });
      again([&] { optimizer_->write(specs_[t].name, OptimizerState::second_moment, model_.tensors[t].v); });
    }
    store_ = again([&] {
      const BundleLayout layout{{{.info = {.name = "x", .count = 300}, .checkpoint = true}}};
      return std::make_unique<Store>(*hbm_, *host_, OffloadAll{}, layers, layout);
    });
  }
  void send(device_span<std::byte> to, const std::vector<std::byte>& content) {
    std::memcpy(staging_.bytes().data(), content.data(), content.size());
    const pinned_span<const std::byte> from{staging_.bytes().subspan(0, content.size())};
    again([&] { device_.copy_async(to, from, *stream_); });
    again([&] { device_.synchronize(CudaDevice::StreamRef{*stream_}); });
  }
  std::vector<std::byte> receive(device_span<std::byte> from) {
    const auto to = staging_.bytes().subspan(0, from.count());
    again([&] { device_.copy_async(to, device_span<const std::byte>{from}, *stream_); });
    again([&] { device_.synchronize(CudaDevice::StreamRef{*stream_}); });
    return {to.data(), to.data() + to.count()};
  }

  using Optimizer = PagedAdamW<CudaDevice, OffloadMatching, 2>;
  using Store = ActivationStore<CudaDevice, OffloadAll, 2>;
  CudaDevice& device_;
  std::vector<adamw_test::TensorSpec> specs_{{"a", 300, DType::fp32, DType::fp32, 0},
                                             {"b", 170, DType::fp32, DType::fp32, 0},
                                             {"kept", 60, DType::fp32, DType::fp32, 0}};
  OffloadMatching policy_{{"a", "b"}};
  PagedAdamWOptions options_{.page = 1_KiB};
  adamw_test::AdamWModel model_{specs_, 7};
  std::optional<CudaDevice::Stream> stream_;
  std::unique_ptr<HbmArena<CudaDevice>> hbm_;
  std::unique_ptr<PinnedHostArena<CudaDevice>> host_;
  PinnedHostArena<CudaDevice>::Buffer staging_;
  std::vector<HbmArena<CudaDevice>::Buffer> buffers_, gradients_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Store> store_;
};

}  // namespace

TEST_CASE("a training that makes its calls again") {
  std::string lost;
  try {
    auto device = again([] { return std::make_unique<CudaDevice>(); });
    Training training{*device};
    try {
      training.run();
    } catch (const CudaError& error) {
      require(error.context_lost(), "only a lost context ends the training");
      lost = cudaGetErrorName(error.code());
      training.check_lost();
    }
  } catch (const CudaError& error) {
    require(error.context_lost(), "only a lost context ends the program");
    lost = cudaGetErrorName(error.code());
  }
  if (lost.empty()) {
    std::printf("failures %d\n", failures);
  } else {
    std::printf("lost %s\n", lost.c_str());
  }
}
