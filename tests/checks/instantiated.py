"""Every public class template under include/hbmoff is instantiated explicitly in one source.

  instantiated.py INCLUDE_DIR SOURCE

Public: at namespace scope, outside interop/, detail/ and inner namespaces. `template class Name<...>;` is looked for.
"""

import pathlib
import re
import sys

# What opens and closes a namespace, and the head of a class template's definition, each at the start of a line.
PIECE = re.compile(r"^(?:inline )?namespace (?P<open>[\w:]*) ?\{|^\}  // namespace(?P<close>)|"
                   r"^template <[^;{}()]*?>\s*(?:requires[^{;]*?\s)?(?:class|struct) (?P<name>\w+)(?: final)?\s*"
                   r"(?::[^:;{][^;{]*)?\{", flags=re.M)


def public_templates(text):
    inside = []
    for piece in PIECE.finditer(text):
        if piece["open"] is not None:
            inside.append(piece["open"])
        elif piece["name"] is None:
            inside.pop()
        elif inside == ["hbmoff"]:
            yield piece["name"]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    root, source = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text()
    found = {}
    for path in sorted(root.rglob("*.hpp")):
        if "interop" not in path.parts and "detail" not in path.parts:
            found.update({name: path.relative_to(root) for name in public_templates(path.read_text())})
    missing = [n for n in found if not re.search(rf"^template (?:class|struct) {n}<", source, flags=re.M)]
    for name in missing:
        print(f"{found[name]}: {name} is not instantiated in {sys.argv[2]}")
    print(f"{len(found)} class templates, {len(missing)} missing: {' '.join(found)}")
    sys.exit(1 if missing or len(found) < 10 else 0)


if __name__ == "__main__":
    main()
