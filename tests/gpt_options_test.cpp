// The trainer's command line: what is taken, what is refused, what a saved file keeps.
#include <doctest/doctest.h>

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "gpt/options.hpp"

using namespace hbmoff::literals;
using gpt::BadInput;
using gpt::Options;
using gpt::parse_bytes;

namespace {

Options parse(std::initializer_list<const char*> arguments, bool with_data = true) {
  std::vector<const char*> argv{"train_gpt"};
  if (with_data) argv.insert(argv.end(), {"--data", "x.txt"});
  argv.insert(argv.end(), arguments);
  std::ostringstream out;
  return gpt::parse_options(static_cast<int>(argv.size()), argv.data(), out).value();
}

Options checked(std::initializer_list<const char*> arguments) {
  Options options = parse(arguments);
  if (options.vocab == 0) options.vocab = 256;
  gpt::check(options);
  return options;
}

// The message with which the arguments are refused; empty when they are taken.
std::string refusal(std::initializer_list<const char*> arguments) {
  try {
    checked(arguments);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

bool names(const std::string& message, std::string_view what) {
  return message.find(what) != std::string::npos && message.find('\n') == std::string::npos;
}

}  // namespace

TEST_CASE("byte sizes are read exactly") {
  CHECK(parse_bytes("1", "--hbm") == 1_B);
  CHECK(parse_bytes("4096", "--hbm") == 4096_B);
  CHECK(parse_bytes("4096B", "--hbm") == 4096_B);
  CHECK(parse_bytes("64KiB", "--hbm") == 64_KiB);
  CHECK(parse_bytes("1.5GiB", "--hbm") == 1536_MiB);
  CHECK(parse_bytes("007MiB", "--hbm") == 7_MiB);
  CHECK(parse_bytes("0.5KiB", "--hbm") == 512_B);
  CHECK(parse_bytes("2.000B", "--hbm") == 2_B);
  CHECK(parse_bytes("0.0009765625KiB", "--hbm") == 1_B);
  CHECK(parse_bytes("1.0000000000009094947017729282379150390625TiB", "--hbm") == 1_TiB + 1_B);  // 2^-40
  CHECK(parse_bytes("9223372036854775807", "--hbm").count() == 9223372036854775807u);
  CHECK(parse_bytes("8388607.99999904632568359375TiB", "--hbm").count() == (std::uint64_t{1} << 63) - (1u << 20));
}

TEST_CASE("what is no byte size is refused, in one line that names the option") {
  for (const char* text : {"",
                           "0",
                           "0MiB",
                           "0.0",
                           "-1",
                           "+1",
                           "-4KiB",
                           "1.",
                           ".5GiB",
                           "1.2.3KiB",
                           "KiB",
                           "1 KiB",
                           " 1",
                           "1 ",
                           "1KB",
                           "1kib",
                           "1Ki",
                           "1e6",
                           "0x10",
                           "1.5",
                           "1.3KiB",
                           "0.1GiB",
                           "nan",
                           "inf",
                           "9223372036854775808",
                           "18446744073709551615",
                           "18446744073709551616",
                           "99999999999999999999999999",
                           "8388608TiB",
                           "17179869184TiB",
                           "36028797018963968KiB",
                           "18014398509481985KiB",
                           "0.00048828125KiB",
                           "1,5GiB",
                           "12MiB4"}) {
    CAPTURE(text);
    std::string message;
    try {
      static_cast<void>(parse_bytes(text, "--page"));
    } catch (const BadInput& error) {
      message = error.what();
    }
    CHECK(names(message, "--page"));
    CHECK(names(message, text));
  }
}

TEST_CASE("a formatted byte size reads back as itself") {
  std::uint64_t bits = 1;
  for (int i = 0; i < 200; ++i) {
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    const hbmoff::Bytes bytes{(bits >> (1 + i % 62)) << (i % 41) & ~(std::uint64_t{1} << 63)};
    if (bytes.count() == 0) continue;
    CHECK(parse_bytes(gpt::format_bytes(bytes), "--hbm") == bytes);
  }
  CHECK(gpt::format_bytes(96_MiB) == "96MiB");
  CHECK(gpt::format_bytes(1536_MiB) == "1536MiB");
  CHECK(gpt::format_bytes(4097_B) == "4097");
}

TEST_CASE("every option reaches its field") {
  const Options o = checked({"--vocab",         "300",     "--layers",       "12",
                             "--channels",      "96",      "--heads",        "6",
                             "--context",       "32",      "--batch",        "3",
                             "--micro-batches", "2",       "--steps",        "7",
                             "--decay-steps",   "9",       "--lr",           "0.25",
                             "--warmup",        "0",       "--weight-decay", "0",
                             "--clip",          "0.5",     "--seed",         "18446744073709551615",
                             "--threads",       "2",       "--dtype",        "bf16",
                             "--hbm",           "1.5GiB",  "--offload",      "activations",
                             "--keep-last",     "2",       "--recompute",    "3",
                             "--page",          "64KiB",   "--depth",        "4",
                             "--link-gbps",     "12.5",    "--save",         "a.ckpt",
                             "--save-every",    "5",       "--resume",       "b.ckpt",
                             "--log",           "c.jsonl", "--sample",       "10",
                             "--eval-every",    "4",       "--eval-batches", "6",
                             "--summary",       "json"});
  CHECK(o.data == "x.txt");
  CHECK(o.vocab == 300);
  CHECK(o.layers == 12);
  CHECK(o.channels == 96);
  CHECK(o.heads == 6);
  CHECK(o.context == 32);
  CHECK(o.batch == 3);
  CHECK(o.micro_batches == 2);
  CHECK(o.steps == 7);
  CHECK(o.decay_steps == 9);
  CHECK(o.learning_rate == 0.25);
  CHECK(o.warmup == 0);
  CHECK(o.weight_decay == 0);
  CHECK(o.clip == 0.5);
  CHECK(o.seed == ~std::uint64_t{0});
  CHECK(o.threads == 2);
  CHECK(o.dtype == hbmoff::DType::bf16);
  CHECK(o.hbm == 1536_MiB);
  CHECK(o.offload == gpt::Offload::activations);
  CHECK(o.keep_last == 2);
  CHECK(o.recompute == 3);
  CHECK(o.page == 64_KiB);
  CHECK(o.depth == 4);
  CHECK(o.link_gbps == 12.5);
  CHECK(o.save == "a.ckpt");
  CHECK(o.save_every == 5);
  CHECK(o.resume == "b.ckpt");
  CHECK(o.log == "c.jsonl");
  CHECK(o.sample == 10);
  CHECK(o.eval_every == 4);
  CHECK(o.eval_batches == 6);
  CHECK(o.summary_json);
}

TEST_CASE("the decay horizon is the number of steps unless given") {
  CHECK(checked({"--steps", "37"}).decay_steps == 37);
  CHECK(checked({}).decay_steps == checked({}).steps);
}

TEST_CASE("a preset sets the shape; what stands beside it wins on either side") {
  const Options gpt2 = checked({"--model", "gpt2"});
  CHECK(gpt2.layers == 12);
  CHECK(gpt2.channels == 768);
  CHECK(gpt2.heads == 12);
  CHECK(gpt2.context == 1024);
  CHECK(gpt2.vocab == 50257);
  CHECK(gpt2.batch == 1);
  CHECK(checked({"--model", "gpt2-medium"}).layers == 24);
  CHECK(checked({"--model", "gpt2-large"}).layers == 36);
  CHECK(checked({"--model", "gpt2-xl"}).layers == 48);
  CHECK(checked({"--layers", "2", "--model", "gpt2"}).layers == 2);
  CHECK(checked({"--model", "gpt2", "--batch", "4"}).batch == 4);
  CHECK(names(refusal({"--model", "gpt3"}), "--model: 'gpt3'"));
}

TEST_CASE("bad options are refused by name, in one line") {
  CHECK(refusal({}) == "");
  CHECK(names(refusal({"--nonsense", "1"}), "--nonsense"));
  CHECK(names(refusal({"stray"}), "stray"));
  CHECK(names(refusal({"--layers"}), "--layers"));
  CHECK(checked({"--layers", "2", "--layers", "3"}).layers == 3);  // the last one counts
  CHECK(names(refusal({"--channels", "10", "--heads", "4"}), "--heads: 4 does not divide --channels 10"));
  for (const char* name : {"--layers", "--channels", "--heads", "--context", "--batch", "--micro-batches", "--steps",
                           "--decay-steps", "--vocab", "--threads", "--depth", "--page", "--hbm", "--eval-batches"}) {
    for (const char* value :
         {"0", "-1", "-0", "+1", "1.5", "x", "", "4e2", "18446744073709551616", "99999999999999999999999"}) {
      CAPTURE(name);
      CAPTURE(value);
      CHECK(names(refusal({name, value}), name));
    }
  }
  for (const char* name : {"--lr", "--weight-decay", "--clip", "--link-gbps"}) {
    for (const char* value : {"-1", "-0.0", "nan", "inf", "-inf", "1e999", "1e31", "", "0.1x", "0x1p3"}) {
      CAPTURE(name);
      CAPTURE(value);
      CHECK(names(refusal({name, value}), name));
    }
  }
  CHECK(names(refusal({"--link-gbps", "0"}), "--link-gbps"));
  CHECK(names(refusal({"--vocab", "65537"}), "--vocab"));
  CHECK(names(refusal({"--dtype", "fp16"}), "--dtype"));
  CHECK(names(refusal({"--offload", "everything"}), "--offload"));
  CHECK(names(refusal({"--summary", "xml"}), "--summary"));
  CHECK(names(refusal({"--keep-last", "5"}), "--keep-last"));
  CHECK(names(refusal({"--recompute", "5"}), "--recompute"));
  CHECK(names(refusal({"--save-every", "5"}), "--save"));
  CHECK(names(refusal({"--save", "a", "--save-every", "-1"}), "--save-every"));
  CHECK(names(refusal({"--eval-every", "x"}), "--eval-every"));
  CHECK(refusal({"--save-every", "0", "--eval-every", "0"}) == "");
  CHECK(names(refusal({"--save", ""}), "--save"));
}

TEST_CASE("sizes whose product overflows are refused") {
  CHECK(names(refusal({"--layers", "1048576", "--channels", "1048576", "--heads", "1"}), "4 EiB"));
  CHECK(names(refusal({"--context", "1048576", "--batch", "1048576", "--layers", "1048576"}), "4 EiB"));
  CHECK(refusal({"--layers", "126", "--channels", "16384", "--heads", "128", "--context", "8192"}) == "");
}

TEST_CASE("a page is neither smaller than its parts nor so small that pages are without number") {
  CHECK(refusal({"--page", "1KiB"}) == "");
  CHECK(names(refusal({"--page", "1023"}), "--page: 1023 is less than 1KiB"));
  CHECK(names(refusal({"--page", "1KiB", "--model", "gpt2-xl"}), "--page: 1KiB would cut"));
  CHECK(refusal({"--page", "64KiB", "--model", "gpt2-xl"}) == "");
}

TEST_CASE("data is needed, except when resuming") {
  CHECK_THROWS_AS(parse({}, false), BadInput);
  CHECK(parse({"--resume", "a"}, false).data == "");
}

TEST_CASE("help and version go to the stream given") {
  for (const char* flag : {"--help", "--version"}) {
    const char* argv[] = {"train_gpt", flag};
    std::ostringstream out;
    CHECK(!gpt::parse_options(2, argv, out));
    CHECK(out.str().find("train_gpt") != std::string::npos);
    if (flag == std::string_view{"--help"}) CHECK(out.str().find("--link-gbps") != std::string::npos);
  }
}

TEST_CASE("a resumed run takes from the file what the command line does not give") {
  const Options first = checked({"--layers", "6", "--lr", "0.003", "--seed", "12345678901234567890", "--steps", "5",
                                 "--decay-steps", "10", "--dtype", "bf16", "--page", "1MiB", "--offload", "all"});
  const nlohmann::json saved = nlohmann::json::parse(gpt::saved_options(first).dump());

  Options second = parse({"--resume", "a.ckpt"}, false);
  gpt::adopt_saved(second, saved, first.decay_steps);
  gpt::check(second);
  CHECK(gpt::saved_options(second) == saved);
  CHECK(second.data == "x.txt");
  CHECK(second.layers == 6);
  CHECK(second.learning_rate == 0.003);
  CHECK(second.seed == 12345678901234567890u);
  CHECK(second.dtype == hbmoff::DType::bf16);
  CHECK(second.decay_steps == 10);
  CHECK(second.steps == 10);  // to the horizon
  CHECK(second.offload == gpt::Offload::none);  // where state lives is no part of the file

  Options longer = parse({"--resume", "a.ckpt", "--steps", "20", "--lr", "0.001", "--layers", "6"}, false);
  gpt::adopt_saved(longer, saved, first.decay_steps);
  CHECK(longer.steps == 20);
  CHECK(longer.decay_steps == 10);
  CHECK(longer.learning_rate == 0.001);
}

TEST_CASE("where state lives, and what comes out, leaves no trace in a saved file") {
  const auto saved = [](std::initializer_list<const char*> arguments) {
    return gpt::saved_options(checked(arguments));
  };
  CHECK(saved({}) == saved({"--offload",    "all", "--hbm",       "1GiB", "--page",       "64KiB", "--depth",     "2",
                            "--threads",    "2",   "--keep-last", "1",    "--recompute",  "1",     "--link-gbps", "10",
                            "--log",        "l",   "--save",      "s",    "--save-every", "3",     "--sample",    "4",
                            "--eval-every", "2",   "--summary",   "json", "--steps",      "3"}));
  CHECK(saved({}) != saved({"--seed", "2"}));
}

TEST_CASE("a command line that contradicts the file is refused") {
  const nlohmann::json saved = gpt::saved_options(checked({}));
  const auto adopt = [&](std::initializer_list<const char*> arguments, nlohmann::json from) -> std::string {
    Options options = parse(arguments);
    try {
      gpt::adopt_saved(options, from, 10);
    } catch (const BadInput& error) {
      return error.what();
    }
    return "";
  };
  CHECK(adopt({"--resume", "a"}, saved) == "");
  CHECK(names(adopt({"--resume", "a", "--layers", "5"}, saved), "layers 4, not 5"));
  CHECK(names(adopt({"--resume", "a", "--seed", "2"}, saved), "seed 1, not 2"));
  CHECK(names(adopt({"--resume", "a", "--dtype", "bf16"}, saved), "dtype fp32, not bf16"));
  CHECK(names(adopt({"--resume", "a", "--model", "gpt2"}, saved), "vocab"));

  // What is not such a file's options is refused, not misread.
  nlohmann::json broken = saved;
  broken["layers"] = -4;
  CHECK(names(adopt({"--resume", "a"}, broken), "layers"));
  broken["layers"] = "4";
  CHECK(names(adopt({"--resume", "a"}, broken), "layers"));
  broken.erase("layers");
  CHECK(names(adopt({"--resume", "a"}, broken), "layers"));
  broken = saved;
  broken["dtype"] = "fp64";
  CHECK(names(adopt({"--resume", "a"}, broken), "dtype"));
  CHECK(names(adopt({"--resume", "a"}, nlohmann::json::array()), "a: "));
}
