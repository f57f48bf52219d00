"""Every C++ block of README.md stands in a source that the build compiles.

  readme.py README.md SOURCE...

The lines of a block must appear in one of the sources one after the other, however indented there as a whole.
"""

import pathlib
import re
import sys
import textwrap


def lines_of(text):
    return [line.rstrip() for line in textwrap.dedent(text).strip("\n").split("\n")]


def contains(source, block):
    """Whether the lines of `block` stand in `source`, with one indentation before all of them."""
    for start in range(len(source) - len(block) + 1):
        indent = re.match(r" *", source[start]).group() if source[start] else ""
        if all(s == (indent + b if b else "") for s, b in zip(source[start:], block)):
            return True
    return False


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    blocks = re.findall(r"^```cpp\n(.*?)^```", pathlib.Path(sys.argv[1]).read_text(), flags=re.M | re.S)
    sources = [lines_of(pathlib.Path(p).read_text()) for p in sys.argv[2:]]
    missing = [b for b in blocks if not any(contains(s, lines_of(b)) for s in sources)]
    if not blocks or not all(b.strip() for b in blocks):
        sys.exit("README.md has no C++ block, or an empty one")
    for block in missing:
        print(f"in no source that is compiled:\n{block}")
    print(f"{len(blocks)} blocks, {len(missing)} not found")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
