"""The arithmetic of the GPU kernels, as the compiler wrote it down: nothing flushed, approximated or left to contract.

  ptx.py --nvcc NVCC --include DIR --architectures 75,80,...   compiles hbmoff/cuda_kernels.cu for each, with and without
                                                               -use_fast_math, and looks at its PTX
  ptx.py --self-check                                          plants what is to be found
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

# Of the page update, all arithmetic; of the other kernels, what is said of single precision.
UPDATE = re.compile(r"update_page")
EXACT = re.compile(r"(fma|add|sub|mul|div|sqrt)\.rn\.f(32|64)|(neg|abs)\.f(32|64)|(ld|st|mov|selp)\b.*|setp\..*|"
                   r"cvt\.f64\.f32|cvt\.rn\.f32\.f64")
OPERATION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z0-9_]+(?:\.[a-z0-9_]+)*)\s", re.M)
ENTRY = re.compile(r"\.entry\s+(\w+)\(.*?\n\}", re.S)


def problems(ptx):
    entries = list(ENTRY.finditer(ptx))
    if not any(UPDATE.search(e[1]) for e in entries):
        yield "no kernel is called update_page"
    for entry in entries:
        for operation in sorted(set(OPERATION.findall(entry[0]))):
            if not re.search(r"\.f(16|32|64)", operation):
                continue
            if ".ftz" in operation or ".approx" in operation or ".full" in operation:
                yield f"{entry[1]}: {operation} flushes or approximates"
            elif UPDATE.search(entry[1]) and not EXACT.fullmatch(operation):
                yield f"{entry[1]}: {operation} is not one of fma, add, sub, mul, div, sqrt with .rn"


def self_check():
    body = "\n.visible .entry _Zupdate_page1(\n)\n{{\n\tfma.rn.f32 \t%f1, %f2, %f3;\n\t@%p1 {} \t%f1, %f2;\n}}\n"
    for operation in ["mul.f32", "add.ftz.f32", "div.approx.f32", "sqrt.approx.ftz.f32", "ex2.approx.f32", "neg.ftz.f32"]:
        if not list(problems(body.format(operation))):
            sys.exit(f"{operation} was not found")
    if found := list(problems(body.format("div.rn.f32"))):
        sys.exit(f"found where there is nothing: {found}")
    if not list(problems("")):
        sys.exit("a file without the kernel passed")
    print("each violation is found")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-check", action="store_true")
    parser.add_argument("--nvcc")
    parser.add_argument("--include")
    parser.add_argument("--architectures", default="75,80,90,100")
    args = parser.parse_args()
    if args.self_check:
        return self_check()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for architecture in args.architectures.split(","):
            for flags in [], ["-use_fast_math"]:
                out = pathlib.Path(folder) / "kernels.ptx"
                subprocess.run([args.nvcc, "-std=c++20", f"-I{args.include}", f"-arch=compute_{architecture}", *flags,
                                "--ptx", f"{args.include}/hbmoff/cuda_kernels.cu", "-o", str(out)], check=True)
                found = list(problems(out.read_text()))
                print(f"compute_{architecture} {' '.join(flags)}: {len(found)} problems")
                for problem in found:
                    print(f"  {problem}")
                failed = failed or bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
