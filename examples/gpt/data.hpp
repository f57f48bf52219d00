// Training data: tokens of text files or of llm.c's .bin shards, the held-out tenth, batches, the bigram baseline.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace gpt {

using Token = std::uint16_t;

/// Where training is in the data. Together with the seed it is all that the next batch depends on, so a run that goes
/// on from a saved position draws what an undisturbed one would have drawn.
struct DataPosition {
  std::uint64_t step = 0;  ///< the next step to draw batches for, 0 at the start
};

/// The files that a folder of data gives: its shards if it has any, else all files below it; hidden ones are skipped.
/// \throws std::filesystem::filesystem_error when a folder cannot be read
[[nodiscard]] std::vector<std::filesystem::path> data_files(const std::filesystem::path& folder);

/// All tokens of a data set, in memory (2 bytes each). The last tenth is held out, contiguous; training never sees it.
class Dataset {
 public:
  /// Reads `path`:
  /// - a file that begins as an llm.c shard does, or is named *.bin: one shard (256 int32 of header: magic 20240520,
  ///   version 1, token count; then so many uint16 tokens, and nothing behind them);
  /// - any other file: text, each byte a token;
  /// - a folder with *.bin files in it: these, in the order of their names, as one sequence;
  /// - any other folder: its files at any depth in the order of their paths, as one text; hidden ones are skipped.
  /// \param vocab number of different tokens; 0 takes the kind's own, 256 or 50257
  /// \throws BadInput missing, unreadable, empty, not text (it holds a NUL byte), bad header, shorter or longer than
  ///         its header says, a token not below `vocab`
  [[nodiscard]] static Dataset load(const std::filesystem::path& path, std::uint64_t vocab);

  /// From tokens in memory; each is below `vocab`.
  Dataset(std::vector<Token> tokens, std::uint64_t vocab, bool text);

  [[nodiscard]] std::uint64_t vocab() const { return vocab_; }
  /// Whether tokens are bytes of text.
  [[nodiscard]] bool text() const { return text_; }
  [[nodiscard]] std::span<const Token> training() const { return std::span{tokens_}.first(training_count_); }
  [[nodiscard]] std::span<const Token> held_out() const { return std::span{tokens_}.subspan(training_count_); }
  /// A hash of all tokens, so that a saved run does not go on with other data unnoticed.
  [[nodiscard]] std::uint64_t fingerprint() const { return fingerprint_; }

  /// \throws BadInput when the training or the held-out part has no `context` + 1 tokens
  void require(std::uint64_t context) const;

  /// Fills one micro-batch from the training part: `batch` sequences of `context` tokens and, for each token, the one
  /// that follows it. Which ones is a function of (seed, position, micro_batch, row) alone.
  /// \param inputs, targets batch x context tokens each, row after row
  void training_batch(std::uint64_t seed, DataPosition position, std::uint64_t micro_batch, std::uint64_t context,
                      std::span<Token> inputs, std::span<Token> targets) const;

  /// Sequences that the held-out part gives for evaluation: at most `wanted`, not overlapping, spread evenly over it.
  [[nodiscard]] std::uint64_t evaluation_rows(std::uint64_t context, std::uint64_t wanted) const;

  /// Sequences [first_row, first_row + inputs.size() / context) of the `rows` = evaluation_rows(...) ones.
  void evaluation_batch(std::uint64_t rows, std::uint64_t first_row, std::uint64_t context, std::span<Token> inputs,
                        std::span<Token> targets) const;

  /// Mean loss, in nats per token, of a bigram model fitted on the training part, over the same targets as an
  /// evaluation with `rows` rows looks at. Smoothed by 16 pseudo-counts per predecessor, spread as the tokens of the
  /// training part are (themselves smoothed by adding one).
  [[nodiscard]] double bigram_loss(std::uint64_t context, std::uint64_t rows) const;

 private:
  [[nodiscard]] std::uint64_t evaluation_start(std::uint64_t rows, std::uint64_t row, std::uint64_t context) const;
  void copy_row(std::span<const Token> part, std::uint64_t start, std::span<Token> inputs,
                std::span<Token> targets) const;

  std::vector<Token> tokens_;
  std::uint64_t training_count_ = 0;
  std::uint64_t vocab_ = 0;
  std::uint64_t fingerprint_ = 0;
  bool text_ = false;
};

}  // namespace gpt
