// The example trainer loses its device while it runs: what it saved before that goes on in a new one to the same digest.
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "gpt/checkpoint_file.hpp"
#include "gpt/data.hpp"
#include "gpt/log.hpp"
#include "gpt/options.hpp"
#include "gpt/trainer.hpp"
#include "hbmoff/device/host_device.hpp"
#include "support/watchdog.hpp"

namespace fs = std::filesystem;
using namespace hbmoff;

namespace {

struct Scratch {
  fs::path path = fs::temp_directory_path() / ("gpt_failure_test." + std::to_string(::getpid()));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }
  [[nodiscard]] std::string file(const char* name) const { return (path / name).string(); }
};

std::optional<Fault> planted;
std::uint64_t calls_of_last_run = 0;

/// A device that fails as `planted` says.
class FailingDevice : public HostDevice {
 public:
  explicit FailingDevice(const HostDeviceOptions& options) : HostDevice{options} {
    if (planted) inject(*planted);
  }
  ~FailingDevice() {
    if (planted) calls_of_last_run = calls_made(planted->kinds);
  }
};

gpt::Options options_in(const Scratch& scratch) {
  gpt::Options options;
  options.vocab = 256;
  options.layers = 3;
  options.channels = 16;
  options.heads = 2;
  options.context = 16;
  options.batch = 2;
  options.threads = 1;
  options.steps = options.decay_steps = 4;
  options.eval_batches = 1;
  options.offload = gpt::Offload::all;
  options.page = 16_KiB;
  options.save = scratch.file("saved");
  options.save_every = 1;
  options.log = scratch.file("log");
  gpt::check(options);
  return options;
}

const gpt::Dataset& data() {
  static const gpt::Dataset tokens = [] {
    std::vector<gpt::Token> all;
    for (std::uint32_t i = 0; i < 2000; ++i) all.push_back(static_cast<gpt::Token>(i * i % 251));
    return gpt::Dataset{std::move(all), 256, true};
  }();
  return tokens;
}

void train(const gpt::Options& options, const gpt::CheckpointReader* resume) {
  gpt::RunLog log{options.log, resume != nullptr};
  gpt::Trainer<float, FailingDevice> trainer{options, data(), log, resume};
  const int code = trainer.run(std::atomic<bool>{false});
  CHECK(code == 0);
}

std::string digest_of(const gpt::Options& options) {
  std::ifstream log{options.log};
  std::string line, last;
  while (std::getline(log, line)) last = line;
  return nlohmann::json::parse(last).at("digest").get<std::string>();
}

}  // namespace

TEST_CASE("queued work fails anywhere: --resume from the last saved file ends with the undisturbed digest") {
  const Watchdog watchdog{"trainings that lose their device", std::chrono::seconds{300}};
  const Scratch scratch;
  gpt::Options options = options_in(scratch);
  for (const CallKind kind : {CallKind::copy, CallKind::kernel}) {
    planted = Fault{.kinds = kind, .nth = 0};
    train(options, nullptr);
    const std::uint64_t calls = calls_of_last_run;
    const std::string undisturbed = digest_of(options);
    REQUIRE(calls > 50);
    std::uint64_t resumed = 0;
    const std::uint64_t stride = calls / 23;
    for (std::uint64_t n = 1; n <= calls; n += stride) {
      INFO("kind ", static_cast<int>(kind), " call ", n, " of ", calls);
      fs::remove(options.save);
      planted = Fault{.kinds = kind, .nth = n, .outcome = FaultOutcome::work_failed, .reason = "planted"};
      bool lost = false;
      try {
        train(options, nullptr);
      } catch (const DeviceError& error) {
        lost = error.context_lost();
        CHECK(std::string_view{error.what()}.find("planted") != std::string_view::npos);
      }
      CHECK(lost);
      planted.reset();
      std::optional<gpt::CheckpointReader> saved;
      if (fs::exists(options.save)) saved.emplace(options.save);
      resumed += saved ? 1 : 0;
      train(options, saved ? &*saved : nullptr);
      CHECK(digest_of(options) == undisturbed);
    }
    CHECK(resumed > 10);
  }
}
