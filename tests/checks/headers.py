"""Each header compiles alone; all compile together under hostile macros; twice in one program; and pass clang-tidy.

  headers.py {alone|hostile|twice} --compiler CXX --include DIR [--include DIR ...] --flags FLAGS
  headers.py tidy --compiler CLANG_TIDY --config FILE --include DIR [--include DIR ...] --flags FLAGS

Only headers for host compilers: .cuh files and what needs CUDA's headers are left out, and named.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

NEEDS_CUDA = {"hbmoff/cuda.hpp", "hbmoff/device/cuda_device.hpp", "hbmoff/interop/nvtx_memory.hpp"}

# Names that other people's headers are known to define as macros (windows.h, curses, X11, LLVM's and older C code).
# min and max are function-like in windows.h, so that `std::min(a, b)` breaks and `(std::min)(a, b)` does not.
HOSTILE = """
#define min(a, b) hostile macro min
#define max(a, b) hostile macro max
#define small hostile macro small
#define near hostile macro near
#define far hostile macro far
#define interface hostile macro interface
#define I hostile macro I
#define OUT hostile macro OUT
#define IN hostile macro IN
#define ERROR hostile macro ERROR
#define DEBUG hostile macro DEBUG
#define DELETE hostile macro DELETE
#define CHECK(x) hostile macro CHECK
#define None hostile macro None
#define Success hostile macro Success
#define Bool hostile macro Bool
#define minor(x) hostile macro minor
#define major(x) hostile macro major
#define unix hostile macro unix
#define linux hostile macro linux
#define likely(x) hostile macro likely
#define unlikely(x) hostile macro unlikely
#define PAGE_SIZE hostile macro PAGE_SIZE
#define TRACE hostile macro TRACE
#define THREAD hostile macro THREAD
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["alone", "hostile", "twice", "tidy"])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", required=True)
    parser.add_argument("--flags", default="")
    parser.add_argument("--config", help="of clang-tidy")
    args = parser.parse_args()

    root = pathlib.Path(args.include[0])
    headers = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.hpp"))
    left_out = [h for h in headers if h in NEEDS_CUDA]
    headers = [h for h in headers if h not in NEEDS_CUDA]
    if left_out:
        print("left out, they need CUDA's headers:", *left_out)
    if not headers:
        sys.exit(f"no header under {root}")
    flags = [*shlex.split(args.flags), *(f"-I{i}" for i in args.include)]
    command = [args.compiler, *flags]
    work_folder = tempfile.TemporaryDirectory()
    work = pathlib.Path(work_folder.name)
    everything = "".join(f'#include "{h}"\n' for h in headers)

    def compile_text(name, text, *more):
        source = work / (re.sub(r"\W", "_", name) + ".cpp")
        source.write_text(text)
        result = subprocess.run([*command, *more, str(source)], capture_output=True, text=True)
        return result.returncode, f"--- {name}\n{result.stderr}"

    if args.what == "alone":
        # Twice in the one unit as well: that is what an include guard is for.
        with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(compile_text, h, f'#include "{h}"\n#include "{h}"\n', "-fsyntax-only") for h in headers]
            results = [job.result() for job in jobs]
    elif args.what == "hostile":
        # The system's headers come first: their own behaviour under such macros is not hbmoff's.
        system = set()
        for h in headers:
            system.update(re.findall(r"^\s*#\s*include\s*(<[^>]*>)", (root / h).read_text(), flags=re.M))
        before = "".join(f"#include {s}\n" for s in sorted(system))
        def under_macros(name, text):
            return compile_text(name, before + HOSTILE + text, "-fsyntax-only")

        results = [under_macros("all headers under hostile macros", everything)]
        if under_macros("negative control", "int f() { return std::min(1, 2); }\n")[0] == 0:
            sys.exit("the hostile macros are not in force; the check proves nothing")
    elif args.what == "tidy":
        def tidy(name, text):
            (work / "tidy.cpp").write_text(text)
            result = subprocess.run([args.compiler, "--quiet", f"--config-file={args.config}", str(work / "tidy.cpp"), "--", *flags],
                                    capture_output=True, text=True)
            return result.returncode, f"--- {name}\n{result.stdout}"

        results = [tidy("all headers", everything)]
        if tidy("negative control", "inline void f() {\n  try {\n    throw 1;\n  } catch (int) {\n  }\n}\n")[0] == 0:
            sys.exit("a planted fault was not reported; the check proves nothing")
    else:
        def link(name, common):
            (work / "common.hpp").write_text("#pragma once\n" + common)
            (work / "other.cpp").write_text('#include "common.hpp"\nint other() { return 0; }\n')
            return compile_text(name, '#include "common.hpp"\nint other();\nint main() { return other(); }\n',
                                "-O0", f"-I{work}", str(work / "other.cpp"), "-o", str(work / "program"), "-pthread")

        results = [link("two units, one program", everything)]
        if link("negative control", "int planted() { return 0; }\n")[0] == 0:
            sys.exit("a function without inline was linked from two units; the check proves nothing")

    failed = [text for code, text in results if code != 0]
    print(*failed, sep="\n")
    print(f"{len(headers)} headers, {len(failed)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
