// Reading token data, drawing batches, and the bigram baseline.
#include "data.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <unordered_map>

#include "options.hpp"

namespace gpt {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "token shards are little-endian");

constexpr std::int32_t shard_magic = 20240520, shard_version = 1;
constexpr std::size_t shard_header_count = 256;
constexpr std::uint64_t shard_header_bytes = shard_header_count * sizeof(std::int32_t);
constexpr std::uint64_t text_vocab = 256, shard_vocab = 50257;

[[noreturn]] void refuse(const fs::path& path, const std::string& what) { throw BadInput{path.string() + ": " + what}; }

std::ifstream open_file(const fs::path& path) {
  std::ifstream file{path, std::ios::binary};
  if (!file) refuse(path, "cannot be opened for reading");
  return file;
}

bool is_shard(const fs::path& path) {
  if (path.extension() == ".bin") return true;
  std::int32_t magic = 0;
  std::ifstream file = open_file(path);
  file.read(reinterpret_cast<char*>(&magic), sizeof magic);
  return file.gcount() == sizeof magic && magic == shard_magic;
}

// Behind `tokens`, the tokens of one shard.
void read_shard(const fs::path& path, std::uint64_t vocab, std::vector<Token>& tokens) {
  std::ifstream file = open_file(path);
  std::array<std::int32_t, shard_header_count> header{};
  file.read(reinterpret_cast<char*>(header.data()), shard_header_bytes);
  if (file.gcount() != static_cast<std::streamsize>(shard_header_bytes)) {
    refuse(path, "has no whole token shard header of " + std::to_string(shard_header_bytes) + " bytes");
  }
  if (header[0] != shard_magic) refuse(path, "is not a token shard: its magic number is " + std::to_string(header[0]));
  if (header[1] != shard_version) {
    refuse(path, "is a token shard of version " + std::to_string(header[1]) + ", only version 1 is known");
  }
  if (header[2] <= 0) refuse(path, "promises " + std::to_string(header[2]) + " tokens in its header");
  const std::uint64_t count = static_cast<std::uint64_t>(header[2]);

  const std::uint64_t file_bytes = fs::file_size(path);
  const std::uint64_t expected_bytes = shard_header_bytes + count * sizeof(Token);
  if (file_bytes != expected_bytes) {
    refuse(path, std::string{file_bytes < expected_bytes ? "is truncated" : "is too long"} + ": its header promises " +
                     std::to_string(count) + " tokens, so " + std::to_string(expected_bytes) + " bytes, but it has " +
                     std::to_string(file_bytes));
  }
  const std::size_t first = tokens.size();
  tokens.resize(first + count);
  file.read(reinterpret_cast<char*>(tokens.data() + first), static_cast<std::streamsize>(count * sizeof(Token)));
  if (file.gcount() != static_cast<std::streamsize>(count * sizeof(Token))) refuse(path, "cannot be read to its end");

  const auto shard = std::span{tokens}.subspan(first);
  const auto bad = std::ranges::find_if(shard, [&](Token token) { return token >= vocab; });
  if (bad != shard.end()) {
    refuse(path, "token " + std::to_string(bad - shard.begin()) + " is " + std::to_string(*bad) +
                     ", not below the vocabulary of " + std::to_string(vocab) + " (--vocab)");
  }
}

// Behind `tokens`, the bytes of one text file.
void read_text(const fs::path& path, std::uint64_t vocab, std::vector<Token>& tokens) {
  std::ifstream file = open_file(path);
  std::vector<char> piece(1u << 20);
  std::uint64_t position = 0;
  do {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    for (const char c : std::span{piece}.first(static_cast<std::size_t>(file.gcount()))) {
      const Token token = static_cast<unsigned char>(c);
      if (token == 0) refuse(path, "is not text: byte " + std::to_string(position) + " is NUL");
      if (token >= vocab) {
        refuse(path, "byte " + std::to_string(position) + " is " + std::to_string(token) +
                         ", not below the vocabulary of " + std::to_string(vocab) + " (--vocab)");
      }
      tokens.push_back(token);
      ++position;
    }
  } while (file);
  if (file.bad() || position != fs::file_size(path)) refuse(path, "cannot be read to its end");
}

bool hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

}  // namespace

// Sorted, so that the order is no matter of the file system.
std::vector<fs::path> data_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator{folder}) {
    if (entry.path().extension() == ".bin" && entry.is_regular_file() && !hidden(entry.path())) {
      files.push_back(entry.path());
    }
  }
  if (files.empty()) {
    for (auto entry = fs::recursive_directory_iterator{folder}; entry != fs::recursive_directory_iterator{}; ++entry) {
      if (hidden(entry->path())) {
        entry.disable_recursion_pending();
      } else if (entry->is_regular_file()) {
        files.push_back(entry->path());
      }
    }
  }
  std::ranges::sort(files, {}, [](const fs::path& path) { return path.generic_string(); });
  return files;
}

namespace {

// A bijection of 64-bit numbers under which neighbours land far apart: two rounds of xor-shift and odd multiply.
std::uint64_t scatter(std::uint64_t x) {
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return x ^ (x >> 32);
}

}  // namespace

Dataset Dataset::load(const fs::path& path, std::uint64_t vocab) {
  try {
    const fs::file_status status = fs::status(path);
    if (!fs::exists(status)) refuse(path, "there is no such file or folder");
    std::vector<fs::path> files;
    if (fs::is_directory(status)) {
      files = data_files(path);
      if (files.empty()) refuse(path, "no file is in this folder");
    } else if (fs::is_regular_file(status)) {
      files = {path};
    } else {
      refuse(path, "is neither a file nor a folder");
    }

    const bool text = !is_shard(files.front());
    if (vocab == 0) vocab = text ? text_vocab : shard_vocab;
    std::vector<Token> tokens;
    for (const fs::path& file : files) text ? read_text(file, vocab, tokens) : read_shard(file, vocab, tokens);
    if (tokens.empty()) refuse(path, "is empty");
    return Dataset{std::move(tokens), vocab, text};
  } catch (const fs::filesystem_error& error) {
    refuse(path, error.code().message());
  }
}

Dataset::Dataset(std::vector<Token> tokens, std::uint64_t vocab, bool text)
    : tokens_{std::move(tokens)}, training_count_{tokens_.size() - tokens_.size() / 10}, vocab_{vocab},
      fingerprint_{tokens_.size()}, text_{text} {
  for (const Token token : tokens_) fingerprint_ = (fingerprint_ ^ token) * 0x100000001b3u;
  fingerprint_ = scatter(fingerprint_);
}

void Dataset::require(std::uint64_t context) const {
  const std::uint64_t shorter = std::min(training().size(), held_out().size());
  if (shorter < context + 1) {
    throw BadInput{"--data: " + std::to_string(tokens_.size()) + " tokens are too few: the held-out tenth has " +
                   std::to_string(held_out().size()) + ", and a sequence takes " + std::to_string(context + 1) +
                   " (--context + 1)"};
  }
}

void Dataset::copy_row(std::span<const Token> part, std::uint64_t start, std::span<Token> inputs,
                       std::span<Token> targets) const {
  std::ranges::copy(part.subspan(start, inputs.size()), inputs.begin());
  std::ranges::copy(part.subspan(start + 1, targets.size()), targets.begin());
}

void Dataset::training_batch(std::uint64_t seed, DataPosition position, std::uint64_t micro_batch,
                             std::uint64_t context, std::span<Token> inputs, std::span<Token> targets) const {
  const std::uint64_t starts = training().size() - context;
  std::uint64_t key = scatter(seed + 0x9e3779b97f4a7c15u);
  key = scatter(key ^ position.step);
  key = scatter(key ^ micro_batch);
  for (std::uint64_t row = 0; row < inputs.size() / context; ++row) {
    // As good as uniform: the remainder favours no start by more than `starts` in 2^64.
    const std::uint64_t start = scatter(key + row) % starts;
    copy_row(training(), start, inputs.subspan(row * context, context), targets.subspan(row * context, context));
  }
}

std::uint64_t Dataset::evaluation_rows(std::uint64_t context, std::uint64_t wanted) const {
  return std::min(wanted, (held_out().size() - 1) / context);
}

std::uint64_t Dataset::evaluation_start(std::uint64_t rows, std::uint64_t row, std::uint64_t context) const {
  return row * evaluation_rows(context, ~std::uint64_t{0}) / rows * context;
}

void Dataset::evaluation_batch(std::uint64_t rows, std::uint64_t first_row, std::uint64_t context,
                               std::span<Token> inputs, std::span<Token> targets) const {
  for (std::uint64_t row = 0; row < inputs.size() / context; ++row) {
    copy_row(held_out(), evaluation_start(rows, first_row + row, context), inputs.subspan(row * context, context),
             targets.subspan(row * context, context));
  }
}

double Dataset::bigram_loss(std::uint64_t context, std::uint64_t rows) const {
  // Only pairs that are looked at need counting, so a large vocabulary takes no table of its square.
  const auto key_of = [](Token first, Token second) { return std::uint32_t{first} << 16 | second; };
  std::unordered_map<std::uint32_t, std::uint64_t> pairs;
  const auto for_each_target = [&](auto visit) {
    for (std::uint64_t row = 0; row < rows; ++row) {
      const std::uint64_t start = evaluation_start(rows, row, context);
      for (std::uint64_t i = start; i < start + context; ++i) visit(held_out()[i], held_out()[i + 1]);
    }
  };
  for_each_target([&](Token first, Token second) { pairs.emplace(key_of(first, second), 0); });

  const std::span<const Token> tokens = training();
  std::vector<std::uint64_t> count(vocab_), count_as_first(vocab_);
  for (const Token token : tokens) ++count[token];
  for (std::uint64_t i = 0; i + 1 < tokens.size(); ++i) {
    ++count_as_first[tokens[i]];
    const auto pair = pairs.find(key_of(tokens[i], tokens[i + 1]));
    if (pair != pairs.end()) ++pair->second;
  }

  // p(b | a) = (count(a b) + k p(b)) / (count(a) + k), p(b) = (count(b) + 1) / (n + vocab): to what followed `a`, k
  // pseudo-counts are added that are spread as tokens are in the whole. A better (lower) baseline than one more of each
  // pair, and much better with a large vocabulary; k from 1 to 64 makes a difference of 0.0004 on English prose.
  constexpr double pseudo_counts = 16;
  double sum = 0;
  for_each_target([&](Token first, Token second) {
    const double unigram =
        (static_cast<double>(count[second]) + 1) / (static_cast<double>(tokens.size()) + static_cast<double>(vocab_));
    sum -= std::log((static_cast<double>(pairs.at(key_of(first, second))) + pseudo_counts * unigram) /
                    (static_cast<double>(count_as_first[first]) + pseudo_counts));
  });
  return sum / static_cast<double>(rows * context);
}

}  // namespace gpt
