// The command line of train_gpt.
#include "options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <ostream>
#include <system_error>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint_file.hpp"
#include "data.hpp"
#include "hbmoff/core/version.hpp"

namespace gpt {
namespace {

namespace fs = std::filesystem;
using hbmoff::Bytes;
using hbmoff::DType;

struct Preset {
  std::string_view name;
  std::uint64_t layers, channels, heads;
  double learning_rate;
};
// The sizes of the GPT-2 family; the learning rates are GPT-3's for models of these sizes.
constexpr Preset presets[] = {{"gpt2", 12, 768, 12, 6e-4},
                              {"gpt2-medium", 24, 1024, 16, 3e-4},
                              {"gpt2-large", 36, 1280, 20, 2.5e-4},
                              {"gpt2-xl", 48, 1600, 25, 2e-4}};
constexpr std::uint64_t gpt2_vocab = 50257, gpt2_context = 1024;

constexpr std::uint64_t largest_dimension = 1u << 20;
constexpr Bytes least_page{1024};
constexpr std::uint64_t most_pages = 1 << 22;  // each takes some 100 bytes of bookkeeping
constexpr std::uint64_t largest_count = std::uint64_t{1} << 40;  // steps, tokens to sample

[[noreturn]] void refuse(std::string_view option, std::string_view text, const std::string& expected) {
  throw BadInput{std::string{option} + ": '" + std::string{text} + "' is not " + expected};
}

std::uint64_t parse_count(std::string_view text, std::string_view option, std::uint64_t least, std::uint64_t most) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size() || value < least || value > most) {
    refuse(option, text, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

// A finite number, not negative; `positive`: nor zero.
double parse_real(std::string_view text, std::string_view option, bool positive) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  // The bound keeps the value inside fp32, which is what the optimizer takes.
  if (text.empty() || error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value) ||
      std::signbit(value) || value > 1e30 || (positive && value == 0)) {
    refuse(option, text, positive ? "a number above 0" : "a number, 0 or more");
  }
  return value;
}

template <class T>
T parse_choice(std::string_view text, std::string_view option, std::initializer_list<T> choices) {
  std::string expected = "one of";
  for (const T choice : choices) {
    if (text == to_string(choice)) return choice;
    expected += " " + std::string{to_string(choice)};
  }
  refuse(option, text, expected);
}

void apply_preset(Options& options, std::string_view name) {
  const auto preset = std::ranges::find(presets, name, &Preset::name);
  if (preset == std::end(presets)) refuse("--model", name, "one of gpt2 gpt2-medium gpt2-large gpt2-xl");
  options.model = name;
  options.vocab = gpt2_vocab;
  options.context = gpt2_context;
  options.batch = 1;
  options.layers = preset->layers;
  options.channels = preset->channels;
  options.heads = preset->heads;
  options.learning_rate = preset->learning_rate;
  options.given.insert({"model", "vocab", "context", "batch", "layers", "channels", "heads", "lr"});
}

// One option: its flag, what its value is called and means, and how the value gets into the options.
struct Flag {
  std::string name;
  std::string value;
  std::string help;
  std::function<void(Options&, std::string_view)> apply;
  std::string text = {};  // the value on the command line
};

// One that takes no value.
Flag switch_flag(const char* name, bool Options::* field, const char* help) {
  return {name, "", help, [=](Options& options, std::string_view) { options.*field = true; }};
}

Flag count_flag(const char* name, std::uint64_t Options::* field, std::uint64_t least, std::uint64_t most,
                const char* help) {
  return {name, "N", help,
          [=](Options& options, std::string_view text) { options.*field = parse_count(text, name, least, most); }};
}

Flag real_flag(const char* name, double Options::* field, bool positive, const char* help) {
  return {name, "X", help,
          [=](Options& options, std::string_view text) { options.*field = parse_real(text, name, positive); }};
}

Flag path_flag(const char* name, std::string Options::* field, const char* help) {
  return {name, "PATH", help, [=](Options& options, std::string_view text) {
            if (text.empty()) throw BadInput{std::string{name} + ": the path is empty"};
            options.*field = text;
          }};
}

std::vector<Flag> make_flags() {
  constexpr std::uint64_t any = ~std::uint64_t{0};
  std::vector<Flag> flags;
  flags.push_back(path_flag("--data", &Options::data,
                            "text file or folder of text (a token is a byte), or llm.c .bin token shard(s)"));
  flags.push_back({"--model", "NAME",
                   "preset: gpt2, gpt2-medium, gpt2-large, gpt2-xl (with context 1024, vocab 50257, batch 1)",
                   [](Options&, std::string_view) {}});  // applied before all others
  flags.push_back(count_flag("--vocab", &Options::vocab, 1, 65536, "number of tokens [256 for text, 50257 for .bin]"));
  flags.push_back(count_flag("--layers", &Options::layers, 1, largest_dimension, "transformer blocks [4]"));
  flags.push_back(count_flag("--channels", &Options::channels, 1, largest_dimension, "a multiple of the heads [128]"));
  flags.push_back(count_flag("--heads", &Options::heads, 1, largest_dimension, "attention heads [4]"));
  flags.push_back(count_flag("--context", &Options::context, 1, largest_dimension, "tokens per sequence [64]"));
  flags.push_back(count_flag("--batch", &Options::batch, 1, largest_dimension, "sequences per micro-batch [12]"));
  flags.push_back(count_flag("--micro-batches", &Options::micro_batches, 1, largest_dimension,
                             "micro-batches summed per step [1]"));
  flags.push_back(count_flag("--steps", &Options::steps, 1, largest_count,
                             "in total, resumed steps included [200; resumed: the decay horizon]"));
  flags.push_back(count_flag("--decay-steps", &Options::decay_steps, 1, largest_count,
                             "horizon of the learning rate's cosine decay [--steps]"));
  flags.push_back(real_flag("--lr", &Options::learning_rate, false, "peak learning rate [0.001]"));
  flags.push_back(count_flag("--warmup", &Options::warmup, 0, largest_count, "steps of linear warm-up [20]"));
  flags.push_back(real_flag("--weight-decay", &Options::weight_decay, false, "on matrices [0.1]"));
  flags.push_back(real_flag("--clip", &Options::clip, false, "largest gradient norm, 0: no clipping [1]"));
  flags.push_back(count_flag("--seed", &Options::seed, 0, any, "fixes everything [1]"));
  flags.push_back({"--dtype", "TYPE", "fp32 or bf16: weights, gradients, activations [fp32]",
                   [](Options& options, std::string_view text) {
                     options.dtype = parse_choice(text, "--dtype", {DType::fp32, DType::bf16});
                   }});
  flags.push_back(
      count_flag("--threads", &Options::threads, 1, 1024, "CPU threads; no bit depends on it [all, up to 16]"));
  flags.push_back({"--hbm", "BYTES", "limit of device memory, e.g. 96MiB or 1.5GiB [what the run takes]",
                   [](Options& options, std::string_view text) { options.hbm = parse_bytes(text, "--hbm"); }});
  flags.push_back(
      {"--offload", "WHAT", "none, optimizer, activations or all [none]", [](Options& options, std::string_view text) {
         options.offload =
             parse_choice(text, "--offload", {Offload::none, Offload::optimizer, Offload::activations, Offload::all});
       }});
  flags.push_back(count_flag("--keep-last", &Options::keep_last, 0, largest_dimension,
                             "last layers whose activations stay in HBM [0]"));
  flags.push_back(count_flag("--recompute", &Options::recompute, 0, largest_dimension,
                             "first layers whose activations are computed again in backward [0]"));
  flags.push_back({"--page", "BYTES", "the optimizer's page [8MiB]",
                   [](Options& options, std::string_view text) { options.page = parse_bytes(text, "--page"); }});
  flags.push_back({"--depth", "N", "page slots in HBM [3]", [](Options& options, std::string_view text) {
                     options.depth = static_cast<std::uint32_t>(parse_count(text, "--depth", 1, 1024));
                   }});
  flags.push_back(switch_flag("--share-slots", &Options::share_slots,
                              "with --offload all: optimizer and activations share depth + 1 slots"));
  flags.push_back(real_flag("--link-gbps", &Options::link_gbps, true,
                            "model a link of so many 10^9 bytes/s in each direction [as fast as it goes]"));
  flags.push_back(path_flag("--save", &Options::save, "file to save to at the end and on Ctrl-C"));
  flags.push_back(
      count_flag("--save-every", &Options::save_every, 0, largest_count, "also save every N steps [0: no]"));
  flags.push_back(path_flag("--resume", &Options::resume, "go on from a saved file; what is not given comes from it"));
  flags.push_back(path_flag("--log", &Options::log, "file for a JSON line per step"));
  flags.push_back(count_flag("--sample", &Options::sample, 0, largest_count, "tokens to sample at the end [0]"));
  flags.push_back(count_flag("--eval-every", &Options::eval_every, 0, largest_count,
                             "also evaluate on the held-out tenth every N steps [0: no]"));
  flags.push_back(count_flag("--eval-batches", &Options::eval_batches, 1, largest_count,
                             "batches of the held-out tenth that an evaluation looks at [20]"));
  flags.push_back(switch_flag("--check", &Options::check,
                              "prove the order of all memory accesses while training; slower, same result"));
  flags.push_back(
      {"--summary", "json", "print one JSON object as the last line", [](Options& options, std::string_view text) {
         if (text != "json") refuse("--summary", text, "json");
         options.summary_json = true;
       }});
  return flags;
}

// "--micro-batches" is micro_batches in a saved file.
std::string saved_name(std::string_view flag) {
  std::string name{flag.substr(2)};
  std::ranges::replace(name, '-', '_');
  return name;
}

// Calls visit(name, field) for all that a saved file keeps.
template <class Opts, class Visit>
void for_each_saved(Opts& options, Visit visit) {
  visit("data", options.data);
  visit("model", options.model);
  visit("vocab", options.vocab);
  visit("layers", options.layers);
  visit("channels", options.channels);
  visit("heads", options.heads);
  visit("context", options.context);
  visit("batch", options.batch);
  visit("micro_batches", options.micro_batches);
  visit("lr", options.learning_rate);
  visit("warmup", options.warmup);
  visit("weight_decay", options.weight_decay);
  visit("clip", options.clip);
  visit("seed", options.seed);
  visit("dtype", options.dtype);
}

// What cannot change between two halves of one run.
constexpr std::array fixed_names = {"vocab", "layers", "channels", "heads", "context", "seed", "dtype"};

template <class T>
T from_json(const nlohmann::json& value) {
  if constexpr (std::same_as<T, DType>) {
    return parse_choice(value.get<std::string>(), "dtype", {DType::fp32, DType::bf16});
  } else if constexpr (std::same_as<T, std::uint64_t>) {
    if (!value.is_number_unsigned()) throw BadInput{"a number is negative or not whole"};
    return value.get<T>();
  } else {
    return value.get<T>();
  }
}

// Rough and on the large side, in double, where nothing wraps around.
double most_parameters(const Options& options) {
  const double channels = static_cast<double>(options.channels), layers = static_cast<double>(options.layers);
  return (static_cast<double>(options.vocab) + static_cast<double>(options.context)) * channels +
         layers * (13 * channels * channels + 16 * channels);
}

// The file that opening `path` would open or make, under one name: links are followed, the last one too where nothing
// is behind it.
fs::path target_of(const fs::path& path) {
  std::error_code error;
  fs::path target = path;
  for (int links = 0; links < 40 && fs::is_symlink(fs::symlink_status(target, error)); ++links) {
    target = target.parent_path() / fs::read_symlink(target, error);
  }
  const fs::path whole = fs::weakly_canonical(fs::absolute(target, error), error);
  return error ? target.lexically_normal() : whole;
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) || target_of(a) == target_of(b);
}

bool is_below(const fs::path& path, const fs::path& folder) {
  const fs::path below = target_of(path), above = target_of(folder);
  return std::mismatch(above.begin(), above.end(), below.begin(), below.end()).first == above.end();
}

std::string as_text(const std::string& value) { return value; }
std::string as_text(DType value) { return std::string{to_string(value)}; }
template <class T>
std::string as_text(T value) {
  return std::to_string(value);
}

}  // namespace

BadInput::BadInput(const std::string& message)
    : std::runtime_error{[&] {
        std::string line = message;
        std::ranges::replace_if(line, [](char c) { return c == '\n' || c == '\r'; }, ' ');
        while (!line.empty() && line.back() == ' ') line.pop_back();
        return line;
      }()} {}

std::string_view to_string(Offload offload) {
  switch (offload) {
    case Offload::none:
      return "none";
    case Offload::optimizer:
      return "optimizer";
    case Offload::activations:
      return "activations";
    case Offload::all:
      return "all";
  }
  return "?";
}

std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& out) {
  CLI::App app{
      "Trains a GPT-2-architecture model, paging training state between HBM and pinned host memory.\n"
      "Where state lives changes no bit of the result."};
  app.name("train_gpt");
  app.get_formatter()->column_width(26);
  app.set_version_flag("--version", "train_gpt of hbmoff " + std::to_string(hbmoff::version_major) + "." +
                                        std::to_string(hbmoff::version_minor) + "." +
                                        std::to_string(hbmoff::version_patch));
  app.footer(
      "Exit codes: 0 done, 2 bad input, 3 does not fit the memory, 4 --check found a fault, 130 stopped by Ctrl-C (a\n"
      "second one ends it at once), 1 anything else.");
  std::vector<Flag> flags = make_flags();
  for (Flag& flag : flags) {
    if (flag.value.empty()) {
      app.add_flag(flag.name, flag.help)
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
          ->disable_flag_override();
      continue;
    }
    app.add_option(flag.name, flag.text, flag.help)
        ->type_name(flag.value)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return std::nullopt;
  } catch (const CLI::CallForVersion& version) {
    out << version.what() << '\n';
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw BadInput{error.what()};
  }

  Options options;
  options.threads = std::clamp(std::thread::hardware_concurrency(), 1u, 16u);
  // The preset first: what stands on the command line beside it wins, wherever it stands.
  if (app.count("--model") != 0) {
    apply_preset(options, std::ranges::find(flags, "--model", &Flag::name)->text);
  }
  for (const Flag& flag : flags) {
    if (app.count(flag.name) == 0) continue;
    flag.apply(options, flag.text);
    options.given.insert(saved_name(flag.name));
  }
  if (!options.given.contains("decay_steps")) options.decay_steps = options.steps;
  if (options.data.empty() && options.resume.empty()) throw BadInput{"--data is required (see --help)"};
  return options;
}

nlohmann::json saved_options(const Options& options) {
  nlohmann::json saved = nlohmann::json::object();
  for_each_saved(options, [&](const char* name, const auto& field) {
    if constexpr (std::same_as<std::decay_t<decltype(field)>, DType>) {
      saved[name] = to_string(field);
    } else {
      saved[name] = field;
    }
  });
  return saved;
}

void adopt_saved(Options& options, const nlohmann::json& saved, std::uint64_t decay_steps) {
  for_each_saved(options, [&](const char* name, auto& field) {
    using T = std::decay_t<decltype(field)>;
    T value{};
    try {
      value = from_json<T>(saved.at(name));
    } catch (const std::exception& error) {
      throw BadInput{options.resume + ": its option " + name + " cannot be read: " + error.what()};
    }
    if (!options.given.contains(name)) {
      field = value;
    } else if (std::ranges::find(fixed_names, std::string_view{name}) != fixed_names.end() && field != value) {
      throw BadInput{options.resume + " was saved with " + name + " " + as_text(value) + ", not " + as_text(field)};
    }
  });
  if (!options.given.contains("decay_steps")) options.decay_steps = decay_steps;
  if (!options.given.contains("steps")) options.steps = options.decay_steps;
}

void check(const Options& options) {
  // Again for what came from a saved file.
  const auto bounded = [](const char* name, std::uint64_t value, std::uint64_t most) {
    if (value == 0 || value > most) {
      throw BadInput{std::string{name} + ": " + std::to_string(value) + " is not from 1 to " + std::to_string(most)};
    }
  };
  bounded("--vocab", options.vocab, 65536);
  bounded("--layers", options.layers, largest_dimension);
  bounded("--channels", options.channels, largest_dimension);
  bounded("--heads", options.heads, largest_dimension);
  bounded("--context", options.context, largest_dimension);
  bounded("--batch", options.batch, largest_dimension);
  bounded("--micro-batches", options.micro_batches, largest_dimension);
  bounded("--steps", options.steps, largest_count);
  bounded("--decay-steps", options.decay_steps, largest_count);
  for (const double value : {options.learning_rate, options.weight_decay, options.clip}) {
    if (!std::isfinite(value) || value < 0) throw BadInput{"--lr, --weight-decay or --clip is negative or not finite"};
  }

  if (options.channels % options.heads != 0) {
    throw BadInput{"--heads: " + std::to_string(options.heads) + " does not divide --channels " +
                   std::to_string(options.channels)};
  }
  const auto at_most_layers = [&](const char* name, std::uint64_t value) {
    if (value > options.layers) {
      throw BadInput{std::string{name} + ": " + std::to_string(value) + " is more than the model's " +
                     std::to_string(options.layers) + " layers"};
    }
  };
  at_most_layers("--keep-last", options.keep_last);
  at_most_layers("--recompute", options.recompute);
  if (options.keep_last + options.recompute > options.layers) {
    throw BadInput{"--keep-last " + std::to_string(options.keep_last) + " and --recompute " +
                   std::to_string(options.recompute) + " overlap: the model has " + std::to_string(options.layers) +
                   " layers"};
  }
  if (options.share_slots && options.offload != Offload::all) throw BadInput{"--share-slots needs --offload all"};
  if (options.save_every != 0 && options.save.empty()) throw BadInput{"--save-every needs --save"};

  if (options.page < least_page) {
    throw BadInput{"--page: " + format_bytes(options.page) + " is less than " + format_bytes(least_page)};
  }

  // Rough and on the large side, in double, where nothing wraps around.
  const double channels = static_cast<double>(options.channels), layers = static_cast<double>(options.layers);
  const double context = static_cast<double>(options.context), vocab = static_cast<double>(options.vocab);
  const double rows = static_cast<double>(options.batch) * context;
  const double activations =
      rows * (layers * (24 * channels + 2 * static_cast<double>(options.heads) * context) + 3 * vocab + 24 * channels);
  if (16 * (most_parameters(options) + activations) > 0x1p62) {
    throw BadInput{"a model of this size (--layers, --channels, --context, --batch) would take more than 4 EiB"};
  }
  if (options.page < least_page_of(options)) {
    throw BadInput{"--page: " + format_bytes(options.page) + " would cut this model's optimizer state into more than " +
                   std::to_string(most_pages) + " pages"};
  }
}

void check_paths(const Options& options) {
  struct Named {
    const char* option;
    const std::string& path;
  };
  const std::string partial = options.save.empty() ? "" : partial_of(options.save).string();
  const Named data{"--data", options.data}, resume{"--resume", options.resume}, log{"--log", options.log},
      save{"--save", options.save}, beside{"--save (while it is written)", partial};
  const auto differ = [](const Named& written, const Named& other) {
    if (written.path.empty() || other.path.empty() || !same_file(written.path, other.path)) return;
    throw BadInput{std::string{written.option} + ": " + written.path + " is the file of " + other.option +
                   ", which would be lost"};
  };
  for (const Named& written : {log, save, beside}) differ(written, data);
  for (const Named& written : {log, beside}) differ(written, resume);
  differ(log, save);
  differ(log, beside);

  std::error_code error;
  if (options.data.empty() || !fs::is_directory(options.data, error)) return;
  for (const Named& written : {log, save}) {
    if (written.path.empty()) continue;
    if (is_below(written.path, options.data)) {
      throw BadInput{std::string{written.option} + ": " + written.path + " lies in the folder of --data"};
    }
  }
  // By another name: a hard link, or a link in the folder to a file outside.
  std::vector<fs::path> files;
  try {
    files = data_files(options.data);
  } catch (const fs::filesystem_error&) {
    return;  // reading the data will say what is wrong
  }
  for (const fs::path& file : files) {
    const std::string name = file.string();
    for (const Named& written : {log, save, beside}) differ(written, {"--data", name});
  }
}

Bytes least_page_of(const Options& options) {
  const double page = 12 * most_parameters(options) / static_cast<double>(most_pages);
  return std::max(least_page, Bytes{static_cast<std::uint64_t>(std::ceil(page))});
}

Bytes parse_bytes(std::string_view text, std::string_view option) {
  const auto fail = [&] { refuse(option, text, "a size such as 64KiB, 1.5GiB or 4096, from 1 to 2^63 - 1 bytes"); };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };

  const auto number_end = std::ranges::find_if(text, [&](char c) { return !is_digit(c) && c != '.'; });
  const std::string_view number = text.substr(0, static_cast<std::size_t>(number_end - text.begin()));
  const std::string_view unit = text.substr(number.size());
  constexpr std::pair<std::string_view, int> units[] = {{"", 0},     {"B", 0},    {"KiB", 10},
                                                        {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  const auto found = std::ranges::find(units, unit, &std::pair<std::string_view, int>::first);
  if (found == std::end(units)) fail();

  const std::size_t point = std::min(number.find('.'), number.size());
  std::uint64_t value = 0;
  const std::string_view whole = number.substr(0, point);
  const auto [end, error] = std::from_chars(whole.data(), whole.data() + whole.size(), value);
  if (whole.empty() || error != std::errc{} || end != whole.data() + whole.size()) fail();

  // The digits behind the point, doubled once per power of two of the unit; what carries over is a bit of the value.
  std::string fraction{number.substr(std::min(point + 1, number.size()))};
  if ((point != number.size() && fraction.empty()) || !std::ranges::all_of(fraction, is_digit)) fail();
  for (int shift = 0; shift < found->second; ++shift) {
    std::uint64_t carry = 0;
    for (auto digit = fraction.rbegin(); digit != fraction.rend(); ++digit) {
      const std::uint64_t doubled = 2 * static_cast<std::uint64_t>(*digit - '0') + carry;
      *digit = static_cast<char>('0' + doubled % 10);
      carry = doubled / 10;
    }
    if (value >> 62 != 0) fail();
    value = 2 * value + carry;
  }
  if (fraction.find_first_not_of('0') != std::string::npos || value == 0 || value >> 63 != 0) fail();
  return Bytes{value};
}

std::string format_bytes(Bytes bytes) {
  constexpr const char* names[] = {"", "KiB", "MiB", "GiB", "TiB"};
  std::uint64_t count = bytes.count();
  int unit = 0;
  while (unit < 4 && count != 0 && count % 1024 == 0) count /= 1024, ++unit;
  return std::to_string(count) + names[unit];
}

}  // namespace gpt
