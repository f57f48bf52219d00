"""Checks who includes whom under include/hbmoff, and the few rules every header follows.

  layering.py INCLUDE_DIR    checks the headers under INCLUDE_DIR
  layering.py --self-check   plants one violation of every rule into a small tree and expects each to be reported
"""

import pathlib
import re
import sys
import tempfile

# Each folder may include itself and the folders in its set. The umbrella headers, at the top, may include any.
MAY_INCLUDE = {
    "core": set(),
    "device": {"core"},
    "observe": {"core", "device"},
    "memory": {"core", "device", "observe"},
    "paging": {"core", "device", "observe", "memory"},
    "training": {"core", "device", "observe", "memory", "paging"},
    "planning": {"core", "device", "observe", "memory", "paging", "training"},
    "interop": {"core", "device", "observe", "memory", "paging", "training", "planning"},
}

# The C++20 standard library (and the C headers it wraps).
STANDARD = set("""
    algorithm any array atomic barrier bit bitset charconv chrono compare complex concepts condition_variable
    coroutine deque exception execution filesystem format forward_list fstream functional future initializer_list
    iomanip ios iosfwd iostream istream iterator latch limits list locale map memory memory_resource mutex new
    numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore set
    shared_mutex source_location span sstream stack stdexcept stop_token streambuf string string_view strstream
    syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility
    valarray variant vector version
    cassert cctype cerrno cfenv cfloat cinttypes climits clocale cmath csetjmp csignal cstdarg cstddef cstdint
    cstdio cstdlib cstring ctime cuchar cwchar cwctype
""".split())

# Headers of the operating system and of the processor's vector instructions: nothing to install. Core needs none.
PLATFORM = re.compile(r"(sys|linux|arpa)/\w+\.h|(unistd|fcntl|pthread|sched|errno|signal|ucontext|time|immintrin|emmintrin|xmmintrin|cpuid|"
                      r"xsave|arm_neon)\.h|(sanitizer)/\w+\.h")
CUDA = re.compile(r"cuda|cub/|cublas|thrust/|nv/|nccl|curand|cooperative_groups|mma\.h")
CUDA_HEADERS = {"cuda.hpp", "device/cuda_device.hpp"}  # and every .cuh
CUDA_SOURCES = {"cuda_kernels.cu"}  # what a user's build compiles once
# Which third-party headers an adapter may see.
INTEROP_LIBRARIES = {"interop/fmt.hpp": re.compile(r"fmt/"), "interop/nvtx_memory.hpp": re.compile(r"nvtx3/")}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]*)"|<([^>]*)>|(.*))')
DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)")
EXCLUDED = re.compile(r"(?:GCOVR?|LCOV)_EXCL_(?:LINE|START)(: \w.{9,})?")


def sees_cuda(name):
    return name in CUDA_HEADERS or name in CUDA_SOURCES or name.endswith(".cuh")


def read_includes(path):
    """(line number, quoted, angled, anything else) for each #include line outside comments."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), path.read_text(), flags=re.S)
    for number, line in enumerate(text.split("\n"), 1):
        if match := INCLUDE.match(line):
            yield number, match.group(1), match.group(2), match.group(3)


def check(include_dir):
    """A list of violations, each one line."""
    root = pathlib.Path(include_dir) / "hbmoff"
    headers = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}
    problems = []
    uses = {}  # header -> hbmoff headers it includes
    for name, path in headers.items():
        def problem(line, text, name=name):
            problems.append(f"hbmoff/{name}:{line}: {text}")

        if path.suffix not in (".hpp", ".cuh") and name not in CUDA_SOURCES:
            problem(1, "headers end in .hpp, device code in .cuh")
            continue
        lines = path.read_text().split("\n")
        if not lines[0].startswith("// "):
            problem(1, "the first line is a comment that says what the header is")
        if "#pragma once" not in lines and name not in CUDA_SOURCES:
            problem(1, "no #pragma once")
        for number, line in enumerate(lines, 1):
            if (macro := DEFINE.match(line)) and not macro.group(1).startswith("HBMOFF_"):
                problem(number, f"macro {macro.group(1)} does not start with HBMOFF_")
            if (excluded := EXCLUDED.search(line)) and not excluded.group(1):
                problem(number, "left out of the coverage without a reason")

        folder = name.split("/")[0] if "/" in name else None
        if folder is not None and folder not in MAY_INCLUDE:
            problem(1, f"folder {folder}/ has no row in the table of tests/checks/layering.py")
            continue
        uses[name] = []
        for number, quoted, angled, other in read_includes(path):
            if other:
                problem(number, f"cannot read what is included: {other.strip()}")
            elif quoted is not None:
                if not quoted.startswith("hbmoff/"):
                    problem(number, f'"{quoted}" is not written as "hbmoff/..."')
                    continue
                target = quoted.removeprefix("hbmoff/")
                if target not in headers:
                    problem(number, f'"{quoted}" does not exist')
                    continue
                uses[name].append(target)
                target_folder = target.split("/")[0] if "/" in target else None
                if folder is None:
                    pass
                elif target_folder is None:
                    problem(number, f'{folder}/ includes the umbrella "{quoted}"')
                elif target_folder != folder and target_folder not in MAY_INCLUDE[folder]:
                    problem(number, f'{folder}/ may not include {target_folder}/ ("{quoted}")')
                if sees_cuda(target) and not sees_cuda(name) and folder != "interop":
                    problem(number, f'"{quoted}" brings CUDA into a host header')
            elif angled.startswith("hbmoff/"):
                problem(number, f'<{angled}> is written with quotes: "{angled}"')
            elif angled in STANDARD:
                pass
            elif PLATFORM.fullmatch(angled):
                if folder == "core":
                    problem(number, f"core/ needs the standard library only, not <{angled}>")
            elif CUDA.match(angled):
                if not sees_cuda(name) and folder != "interop":
                    problem(number, f"<{angled}> brings CUDA into a host header")
            elif not (name in INTEROP_LIBRARIES and INTEROP_LIBRARIES[name].match(angled)):
                problem(number, f"<{angled}> belongs to another library; only interop/ adapts to those")

    if "hbmoff.hpp" in uses:  # what a host compiler gets, however deep
        seen, queue = set(), ["hbmoff.hpp"]
        while queue:
            name = queue.pop()
            if name in seen or name not in uses:
                continue
            seen.add(name)
            queue += uses[name]
            if sees_cuda(name):
                problems.append(f"hbmoff/hbmoff.hpp: reaches hbmoff/{name}, which includes CUDA")
        for name in sorted(uses):
            if "/" in name and not name.startswith("interop/") and "/detail/" not in name and not sees_cuda(name) and name not in seen:
                problems.append(f"hbmoff/hbmoff.hpp: does not reach hbmoff/{name}")
    return problems


def self_check():
    good = {
        "hbmoff.hpp": '#include "hbmoff/training/t.hpp"\n#include "hbmoff/planning/p.hpp"\n#include "hbmoff/core/a.hpp"',
        "core/a.hpp": "#include <vector>",
        "device/d.hpp": '#include <sys/mman.h>\n#include "hbmoff/core/a.hpp"',
        "device/cuda_device.hpp": '#include <cuda_runtime_api.h>\n#include "hbmoff/device/d.hpp"',
        "training/t.hpp": '#include "hbmoff/device/d.hpp"\n// #include <fmt/core.h>\n/* #include <fmt/core.h>\n */',
        "planning/p.hpp": '#include "hbmoff/training/t.hpp"\n#define HBMOFF_P 1',
        "interop/fmt.hpp": '#include <fmt/format.h>\n#include "hbmoff/planning/p.hpp"',
        "cuda.hpp": '#include "hbmoff/hbmoff.hpp"\n#include "hbmoff/device/cuda_device.hpp"',
    }
    bad = [  # header, its text, what must be reported
        ("core/x.hpp", '#include "hbmoff/device/d.hpp"', "core/ may not include device/"),
        ("core/x.hpp", "#include <sys/mman.h>", "standard library only"),
        ("core/x.hpp", "#include <fmt/format.h>", "another library"),
        ("device/x.hpp", '#include "hbmoff/planning/p.hpp"', "device/ may not include planning/"),
        ("training/x.hpp", '  #  include "hbmoff/planning/p.hpp"', "training/ may not include planning/"),
        ("training/x.hpp", '#include "hbmoff/hbmoff.hpp"', "umbrella"),
        ("training/x.hpp", '#include "hbmoff/interop/fmt.hpp"', "training/ may not include interop/"),
        ("training/x.hpp", "#include <cuda_runtime_api.h>", "brings CUDA"),
        ("training/x.hpp", '#include "hbmoff/device/cuda_device.hpp"', "brings CUDA"),
        ("training/x.hpp", '#include "t.hpp"', 'not written as "hbmoff/..."'),
        ("training/x.hpp", "#include <hbmoff/core/a.hpp>", "quotes"),
        ("training/x.hpp", '#include "hbmoff/core/none.hpp"', "does not exist"),
        ("training/x.hpp", "#include HEADER", "cannot read"),
        ("training/x.hpp", "#define MAX 1", "does not start with HBMOFF_"),
        ("training/x.hpp", "int x;  // GCOVR_EXCL_LINE", "without a reason"),
        ("training/x.hpp", "", "does not reach"),
        ("interop/other.hpp", "#include <fmt/format.h>", "another library"),
        ("misc/x.hpp", "", "no row"),
        ("core/x.h", "", "end in .hpp"),
        ("hbmoff.hpp", '#include "hbmoff/device/cuda_device.hpp"', "reaches"),
    ]
    failures = []

    def run(changes, raw=None):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in ({**good, **changes}).items():
                path = pathlib.Path(folder) / "hbmoff" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"// {name}\n#pragma once\n{text}\n")
            for name, text in (raw or {}).items():
                (pathlib.Path(folder) / "hbmoff" / name).write_text(text)
            return check(folder)

    if problems := run({}):
        failures.append(f"a tree without faults is refused: {problems}")
    for name, text, expected in bad:
        if not any(expected in p for p in run({name: text})):
            failures.append(f"not reported in {name}: {text!r} ({expected})")
    for text, expected in (("#pragma once\n", "comment"), ("// what\n", "#pragma once")):
        if not any(expected in p for p in run({}, {"core/x.hpp": text})):
            failures.append(f"not reported: {text!r} ({expected})")
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = self_check() if sys.argv[1] == "--self-check" else check(sys.argv[1])
    print("\n".join(found) or "no violation")
    sys.exit(1 if found else 0)
