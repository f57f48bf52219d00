// The trainer's data: text and token shards, the held-out tenth, batches, the bigram baseline.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "gpt/data.hpp"
#include "gpt/options.hpp"

namespace fs = std::filesystem;
using gpt::BadInput;
using gpt::Dataset;
using gpt::Token;

namespace {

// A folder that is gone at the end of the test.
struct Scratch {
  fs::path path = fs::temp_directory_path() / ("gpt_data_test." + std::to_string(::getpid()));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }

  fs::path text(const std::string& name, const std::string& content) const {
    fs::create_directories((path / name).parent_path());
    std::ofstream{path / name, std::ios::binary} << content;
    return path / name;
  }
  // `tokens` of which the header promises `promised`.
  fs::path shard(const std::string& name, const std::vector<Token>& tokens, std::int64_t promised = -1,
                 std::int32_t magic = 20240520, std::int32_t version = 1) const {
    std::vector<std::int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<std::int32_t>(promised < 0 ? static_cast<std::int64_t>(tokens.size()) : promised);
    std::ofstream file{path / name, std::ios::binary};
    file.write(reinterpret_cast<const char*>(header.data()), 1024);
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * 2));
    return path / name;
  }
};

std::vector<Token> all(const Dataset& data) {
  std::vector<Token> tokens{data.training().begin(), data.training().end()};
  tokens.insert(tokens.end(), data.held_out().begin(), data.held_out().end());
  return tokens;
}

std::vector<Token> bytes_of(const std::string& text) {
  std::vector<Token> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::vector<Token> counting(std::size_t count, std::size_t modulus) {
  std::vector<Token> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = static_cast<Token>(i % modulus);
  return tokens;
}

template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

std::string load_refusal(const fs::path& path, std::uint64_t vocab = 0) {
  return refusal([&] { static_cast<void>(Dataset::load(path, vocab)); });
}

bool names(const std::string& message, std::string_view what) {
  return message.find(what) != std::string::npos && message.find('\n') == std::string::npos;
}

}  // namespace

TEST_CASE("text: a token is a byte") {
  const Scratch scratch;
  const std::string text = "Kut\xc3\xbazov \xe2\x80\x9cwent\xe2\x80\x9d\n";
  const Dataset data = Dataset::load(scratch.text("a.txt", text), 0);
  CHECK(data.text());
  CHECK(data.vocab() == 256);
  CHECK(all(data) == bytes_of(text));
  CHECK(Dataset::load(scratch.text("b.txt", text), 50257).vocab() == 50257);
}

TEST_CASE("a folder of text is read at any depth, in the order of the paths, without hidden files") {
  const Scratch scratch;
  scratch.text("t/b.txt", "second ");
  scratch.text("t/a/z.md", "first ");
  scratch.text("t/c", "third");
  scratch.text("t/.hidden", "never");
  scratch.text("t/.git/config", "never");
  scratch.text("t/empty", "");
  CHECK(all(Dataset::load(scratch.path / "t", 0)) == bytes_of("first second third"));
}

TEST_CASE("token shards: one, or several in the order of their names") {
  const Scratch scratch;
  scratch.shard("train_01.bin", {4, 5, 50256});
  scratch.shard("train_00.bin", {1, 2, 3});
  scratch.text("notes.txt", "not read");
  const Dataset one = Dataset::load(scratch.path / "train_01.bin", 0);
  CHECK(!one.text());
  CHECK(one.vocab() == 50257);
  CHECK(all(one) == std::vector<Token>{4, 5, 50256});
  CHECK(all(Dataset::load(scratch.path, 0)) == std::vector<Token>{1, 2, 3, 4, 5, 50256});
  // Recognised by what is in it, too.
  fs::rename(scratch.path / "train_00.bin", scratch.path / "tokens");
  CHECK(!Dataset::load(scratch.path / "tokens", 0).text());
  CHECK(Dataset::load(scratch.shard("full.bin", {65535}), 65536).vocab() == 65536);
}

TEST_CASE("data that cannot be used is refused by name, in one line") {
  const Scratch scratch;
  const std::vector<Token> tokens = counting(100, 50);
  CHECK(names(load_refusal(scratch.path / "missing.txt"), "missing.txt"));
  CHECK(names(load_refusal("/dev/null"), "/dev/null"));
  CHECK(names(load_refusal(scratch.text("empty.txt", "")), "empty.txt: is empty"));
  CHECK(names(load_refusal(scratch.text("binary", std::string("ab\0c", 4))), "byte 2 is NUL"));
  CHECK(names(load_refusal(scratch.text("short.bin", "abc")), "short.bin: has no whole token shard header"));
  CHECK(names(load_refusal(scratch.shard("magic.bin", tokens, -1, 20240521)), "magic.bin: is not a token shard"));
  CHECK(names(load_refusal(scratch.shard("version.bin", tokens, -1, 20240520, 7)), "version 7"));
  CHECK(names(load_refusal(scratch.shard("none.bin", {}, 0)), "promises 0 tokens"));
  CHECK(names(load_refusal(scratch.shard("negative.bin", tokens, 0xfffffff0)), "promises -16 tokens"));
  CHECK(names(load_refusal(scratch.shard("cut.bin", tokens, 101)), "cut.bin: is truncated"));
  CHECK(names(load_refusal(scratch.shard("large.bin", tokens, 0x7fffffff)), "large.bin: is truncated"));
  CHECK(names(load_refusal(scratch.shard("long.bin", tokens, 99)), "long.bin: is too long"));
  fs::path odd = scratch.shard("odd.bin", tokens);
  fs::resize_file(odd, fs::file_size(odd) - 1);
  CHECK(names(load_refusal(odd), "odd.bin: is truncated"));
  CHECK(names(load_refusal(scratch.shard("range.bin", {1, 50257, 2})), "token 1 is 50257"));
  CHECK(names(load_refusal(scratch.shard("fits.bin", tokens), 49), "token 49 is 49"));
  CHECK(load_refusal(scratch.path / "fits.bin", 50) == "");
  CHECK(names(load_refusal(scratch.text("high.txt", "ab\xff"), 255), "byte 2 is 255"));
  fs::create_directories(scratch.path / "nothing");
  CHECK(names(load_refusal(scratch.path / "nothing"), "no file"));
  // One bad shard among good ones.
  fs::create_directories(scratch.path / "mixed");
  scratch.shard("mixed/0.bin", tokens);
  scratch.shard("mixed/1.bin", tokens, 200);
  CHECK(names(load_refusal(scratch.path / "mixed"), "1.bin: is truncated"));
}

TEST_CASE("the last tenth is held out") {
  for (const std::size_t count : {10u, 19u, 20u, 101u, 1000u}) {
    const Dataset data{counting(count, 7), 7, true};
    CHECK(data.held_out().size() == count / 10);
    CHECK(data.training().size() == count - count / 10);
    CHECK(data.training().data() + data.training().size() == data.held_out().data());
  }
}

TEST_CASE("too few tokens for one sequence are refused") {
  const Dataset data{counting(640, 7), 7, true};  // 64 held out
  CHECK(refusal([&] { data.require(63); }) == "");
  CHECK(names(refusal([&] { data.require(64); }), "640 tokens are too few"));
  CHECK(names(refusal([&] { data.require(std::uint64_t{1} << 20); }), "too few"));
}

TEST_CASE("batches: targets follow inputs, inside the training part, and depend on where training is alone") {
  const std::uint64_t context = 5, batch = 8;
  std::vector<Token> tokens(200);
  std::iota(tokens.begin(), tokens.end(), Token{0});  // a token tells its place
  const Dataset data{tokens, 65536, false};
  const auto draw = [&](std::uint64_t seed, std::uint64_t step, std::uint64_t micro_batch, std::uint64_t rows) {
    std::vector<Token> inputs(rows * context), targets(rows * context);
    data.training_batch(seed, {step}, micro_batch, context, inputs, targets);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CHECK(targets[i] == inputs[i] + 1);
      CHECK(inputs[i] == inputs[i / context * context] + i % context);
      CHECK(targets[i] < data.training().size());
    }
    return inputs;
  };
  const std::vector<Token> first = draw(1, 0, 0, batch);
  CHECK(first == draw(1, 0, 0, batch));
  CHECK(first != draw(2, 0, 0, batch));
  CHECK(first != draw(1, 1, 0, batch));
  CHECK(first != draw(1, 0, 1, batch));
  CHECK(draw(1, 1, 0, batch) != draw(1, 0, 1, batch));

  // Every place where a sequence can start is drawn, the first and the last one too, and none much too often.
  std::map<Token, int> starts;
  const std::uint64_t places = data.training().size() - context;
  for (std::uint64_t step = 0; step < 50 * places; ++step) ++starts[draw(7, step, 0, 1)[0]];
  CHECK(starts.size() == places);
  CHECK(starts.rbegin()->first == places - 1);
  for (const auto& [place, count] : starts) CHECK(count < 100);
}

TEST_CASE("the smallest data that is taken has one place to start, and one row to evaluate") {
  const Dataset data{counting(60, 60), 60, true};  // 54 + 6
  data.require(5);
  std::vector<Token> inputs(53), targets(53);
  data.training_batch(3, {0}, 0, 53, inputs, targets);
  CHECK(inputs[0] == 0);
  CHECK(targets[52] == 53);
  CHECK(data.evaluation_rows(5, 100) == 1);
}

TEST_CASE("evaluation rows do not overlap, lie in the held-out part and spread over it") {
  std::vector<Token> tokens(10000);
  std::iota(tokens.begin(), tokens.end(), Token{0});
  const Dataset data{tokens, 65536, false};  // held out: 9000 .. 9999
  const std::uint64_t context = 7;
  CHECK(data.evaluation_rows(context, 1000) == 142);  // 999 / 7
  CHECK(data.evaluation_rows(10, 1000) == 99);        // the last target has to be there too
  for (const std::uint64_t wanted : {1u, 2u, 3u, 100u, 142u, 1000u}) {
    const std::uint64_t rows = data.evaluation_rows(context, wanted);
    std::vector<Token> inputs(rows * context), targets(rows * context);
    for (std::uint64_t row = 0; row < rows; ++row) {  // one by one, as a batch of any size gives them
      data.evaluation_batch(rows, row, context, std::span{inputs}.subspan(row * context, context),
                            std::span{targets}.subspan(row * context, context));
    }
    std::vector<Token> whole_inputs(rows * context), whole_targets(rows * context);
    data.evaluation_batch(rows, 0, context, whole_inputs, whole_targets);
    CHECK(inputs == whole_inputs);
    CHECK(targets == whole_targets);

    CHECK(std::set<Token>{targets.begin(), targets.end()}.size() == targets.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CHECK(inputs[i] >= 9000);
      CHECK(targets[i] == inputs[i] + 1);
    }
    if (rows >= 100) CHECK(targets.back() > 9900);
  }
}

TEST_CASE("the bigram baseline against a plain model of it") {
  // Numbers with a strong but noisy order, so that seen and unseen pairs and unseen tokens occur.
  std::vector<Token> tokens(5000);
  std::uint64_t state = 9;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    tokens[i] = static_cast<Token>(state >> 60 == 0 ? (state >> 40) % 300 : (tokens[i - 1] * 3u + 1u) % 50u);
  }
  const Dataset data{tokens, 1000, false};
  const std::uint64_t context = 9;
  for (const std::uint64_t wanted : {1u, 10u, 1000u}) {
    const std::uint64_t rows = data.evaluation_rows(context, wanted);
    std::vector<Token> inputs(rows * context), targets(rows * context);
    data.evaluation_batch(rows, 0, context, inputs, targets);

    std::map<std::pair<Token, Token>, double> pairs;
    std::map<Token, double> first, count;
    const auto training = data.training();
    for (std::size_t i = 0; i < training.size(); ++i) {
      ++count[training[i]];
      if (i + 1 < training.size()) ++first[training[i]], ++pairs[{training[i], training[i + 1]}];
    }
    double sum = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const double p = (count[targets[i]] + 1) / (static_cast<double>(training.size()) + 1000);
      sum -= std::log((pairs[{inputs[i], targets[i]}] + 16 * p) / (first[inputs[i]] + 16));
    }
    CHECK(data.bigram_loss(context, rows) == doctest::Approx(sum / static_cast<double>(inputs.size())).epsilon(1e-12));
  }
}

TEST_CASE("the bigram baseline is a distribution: its probabilities sum to one") {
  // Data sets that differ in their very last token alone: each tells the probability of one token after 0.
  const std::uint64_t vocab = 4;
  double total = 0;
  for (Token target = 0; target < vocab; ++target) {
    std::vector<Token> tokens{0, 1, 0, 2, 0, 1, 3, 0, 0, 1, 2, 2, 1, 0, 1, 0, 3, 2};
    tokens.insert(tokens.end(), {0, target});
    const Dataset data{tokens, vocab, false};
    REQUIRE(data.held_out().size() == 2);
    total += std::exp(-data.bigram_loss(1, 1));
  }
  CHECK(total == doctest::Approx(1));
}

TEST_CASE("the fingerprint tells data apart") {
  const std::vector<Token> tokens = counting(1000, 97);
  const std::uint64_t fingerprint = Dataset{tokens, 97, false}.fingerprint();
  CHECK(fingerprint == Dataset{tokens, 256, true}.fingerprint());
  for (const std::size_t i : {0u, 500u, 999u}) {
    std::vector<Token> other = tokens;
    other[i] ^= 1;
    CHECK(fingerprint != Dataset{other, 256, false}.fingerprint());
  }
  CHECK(fingerprint != Dataset{counting(999, 97), 97, false}.fingerprint());
  CHECK(Dataset{{0}, 1, false}.fingerprint() != Dataset{{0, 0}, 1, false}.fingerprint());
}
