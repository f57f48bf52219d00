// The trainer's checkpoint file: what goes in comes out, anything else is refused, and a failed write harms nothing.
#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "gpt/checkpoint_file.hpp"
#include "gpt/options.hpp"
#include "hbmoff/core/error.hpp"

namespace fs = std::filesystem;
using gpt::BadInput;
using gpt::CheckpointReader;
using gpt::CheckpointWriter;
using hbmoff::bf16;
using hbmoff::DType;
using nlohmann::json;

namespace {

struct Scratch {
  fs::path path = fs::temp_directory_path() / ("gpt_checkpoint_file_test." + std::to_string(::getpid()));
  Scratch() { fs::create_directories(path); }
  ~Scratch() { fs::remove_all(path); }
};

std::string content(const fs::path& file) {
  std::ifstream stream{file, std::ios::binary};
  return {std::istreambuf_iterator<char>{stream}, {}};
}

void write_file(const fs::path& file, const std::string& bytes) {
  std::ofstream{file, std::ios::binary}.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

const json header = {{"step", 12345678901234567890u}, {"options", {{"lr", 0.1}, {"data", "a b.txt"}}}};
const std::vector<float> weights = {1.5f, -0.0f, 3e-42f, 7.0f, -2.0f};
const std::vector<bf16> small = {bf16{0x3f80}, bf16{0x7fff}, bf16{1}};

void save(const fs::path& file, const json& with = header) {
  CheckpointWriter writer{file};
  writer.add<float>("wte", weights);
  writer.add<bf16>("h.0.attn", small);
  writer.add<float>("empty", {});
  const hbmoff::Bytes size = writer.commit(with);
  CHECK(size.count() == fs::file_size(file));
}

// The message with which the file is refused; empty when it opens.
std::string refusal(const fs::path& file) {
  try {
    CheckpointReader reader{file};
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

bool names(const std::string& message, std::string_view what) {
  return message.find(what) != std::string::npos && message.find('\n') == std::string::npos;
}

// A file with a right checksum around any JSON.
std::string forged(const std::string& text, std::uint64_t version = 1) {
  const auto append = [](std::string& to, std::uint64_t value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  std::string bytes = "HBMGPT\r\n";
  append(bytes, version);
  bytes += text;
  append(bytes, text.size());
  append(bytes, ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  return bytes;
}

}  // namespace

TEST_CASE("what was saved is read back, bit by bit") {
  const Scratch scratch;
  const fs::path file = scratch.path / "a.ckpt";
  save(file);
  const CheckpointReader reader{file};
  CHECK(reader.header() == header);
  CHECK(reader.tensors().size() == 3);
  std::vector<float> read_weights(weights.size());
  std::vector<bf16> read_small(small.size());
  reader.read<float>("wte", read_weights);
  reader.read<bf16>("h.0.attn", read_small);
  reader.read<float>("empty", {});
  CHECK(std::memcmp(read_weights.data(), weights.data(), weights.size() * sizeof(float)) == 0);
  CHECK(read_small == small);
  for (const CheckpointReader::Tensor& tensor : reader.tensors()) CHECK(tensor.offset % 64 == 0);

  std::vector<float> part(2);
  reader.read<float>("wte", part, 3);
  CHECK(part == std::vector<float>{7.0f, -2.0f});
  CHECK(!fs::exists(scratch.path / "a.ckpt.partial"));
}

TEST_CASE("a tensor that is not there as asked for is refused") {
  const Scratch scratch;
  const fs::path file = scratch.path / "a.ckpt";
  save(file);
  const CheckpointReader reader{file};
  std::vector<float> room(6);
  const std::span<float> all{room};
  CHECK_THROWS_AS(reader.read<float>("wpe", all.first(5)), BadInput);
  CHECK_THROWS_AS(reader.read<float>("wte", all), BadInput);
  CHECK_THROWS_AS(reader.read<float>("wte", all.first(5), 1), BadInput);
  CHECK_THROWS_AS(reader.read<float>("wte", all.first(1), ~std::uint64_t{0}), BadInput);
  CHECK_THROWS_AS(reader.read<float>("h.0.attn", all.first(3)), BadInput);
  CHECK(reader.require("wte", DType::fp32, 5).count == 5);
  CHECK_THROWS_AS(reader.require("wte", DType::fp32, 4), BadInput);
  CHECK_THROWS_AS(reader.require("wte", DType::bf16, 5), BadInput);
  CHECK_THROWS_AS(reader.require("wt", DType::fp32, 5), BadInput);
}

TEST_CASE("pieces of any size give the same file as a whole") {
  const Scratch scratch;
  std::vector<float> large(1'000'003);  // several times what is buffered
  std::iota(large.begin(), large.end(), 0.0f);
  const auto bytes = std::as_bytes(std::span{large});
  std::string whole;
  for (const std::size_t piece :
       {bytes.size(), std::size_t{1} << 20, std::size_t{12'345}, (std::size_t{1} << 21) + 1}) {
    const fs::path file = scratch.path / "a.ckpt";
    CheckpointWriter writer{file};
    writer.add<bf16>("first", small);
    writer.begin("large", DType::fp32, large.size());
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      writer.append(bytes.subspan(at, std::min(piece, bytes.size() - at)));
    }
    writer.add<float>("last", weights);
    writer.commit(header);
    if (whole.empty()) whole = content(file);
    CHECK(content(file) == whole);
  }
  std::vector<float> read(large.size());
  CheckpointReader{scratch.path / "a.ckpt"}.read<float>("large", read);
  CHECK(read == large);
}

TEST_CASE("the same state gives the same file, wherever and whenever it is saved") {
  const Scratch scratch;
  save(scratch.path / "a.ckpt");
  save(scratch.path / "other name");
  CHECK(content(scratch.path / "a.ckpt") == content(scratch.path / "other name"));
  save(scratch.path / "other name", {{"step", 1}});
  CHECK(content(scratch.path / "a.ckpt") != content(scratch.path / "other name"));
  save(scratch.path / "other name");
  CHECK(content(scratch.path / "a.ckpt") == content(scratch.path / "other name"));
}

TEST_CASE("a file cut anywhere, or with any byte altered, is refused") {
  const Scratch scratch;
  const fs::path file = scratch.path / "a.ckpt";
  save(file);
  const std::string whole = content(file);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_file(file, whole.substr(0, length));
    CHECK(names(refusal(file), file.string()));
  }
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string altered = whole;
    altered[i] = static_cast<char>(altered[i] ^ (1 << i % 8));
    write_file(file, altered);
    CHECK(names(refusal(file), file.string()));
  }
  write_file(file, whole + '\0');
  CHECK(names(refusal(file), "damaged"));
  write_file(file, whole.substr(0, whole.size() / 2));
  CHECK(names(refusal(file), "damaged: truncated or altered"));
  write_file(file, whole);
  CHECK(refusal(file) == "");
}

TEST_CASE("a foreign file is refused, and so is one whose index lies") {
  const Scratch scratch;
  const fs::path file = scratch.path / "a.ckpt";
  CHECK(names(refusal(scratch.path / "missing"), "missing"));
  CHECK(names(refusal(scratch.path), "not a regular file"));
  CHECK(names(refusal("/dev/zero"), "not a regular file"));
  write_file(file, "");
  CHECK(names(refusal(file), "is not a file that train_gpt saved"));
  write_file(file, std::string(10000, 'x'));
  CHECK(names(refusal(file), "is not a file that train_gpt saved"));
  write_file(file, forged(R"({"header": {}, "tensors": []})"));
  CHECK(refusal(file) == "");
  write_file(file, forged(R"({"header": {}, "tensors": []})", 2));
  CHECK(names(refusal(file), "format version 2"));
  for (const std::string text :
       {"", "x", "[]", "{}", R"({"header": {}})", R"({"header": {}, "tensors": [{}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp64", "count": 0, "offset": 16}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp32", "count": 1, "offset": 16}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp32", "count": 0, "offset": 17}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp32", "count": 0, "offset": 0}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp32", "count": -1, "offset": 16}]})",
        R"({"header": {}, "tensors": [{"name": "a", "dtype": "fp32", "count": 4611686018427387904, "offset": 16}]})"}) {
    CAPTURE(text);
    write_file(file, forged(text));
    CHECK(names(refusal(file), file.string()));
  }
}

TEST_CASE("a write that fails leaves the previous file as it was, and nothing beside it") {
  const Scratch scratch;
  const fs::path file = scratch.path / "a.ckpt";
  save(file);
  const std::string before = content(file);

  // Files may not grow past 1.5 MiB for a while: writing then fails as on a full disk.
  struct rlimit usual{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &usual) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit low = {3u << 19, usual.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &low) == 0);
  const std::vector<float> large(1u << 20);
  {
    CheckpointWriter writer{file};
    CHECK_THROWS_AS(writer.add<float>("large", large), hbmoff::IoError);
  }
  {
    CheckpointWriter writer{file};  // fails in the middle of what was buffered, at the end
    writer.begin("large", DType::fp32, 400'000);
    for (int i = 0; i < 400; ++i) writer.append(std::as_bytes(std::span{large}.first(1000)));
    CHECK_THROWS_AS(writer.commit(header), hbmoff::IoError);
  }
  ::setrlimit(RLIMIT_FSIZE, &usual);
  std::signal(SIGXFSZ, handler);
  CHECK(content(file) == before);
  CHECK(!fs::exists(scratch.path / "a.ckpt.partial"));

  {  // not committed
    CheckpointWriter writer{file};
    writer.add<float>("wte", weights);
  }
  CHECK(content(file) == before);
  CHECK(!fs::exists(scratch.path / "a.ckpt.partial"));
  CHECK_THROWS_AS(CheckpointWriter{scratch.path / "no folder" / "a.ckpt"}, hbmoff::IoError);
  CHECK_THROWS_AS(CheckpointWriter{"/dev/null"}, hbmoff::IoError);
  CHECK(fs::is_character_file("/dev/null"));
}

TEST_CASE("what a killed run left beside the file is no hindrance") {
  const Scratch scratch;
  write_file(scratch.path / "a.ckpt.partial", std::string(100'000, 'x'));
  save(scratch.path / "a.ckpt");
  save(scratch.path / "b.ckpt");
  CHECK(content(scratch.path / "a.ckpt") == content(scratch.path / "b.ckpt"));
}

TEST_CASE("through a link the file behind it is replaced") {
  const Scratch scratch;
  save(scratch.path / "real", {{"step", 1}});
  fs::create_symlink("real", scratch.path / "link");
  save(scratch.path / "link");
  CHECK(fs::is_symlink(scratch.path / "link"));
  CHECK(CheckpointReader{scratch.path / "real"}.header() == header);
}

TEST_CASE("misuse is an error, not a bad file") {
  const Scratch scratch;
  CheckpointWriter writer{scratch.path / "a.ckpt"};
  CHECK_THROWS_AS(writer.append(std::as_bytes(std::span{weights})), hbmoff::InvalidArgument);
  writer.begin("a", DType::fp32, 6);
  writer.append(std::as_bytes(std::span{weights}));
  CHECK_THROWS_AS(writer.append(std::as_bytes(std::span{weights})), hbmoff::InvalidArgument);
  CHECK_THROWS_AS(writer.begin("b", DType::fp32, 1), hbmoff::InvalidArgument);
  CHECK_THROWS_AS(writer.commit(header), hbmoff::InvalidArgument);
  writer.append(std::as_bytes(std::span{weights}.first(1)));
  CHECK_THROWS_AS(writer.begin("a", DType::fp32, 1), hbmoff::InvalidArgument);
  writer.commit(header);
  CHECK_THROWS_AS(writer.commit(header), hbmoff::InvalidArgument);
  std::vector<float> read(6);
  CheckpointReader{scratch.path / "a.ckpt"}.read<float>("a", read);
  CHECK(read[5] == 1.5f);
}

TEST_CASE("where nothing can be saved is told before training") {
  const Scratch scratch;
  const auto told = [](const fs::path& file) -> std::string {
    try {
      gpt::check_saveable(file);
    } catch (const BadInput& error) {
      return error.what();
    }
    return "";
  };
  CHECK(told(scratch.path / "new.ckpt") == "");
  save(scratch.path / "a.ckpt");
  CHECK(told(scratch.path / "a.ckpt") == "");
  CHECK(names(told(scratch.path / "no folder" / "a.ckpt"), "there is no folder"));
  CHECK(names(told(scratch.path), "not a regular file"));
  CHECK(names(told(scratch.path / ""), "not a regular file"));
  CHECK(names(told("/dev/null"), "not a regular file"));
  CHECK(names(told("/proc/a.ckpt"), "--save: /proc/a.ckpt"));
}
