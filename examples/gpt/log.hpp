// What a run tells: a line per step, a progress bar on a terminal, a JSON-lines file, a summary.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "hbmoff/core/units.hpp"

namespace gpt {

/// One step, as it is told.
struct StepRecord {
  std::uint64_t step = 0;            ///< 1 for the first
  std::uint64_t steps = 0;           ///< in total
  double loss = 0;                   ///< nats per token, mean over the step
  double norm = 0;                   ///< of the gradients, before clipping
  double learning_rate = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  hbmoff::Bytes hbm_used;            ///< high-water mark of the arena so far
  hbmoff::Bytes h2d_bytes;           ///< moved to the device during this step
  hbmoff::Bytes d2h_bytes;           ///< moved to the host during this step
  double stall_seconds = 0;          ///< how long the compute stream waited for fills during this step
};

/// A file of JSON lines. Each line reaches the file by one write, newline included, or not at all, so that whoever
/// reads beside the run, or after it was killed, sees whole lines only.
class JsonLines {
 public:
  /// \param path empty: no file, and `write` does nothing
  /// \param append true goes on behind what is there (a resumed run), false begins anew
  /// \throws BadInput when the file cannot be written
  JsonLines(const std::string& path, bool append);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;

  /// \throws BadInput when the line could not be written whole; what was written of it is taken back
  void write(const nlohmann::json& line);

 private:
  std::string path_;
  int file_ = -1;
};

/// Tells the run on standard output (lines; on a terminal a bar below them) and to the JSON-lines file.
class RunLog {
 public:
  /// \param json_path empty: no file
  /// \param append as JsonLines
  /// \throws BadInput when the file cannot be written
  RunLog(const std::string& json_path, bool append);

  /// A line for people only.
  void note(std::string_view text);
  /// First line of the file: what runs. `facts` is an object; "event": "start" is added. Other lines' events are
  /// "step", "evaluation", "saved" and "summary". Numbers that are not finite become null.
  void start(const nlohmann::json& facts);
  void step(const StepRecord& record);
  void evaluation(std::uint64_t step, double val_loss, double bigram_loss);
  void saved(std::uint64_t step, const std::string& file, hbmoff::Bytes size);
  /// Ends the run: `summary` goes to the file, and to standard output as one last JSON line or as lines for people.
  /// \throws BadInput when standard output cannot be written
  void finish(const nlohmann::json& summary, bool as_json);

 private:
  void line(const std::string& text);
  void bar(const StepRecord& record);

  JsonLines json_;
  bool terminal_ = false;
  std::string bar_;                  // shown below the last line, on a terminal
  double smooth_seconds_ = 0;        // moving average of step_seconds, for the time left
};

}  // namespace gpt
