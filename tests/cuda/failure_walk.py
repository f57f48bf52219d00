"""Runs a program with every call of the CUDA runtime that the library makes failing in turn.

  failure_walk.py --include INCLUDE_DIR [--stride N] COMMAND...

The names of the calls come from the library's text, so none is forgotten. COMMAND runs failure_program on the stand-in
for the runtime, which lets the n-th call of a name fail (CUDART_STANDIN_FAIL). Each run must end well and leak nothing.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

# Calls whose failure nobody can be told of: the owner is gone. And what is not called in a training on one device.
SILENT = {"cudaStreamDestroy", "cudaEventDestroy", "cudaHostUnregister", "cudaFreeHost", "cudaGetLastError",
          "cudaPeekAtLastError", "cudaGetErrorName", "cudaGetErrorString"}
NOT_MADE = {"cudaSetDevice", "cudaDeviceSynchronize", "cudaEventElapsedTime", "cudaHostAlloc", "cudaLaunchHostFunc",
            "cudaMallocFromPoolAsync", "cudaMemGetInfo"}
OUT_OF_MEMORY = {"cudaMalloc", "cudaHostRegister"}
LOSES = ["cudaMemcpyAsync", "cudaLaunchKernel", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamSynchronize"]


def run(command, fail):
    environment = dict(os.environ, CUDART_STANDIN_FAIL=fail, CUDART_STANDIN_LEAKS="fatal")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if re.match(r"(failures|lost|wrong)", line)]
    return done.returncode, lines[-1] if lines else "", done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--include", required=True, type=pathlib.Path)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    text = "".join(re.sub(r"//[^\n]*", "", path.read_text()) for path in args.include.rglob("*") if path.suffix in
                   (".hpp", ".cuh", ".cu"))
    names = set(re.findall(r"\b(cuda[A-Z]\w+)\(", text))
    # However a kernel is launched, the stand-in calls it cudaLaunchKernel.
    launches = {name for name in names if name.startswith("cudaLaunchKernel")}
    names = names - launches | {"cudaLaunchKernel"}
    unknown_lists = (SILENT | NOT_MADE | OUT_OF_MEMORY) - names
    problems = [f"{name} is in a list of failure_walk.py, but the library no longer calls it" for name in
                sorted(unknown_lists)]
    runs = 0

    code, line, output = run(args.command, "")
    if code != 0 or line != "failures 0":
        print(output)
        sys.exit("the undisturbed program fails")

    for name in sorted(names - SILENT - NOT_MADE):
        met = 0
        number, missed = 2 if name == "cudaGetDeviceCount" else 1, 0  # the main function looks for a device first
        while missed < 2:  # a call that a destructor makes tells nobody: look one further
            error = 2 if name in OUT_OF_MEMORY else 1
            code, line, output = run(args.command, f"{name}:{number}={error}")
            runs += 1
            if code != 0 or line not in ("failures 0", "failures 1"):
                problems.append(f"{name}, call {number}: exit status {code}, {line or output[-500:]}")
                missed += 1
            elif line == "failures 1":
                met, missed = met + 1, 0
            else:
                missed += 1
            number += 1 if missed else args.stride
        print(f"{name}: {met} failures met")
        if met == 0:
            problems.append(f"{name}: no call of it failed")

    for name in sorted(SILENT & {"cudaStreamDestroy", "cudaEventDestroy", "cudaHostUnregister"}):
        code, line, output = run(args.command, f"{name}:1=1")
        runs += 1
        if line != "failures 0":
            problems.append(f"{name}: {line or output[-500:]}")

    for name in LOSES:
        lost = 0
        for number in range(1, 100000, 3 * args.stride):
            code, line, output = run(args.command, f"{name}:{number}=700")
            runs += 1
            if line == "failures 0" and code == 0:
                break
            if line != "lost cudaErrorIllegalAddress":
                problems.append(f"{name}, call {number}, context lost: exit status {code}, {line or output[-500:]}")
            lost += 1
        print(f"{name}: the context was lost {lost} times")
        if lost == 0:
            problems.append(f"{name}: never lost the context")

    print(f"{runs} runs")
    print("\n".join(problems))
    sys.exit(1 if problems else 0)


main()
