"""Counts instructions of launches with and without notes of what they touch (callgrind): a note must cost none.

  annotation_cost.py [--compiler g++] [--output FILE]

Compiles annotation_cost.cpp twice with -O2 and runs both under valgrind, with 1000 and with 2000 launches: the difference
is what 1000 launches cost the calling thread, libraries excluded (their counts vary: locks, clocks). Prints JSON; the
exit status is 0 when both cost the same.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def build(compiler, flags, folder):
    program = folder / ("with" if flags else "without")
    subprocess.run([compiler, "-std=c++20", "-O2", *flags, f"-I{HERE.parent / 'include'}", str(HERE / "annotation_cost.cpp"),
                    "-pthread", "-o", str(program)], check=True)
    return program


def count(program, launches):
    folder = program.parent
    out = folder / f"{program.name}.{launches}"
    subprocess.run(["valgrind", "--tool=callgrind", "--toggle-collect=*launches*", "--separate-threads=yes",
                    f"--callgrind-out-file={out}", str(program), str(launches)], check=True, capture_output=True)
    total = 0
    for part in folder.glob(f"{out.name}-*"):
        listing = subprocess.run(["callgrind_annotate", "--auto=no", "--threshold=100", "--show-percs=no", str(part)],
                                 check=True, capture_output=True, text=True).stdout
        for line in listing.splitlines():
            match = re.match(r"\s*([\d,]+)\s.*\[(.*)\]$", line)
            if match and pathlib.Path(match[2]).name == program.name:
                total += int(match[1].replace(",", ""))
    return total


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--compiler", default="g++")
    arguments.add_argument("--output")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        costs = []
        for flags in [], ["-DANNOTATED"]:
            program = build(options.compiler, flags, folder)
            costs.append((count(program, 2000) - count(program, 1000)) / 1000)
        without, annotated = costs
    result = {"instructions_per_launch": without, "instructions_per_launch_with_notes": annotated}
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        pathlib.Path(options.output).write_text(text + "\n", encoding="utf-8")
    if without <= 0:
        sys.exit("nothing was counted")
    sys.exit(without != annotated)


main()
