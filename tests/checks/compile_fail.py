"""A source that must not compile does not, for the stated reason; and its corrected twin does.

  compile_fail.py SOURCE --compiler CXX --include DIR --flags FLAGS

The source starts with

  // expect: REGEX       searched for in the compiler's messages
  // flags: FLAGS        optional: more flags; the twin is compiled without them

The twin is the same source compiled with HBMOFF_TWIN defined: it tells the mistake that is tested from any other
reason for which a source may fail (a renamed header, a changed signature).
"""

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", required=True)
    parser.add_argument("--flags", default="")
    args = parser.parse_args()

    lines = pathlib.Path(args.source).read_text().split("\n")
    expect = re.fullmatch(r"// expect: (.+)", lines[0])
    if not expect:
        sys.exit(f"{args.source}: the first line is not `// expect: REGEX`")
    flags = re.fullmatch(r"// flags: (.+)", lines[1])

    def compile_source(*more):
        command = [args.compiler, *shlex.split(args.flags), *(f"-I{i}" for i in args.include), "-fsyntax-only", *more, args.source]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        return result.returncode, result.stderr

    code, messages = compile_source("-DHBMOFF_TWIN")
    if code != 0:
        sys.exit(f"{args.source}: the twin does not compile:\n{messages}")
    code, messages = compile_source(*shlex.split(flags.group(1) if flags else ""))
    if code == 0:
        sys.exit(f"{args.source}: compiles, and must not")
    if not re.search(expect.group(1), messages):
        sys.exit(f"{args.source}: fails, but not with /{expect.group(1)}/:\n{messages}")
    print(f"refused as expected: /{expect.group(1)}/")


if __name__ == "__main__":
    main()
