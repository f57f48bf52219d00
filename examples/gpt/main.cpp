// train_gpt: trains a GPT-2 on the CPU under an HBM limit, paging what does not fit.
//
// Exit codes: 0 done, 2 bad input, 3 does not fit, 4 --check found a fault, 130 stopped by Ctrl-C after a whole step, 1
// anything else.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>

#include "checkpoint_file.hpp"
#include "data.hpp"
#include "log.hpp"
#include "options.hpp"
#include "trainer.hpp"

namespace {

std::atomic<bool> stop{false};

template <class T, class D>
int train_on(const gpt::Options& options, const gpt::Dataset& data, gpt::RunLog& log,
             const gpt::CheckpointReader* resume) {
  gpt::Trainer<T, D> trainer{options, data, log, resume};
  log.start({{"options", gpt::saved_options(options)}, {"offload", to_string(options.offload)}});
  return trainer.run(stop);
}

template <class T>
int train(const gpt::Options& options, const gpt::Dataset& data, gpt::RunLog& log,
          const gpt::CheckpointReader* resume) {
  using hbmoff::HostDevice;
  return options.check ? train_on<T, hbmoff::CheckedDevice<HostDevice>>(options, data, log, resume)
                       : train_on<T, HostDevice>(options, data, log, resume);
}

int run(int argc, char** argv) {
  std::optional<gpt::Options> options = gpt::parse_options(argc, argv, std::cout);
  if (!options) return 0;
  std::unique_ptr<gpt::CheckpointReader> resume;
  if (!options->resume.empty()) {
    resume = std::make_unique<gpt::CheckpointReader>(options->resume);
    const nlohmann::json& header = resume->header();
    if (!header.contains("options") || !header.contains("decay_steps") || !header["decay_steps"].is_number_unsigned()) {
      throw gpt::BadInput{"--resume " + options->resume + ": its header is not one of this trainer's"};
    }
    gpt::adopt_saved(*options, header["options"], header["decay_steps"].get<std::uint64_t>());
  }
  gpt::check_paths(*options);  // before anything is opened to be written
  const gpt::Dataset data = gpt::Dataset::load(options->data, options->vocab);
  options->vocab = data.vocab();
  gpt::check(*options);
  data.require(options->context);
  if (!options->save.empty()) gpt::check_saveable(options->save);
  gpt::require_memory(*options);  // before a log is begun anew
  gpt::RunLog log{options->log, resume != nullptr};

  // The handler only says so: the step that runs is finished first. A second Ctrl-C ends the program at once.
  std::signal(SIGINT, [](int) {
    stop = true;
    std::signal(SIGINT, SIG_DFL);
  });
  return options->dtype == hbmoff::DType::fp32 ? train<float>(*options, data, log, resume.get())
                                               : train<hbmoff::bf16>(*options, data, log, resume.get());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const gpt::BadInput& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 2;
  } catch (const gpt::DoesNotFit& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 3;
  } catch (const hbmoff::CheckError& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 4;
  } catch (const hbmoff::OutOfMemory& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
  }
}
