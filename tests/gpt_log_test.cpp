// The trainer's JSON-lines file: whole lines only, whatever happens.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gpt/log.hpp"
#include "gpt/options.hpp"

namespace fs = std::filesystem;
using gpt::BadInput;
using gpt::JsonLines;
using nlohmann::json;

namespace {

struct Scratch {
  fs::path path = fs::temp_directory_path() / ("gpt_log_test." + std::to_string(::getpid()));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }
  std::string file() const { return (path / "log.jsonl").string(); }
};

// Each line parsed; fails when the last one has no line end.
std::vector<json> lines(const std::string& file) {
  std::ifstream stream{file, std::ios::binary};
  const std::string text{std::istreambuf_iterator<char>{stream}, {}};
  CHECK((text.empty() || text.back() == '\n'));
  std::vector<json> parsed;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    parsed.push_back(json::parse(text.substr(at, end - at)));
    at = end + 1;
  }
  return parsed;
}

}  // namespace

TEST_CASE("lines are written as they come; a new run begins anew, a resumed one goes on") {
  const Scratch scratch;
  {
    JsonLines log{scratch.file(), false};
    log.write({{"step", 1}, {"text", "two\nlines"}});
    CHECK(lines(scratch.file()).size() == 1);  // there while the run goes on
    log.write({{"step", 2}, {"path", "not UTF-8: \xff"}});
  }
  CHECK(lines(scratch.file()).size() == 2);
  CHECK(lines(scratch.file())[0]["text"] == "two\nlines");
  JsonLines{scratch.file(), true}.write({{"step", 3}});
  CHECK(lines(scratch.file()).size() == 3);
  JsonLines{scratch.file(), false}.write({{"step", 4}});
  CHECK(lines(scratch.file()).size() == 1);
}

TEST_CASE("no file was asked for") { JsonLines{"", false}.write({{"step", 1}}); }

TEST_CASE("a log that cannot be written is refused") {
  const Scratch scratch;
  CHECK_THROWS_AS((JsonLines{scratch.path.string(), false}), BadInput);
  CHECK_THROWS_AS((JsonLines{(scratch.path / "no folder" / "a").string(), false}), BadInput);
  JsonLines full{"/dev/full", false};
  CHECK_THROWS_AS(full.write({{"step", 1}}), BadInput);
}

TEST_CASE("a line for which there is no room is not written in part") {
  const Scratch scratch;
  JsonLines log{scratch.file(), false};
  log.write({{"step", 1}});
  const auto size = fs::file_size(scratch.file());

  struct rlimit usual{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &usual) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit low = {size + 5, usual.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  CHECK_THROWS_AS(log.write({{"step", 2}}), BadInput);
  ::setrlimit(RLIMIT_FSIZE, &usual);
  std::signal(SIGXFSZ, handler);
  CHECK(fs::file_size(scratch.file()) == size);

  log.write({{"step", 3}});
  CHECK(lines(scratch.file()).size() == 2);
  CHECK(lines(scratch.file())[1]["step"] == 3);
}

TEST_CASE("a run's log tells its start, steps, evaluations, saves and summary") {
  const Scratch scratch;
  {
    gpt::RunLog log{scratch.file(), false};
    log.start({{"layers", 4}});
    log.step({.step = 1,
              .steps = 2,
              .loss = std::numeric_limits<double>::quiet_NaN(),
              .norm = std::numeric_limits<double>::infinity(),
              .learning_rate = 1e-3,
              .step_seconds = 0.5,
              .tokens_per_second = 1536,
              .hbm_used = hbmoff::Bytes{1} * (std::uint64_t{1} << 40),
              .h2d_bytes = hbmoff::Bytes{12},
              .d2h_bytes = hbmoff::Bytes{13},
              .stall_seconds = 0.25});
    log.evaluation(1, 2.0, 2.5);
    log.saved(1, "a.ckpt", hbmoff::Bytes{99});
    log.finish({{"steps", 2}}, true);
  }
  const std::vector<json> told = lines(scratch.file());
  REQUIRE(told.size() == 5);
  CHECK(told[0] == json{{"event", "start"}, {"layers", 4}});
  CHECK(told[1]["event"] == "step");
  CHECK(told[1]["step"] == 1);
  CHECK(told[1]["loss"].is_null());
  CHECK(told[1]["norm"].is_null());
  CHECK(told[1]["tokens_per_second"] == 1536);
  CHECK(told[1]["hbm_bytes"] == std::uint64_t{1} << 40);
  CHECK(told[1]["h2d_bytes"] == 12);
  CHECK(told[1]["d2h_bytes"] == 13);
  CHECK(told[1]["stall_seconds"] == 0.25);
  CHECK(told[2]["val_loss"] == 2.0);
  CHECK(told[3]["bytes"] == 99);
  CHECK(told[4] == json{{"event", "summary"}, {"steps", 2}});
}
