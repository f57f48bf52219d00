"""Builds a g++ program and the kernels by hand, as a user without CMake does, and links them in every way.

  link.py --nvcc NVCC --cxx CXX --include INCLUDE_DIR --work DIR [--runner PROG]

Both orders on the linker's command line, and NDEBUG defined for one part, the other, both or none: the results are the
same. Without the kernels the linker names `hbmoff::launch_kernel<...>`, as the documentation says. With RUNNER (a
stand-in for the CUDA runtime) the programs are run.
"""

import argparse
import itertools
import pathlib
import shutil
import subprocess
import sys

PROGRAM = r"""
#include "hbmoff/cuda.hpp"
#include <cstdio>
#include <vector>
using namespace hbmoff;
int main() {
  CudaDevice device{0};
  HbmArena<CudaDevice> hbm{device, 1_MiB};
  PinnedHostArena<CudaDevice> host{device, 1_MiB};
  const auto stream = device.create_stream("compute");
  auto weight = hbm.allocate(4000_B, "weight", Role::weight, stream);
  auto gradient = hbm.allocate(4000_B, "gradient", Role::gradient, stream);
  device.fill_async(weight.bytes(), std::byte{0x3f}, stream);
  device.fill_async(gradient.bytes(), std::byte{0x3d}, stream);
  PagedAdamW optimizer{hbm, host, OffloadOptimizerState{}, {.page = 1_KiB}};
  optimizer.add({.name = "w", .count = 1000}, weight.as<float>(), device_span<const float>{gradient.as<float>()});
  optimizer.step(stream);
  auto seen = host.allocate(4000_B, "seen", Role::other, stream);
  device.copy_async(seen.bytes(), device_span<const std::byte>{weight.bytes()}, stream);
  device.synchronize(CudaDevice::StreamRef{stream});
  std::printf("%a %a\n", static_cast<double>(seen.as<float>()[0]), static_cast<double>(seen.as<float>()[999]));
}
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--include", required=True, type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--runner", default="")
    args = parser.parse_args()
    work = args.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "program.cpp").write_text(PROGRAM)
    toolkit = pathlib.Path(shutil.which(args.nvcc)).resolve().parent.parent

    def call(*command):
        return subprocess.run([str(part) for part in command], capture_output=True, text=True)

    def must(*command):
        done = call(*command)
        if done.returncode != 0:
            sys.exit(f"{' '.join(str(part) for part in command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    debug = {"": [], "-ndebug": ["-DNDEBUG"]}
    for name, flags in debug.items():
        must(args.nvcc, "-std=c++20", "-O1", *flags, "-I", args.include, "-gencode", "arch=compute_75,code=compute_75",
             "--no-compress", "-c", args.include / "hbmoff/cuda_kernels.cu", "-o", work / f"kernels{name}.o")
        must(args.cxx, "-std=c++20", "-O1", *flags, "-I", args.include, "-I", toolkit / "include", "-c",
             work / "program.cpp", "-o", work / f"program{name}.o")
    libraries = ["-L", toolkit / "lib64", "-lcudart", "-lpthread"]

    results = set()
    for program, kernels, swapped in itertools.product(debug, debug, (False, True)):
        parts = [work / f"program{program}.o", work / f"kernels{kernels}.o"]
        binary = work / f"program{program}-kernels{kernels}{'-swapped' if swapped else ''}"
        must(args.cxx, *(reversed(parts) if swapped else parts), *libraries, "-o", binary)
        if args.runner:
            results.add(must(args.runner, binary))
    if args.runner and len(results) != 1:
        sys.exit(f"the builds do not agree: {results}")

    missing = call(args.cxx, work / "program.o", *libraries, "-o", work / "without-kernels")
    if missing.returncode == 0 or "hbmoff::launch_kernel<hbmoff::adamw_kernels::" not in missing.stderr:
        sys.exit(f"without the kernels the linker does not say what is missing:\n{missing.stderr}")
    print(f"8 programs linked{', all print ' + results.pop().strip() if results else ', none run'}")


main()
