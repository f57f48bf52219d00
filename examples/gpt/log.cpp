// Progress lines, the bar, the JSON-lines file and the summary.
#include "log.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include <nlohmann/json.hpp>

#include "options.hpp"

namespace gpt {
namespace {

// One line whatever is in it: a path need not be UTF-8.
std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

[[gnu::format(printf, 1, 2)]] std::string print(const char* format, ...) {
  char text[256];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

std::string duration(double seconds) {
  const auto s = static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 1e15));
  if (s >= 3600) return print("%" PRIu64 " h %02" PRIu64 " min", s / 3600, s / 60 % 60);
  if (s >= 60) return print("%" PRIu64 " min %02" PRIu64 " s", s / 60, s % 60);
  return print("%" PRIu64 " s", s);
}

void put(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

nlohmann::json with_event(nlohmann::json object, const char* event) {
  object["event"] = event;
  return object;
}

}  // namespace

JsonLines::JsonLines(const std::string& path, bool append) : path_{path} {
  if (path.empty()) return;
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC), 0666);
  if (file_ < 0) throw BadInput{"--log: " + path + " cannot be written: " + std::strerror(errno)};
}

JsonLines::~JsonLines() {
  if (file_ >= 0) ::close(file_);
}

void JsonLines::write(const nlohmann::json& line) {
  if (file_ < 0) return;
  const std::string text = dump(line) + '\n';
  ssize_t written = 0;
  do {
    written = ::write(file_, text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(text.size())) return;

  std::string reason = written < 0 ? std::strerror(errno) : "no room for a whole line";
  if (written > 0) {
    struct stat status{};
    if (::fstat(file_, &status) != 0 || !S_ISREG(status.st_mode) || ::ftruncate(file_, status.st_size - written) != 0) {
      reason += "; its last line is not whole";
    }
  }
  throw BadInput{"--log: " + path_ + " cannot be written: " + reason};
}

RunLog::RunLog(const std::string& json_path, bool append)
    : json_{json_path, append}, terminal_{::isatty(STDOUT_FILENO) == 1} {}

void RunLog::note(std::string_view text) { line(std::string{text}); }

void RunLog::start(const nlohmann::json& facts) { json_.write(with_event(facts, "start")); }

void RunLog::step(const StepRecord& r) {
  const int width = static_cast<int>(std::to_string(r.steps).size());
  line(print("step %*" PRIu64 "/%" PRIu64 " | loss %.4f | norm %.4f | lr %.3e | %.0f tok/s | HBM %s | h2d %s, d2h %s | "
             "stall %.1f ms",
             width, r.step, r.steps, r.loss, r.norm, r.learning_rate, r.tokens_per_second,
             to_string(r.hbm_used).c_str(), to_string(r.h2d_bytes).c_str(), to_string(r.d2h_bytes).c_str(),
             r.stall_seconds * 1e3));
  bar(r);
  json_.write({{"event", "step"},
               {"step", r.step},
               {"loss", r.loss},
               {"norm", r.norm},
               {"lr", r.learning_rate},
               {"step_seconds", r.step_seconds},
               {"tokens_per_second", r.tokens_per_second},
               {"hbm_bytes", r.hbm_used.count()},
               {"h2d_bytes", r.h2d_bytes.count()},
               {"d2h_bytes", r.d2h_bytes.count()},
               {"stall_seconds", r.stall_seconds}});
}

void RunLog::evaluation(std::uint64_t step, double val_loss, double bigram_loss) {
  line(print("step %" PRIu64 " | validation loss %.4f | bigram model %.4f | ratio %.3f", step, val_loss, bigram_loss,
             val_loss / bigram_loss));
  json_.write({{"event", "evaluation"}, {"step", step}, {"val_loss", val_loss}, {"bigram_loss", bigram_loss}});
}

void RunLog::saved(std::uint64_t step, const std::string& file, hbmoff::Bytes size) {
  line("saved after step " + std::to_string(step) + ": " + file + ", " + to_string(size));
  json_.write({{"event", "saved"}, {"step", step}, {"file", file}, {"bytes", size.count()}});
}

void RunLog::finish(const nlohmann::json& summary, bool as_json) {
  json_.write(with_event(summary, "summary"));
  bar_.clear();
  if (as_json) {
    line(dump(summary));
  } else {
    for (const auto& [name, value] : summary.items()) line(print("  %-22s ", name.c_str()) + dump(value));
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw BadInput{"standard output cannot be written"};
}

// A line above the bar, which stays the last thing on the terminal.
void RunLog::line(const std::string& text) {
  put((terminal_ ? "\r\033[K" : "") + text + '\n' + bar_);
  std::fflush(stdout);
}

void RunLog::bar(const StepRecord& record) {
  if (!terminal_ || record.steps == 0) return;
  smooth_seconds_ = smooth_seconds_ == 0 ? record.step_seconds : 0.9 * smooth_seconds_ + 0.1 * record.step_seconds;
  if (record.step >= record.steps) {
    put("\r\033[K");
    bar_.clear();
  } else {
    constexpr std::uint64_t width = 40;
    const double done = static_cast<double>(record.step) / static_cast<double>(record.steps);
    const auto filled = static_cast<std::size_t>(done * width);
    // Appended, not added: of "[" + std::string g++ 12 warns with -O3.
    bar_ = "[";
    bar_.append(filled, '=').append(">").append(width - filled, ' ').append("] ");
    bar_ += print("%3.0f%%, %s left", 100 * done,
                  duration(smooth_seconds_ * static_cast<double>(record.steps - record.step)).c_str());
    put("\r\033[K" + bar_);
  }
  std::fflush(stdout);
}

}  // namespace gpt
