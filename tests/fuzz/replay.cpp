// Runs a fuzz target without libFuzzer: on the files named, on all files of the folders named, and on generated inputs.
//
//   TARGET [--generate COUNT] [--seed NUMBER] [FILE_OR_FOLDER]...
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../support/random.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  std::uint64_t generate = 0, seed = 1;
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--generate") == 0 && i + 1 < argc) {
      generate = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator{argv[i]}) files.push_back(entry.path());
    } else {
      files.push_back(argv[i]);
    }
  }
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    std::ifstream file{path, std::ios::binary};
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", path.c_str());
      return 1;
    }
    std::vector<char> bytes{std::istreambuf_iterator<char>{file}, {}};
    std::fprintf(stderr, "%s\n", path.c_str());  // the last line before a finding says where it came from
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  for (std::uint64_t n = 0; n < generate; ++n) {
    random_numbers::Random random{random_numbers::hash(seed) + n};
    std::vector<std::uint8_t> bytes(16 + random.next() % 500);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random.next() >> 32);
    std::fprintf(stderr, "generated input %llu of seed %llu\n", static_cast<unsigned long long>(n),
                 static_cast<unsigned long long>(seed));
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu files and %llu generated inputs without a finding\n", files.size(),
              static_cast<unsigned long long>(generate));
  return files.empty() && generate == 0 ? 1 : 0;
}
