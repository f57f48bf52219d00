// What train_gpt can be asked to do: the options, their bounds, and what of them a saved file keeps.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "hbmoff/core/dtype.hpp"
#include "hbmoff/core/units.hpp"

namespace gpt {

/// The user asked for something that cannot be done: a bad option, file or size. `main` prints what() as one line
/// and ends with exit code 2. The message names the option or the file, and holds no line break.
class BadInput : public std::runtime_error {
 public:
  explicit BadInput(const std::string& message);
};

/// Which training state leaves HBM.
enum class Offload : std::uint8_t { none, optimizer, activations, all };

[[nodiscard]] std::string_view to_string(Offload offload);

/// Everything the command line says. The defaults train a small byte-level model in a few minutes on a CPU.
struct Options {
  // What is trained. A saved file keeps these (`saved_options`).
  std::string data;                  ///< text file, folder of text, .bin token shard, or folder of shards
  std::string model;                 ///< name of the preset, empty for none
  std::uint64_t vocab = 0;           ///< 0: the data's own (256 for text, 50257 for shards); at most 65536
  std::uint64_t layers = 4;
  std::uint64_t channels = 128;      ///< a multiple of heads
  std::uint64_t heads = 4;
  std::uint64_t context = 64;        ///< tokens per sequence
  std::uint64_t batch = 12;          ///< sequences per micro-batch
  std::uint64_t micro_batches = 1;   ///< gradients of so many are summed before each step
  double learning_rate = 1e-3;       ///< peak, reached after the warm-up
  std::uint64_t warmup = 20;         ///< steps of linear warm-up
  double weight_decay = 0.1;         ///< on matrices only
  double clip = 1.0;                 ///< largest global gradient norm, 0: no clipping
  std::uint64_t seed = 1;            ///< fixes everything
  hbmoff::DType dtype = hbmoff::DType::fp32;  ///< of weights, gradients and activations: fp32 or bf16
  std::uint64_t steps = 200;         ///< in total, resumed steps included
  std::uint64_t decay_steps = 200;   ///< horizon of the cosine decay; `steps` where not given

  // How it is trained. None of these changes one bit of the result, and no saved file keeps them.
  std::uint64_t threads = 1;         ///< default: the machine's, at most 16
  std::optional<hbmoff::Bytes> hbm;  ///< the HBM limit; none: what the run takes
  Offload offload = Offload::none;
  std::uint64_t keep_last = 0;       ///< layers at the end whose activations stay in HBM
  std::uint64_t recompute = 0;       ///< layers at the start whose activations are computed again in backward
  hbmoff::Bytes page{8u << 20};      ///< the optimizer's page
  std::uint32_t depth = 3;           ///< page slots in HBM, and bundle slots
  bool share_slots = false;          ///< pages and bundles pass through the same depth + 1 slots
  double link_gbps = 0;              ///< modelled link, 10^9 bytes per second and direction; 0: no model

  // What comes out.
  std::string save;                  ///< file, empty for none
  std::uint64_t save_every = 0;      ///< steps; 0: at the end only
  std::string resume;                ///< file, empty for none
  std::string log;                   ///< JSON-lines file, empty for none
  std::uint64_t sample = 0;          ///< tokens to sample at the end
  std::uint64_t eval_every = 0;      ///< steps; 0: at the end only
  std::uint64_t eval_batches = 20;   ///< batches of the held-out part that one evaluation looks at
  bool check = false;                ///< run on a device that checks the order of all accesses
  bool summary_json = false;         ///< the last line on standard output is one JSON object

  std::set<std::string> given;       ///< fields set by the command line (presets included), as named in a saved file
};

/// Options from the command line. None when help or the version was asked for and has been written to `out`.
/// Each option's own bounds are checked here; what needs the data or a saved file too is checked by `check`.
/// \throws BadInput unknown option, bad number, out of bounds, missing `--data` (unless resuming)
[[nodiscard]] std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& out);

/// The part that decides the result's bits, for the header of a saved file. `steps` and `decay_steps` are not in it:
/// the first may grow, the second stands beside it.
[[nodiscard]] nlohmann::json saved_options(const Options& options);

/// Fills what the command line did not give from a saved file's options and decay horizon.
/// \throws BadInput where the command line contradicts the file in the shape of the model, the type or the seed, or the
///         file's options are not such
void adopt_saved(Options& options, const nlohmann::json& saved, std::uint64_t decay_steps);

/// Checks that the options fit together; `vocab` must be known. After this no product of sizes that a model of this
/// shape needs (parameters, activations, times 16 bytes) exceeds 2^62.
/// \throws BadInput heads not dividing channels, sizes whose product overflows, a page that is too small, layers both
///         kept and recomputed, `--save-every` without `--save`, `--share-slots` without `--offload all`, ...
void check(const Options& options);

/// The smallest `--page` that `check` lets pass for a model of this shape.
[[nodiscard]] hbmoff::Bytes least_page_of(const Options& options);

/// Checks that no file that is written is a file that is read, lies in the folder of data, or is the other file that is
/// written, by whatever name: links are followed, hard links known. Opens nothing. `save` may be `resume`.
/// Call it before any of them is opened, and again once a saved file said where the data is.
/// \throws BadInput naming both options
void check_paths(const Options& options);

/// "64KiB", "1.5GiB", "4096", "4096B" (units B, KiB, MiB, GiB, TiB; binary). Exact: a fraction must come to whole
/// bytes.
/// \throws BadInput naming `option` when it is anything else, zero, or 2^63 and more
[[nodiscard]] hbmoff::Bytes parse_bytes(std::string_view text, std::string_view option);

/// A text without fraction that `parse_bytes` reads back as `bytes`, for messages that tell what option to give.
[[nodiscard]] std::string format_bytes(hbmoff::Bytes bytes);

}  // namespace gpt
