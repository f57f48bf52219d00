"""Copies the library's headers so that every call that orders work can be left out at run time.

  ordering_sites.py INCLUDE_DIR OUT_DIR

Writes OUT_DIR/hbmoff/... and OUT_DIR/ordering_sites.hpp, which lists the sites: every call of a wait, a record or a
synchronisation in the headers above the devices. Lines keep their numbers. A call `f(x)` becomes
`(::ordering::kept(N) ? (void)(f(x)) : (void)0)`. SWAP is a place where two steps can be done in the wrong order.
A call that it cannot tell from a declaration, or whose name looks like one that orders work but is not in the list, is
an error: no site is left out in silence.
"""

import pathlib
import re
import shutil
import sys

NAMES = "wait|record|synchronize|order_before|order_releases_before|order_taken_before|order_behind_pool"
# Functions that hold such calls, which are sites themselves.
HOLDERS = {"record_free", "record_releases"}
LIKELY = r"\b(?P<name>\w*(?:wait|record|synchroni[sz]e|barrier|fence)\w*|order_\w+)\("
DECLARATION = re.compile(r"(\[\[\w+\]\] )?((static|inline|constexpr|friend) )*void")
# Devices are what is called; an observer's events carry times and order nothing.
LEFT_OUT = {"device", "core", "interop"}


# Two steps in the wrong order: (header, the right order, the wrong one).
SWAP = ("hbmoff/paging/prefetch_scheduler.hpp",
        "    if (page.slot->unrecorded) record_releases(*page.slot, at);\n"
        "    if (!page.slot->permanent) end_use(page, at);\n",
        "    if (::ordering::swapped()) { Slot<D>& s = *page.slot; if (!s.permanent) end_use(page, at); if (s.unrecorded) record_releases(s, at); return; }\n"
        "    { if (page.slot->unrecorded) record_releases(*page.slot, at); } if (!page.slot->permanent) end_use(page, at);\n")


def matching(text, opening):
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise SystemExit("unbalanced parentheses")


def receiver_start(text, end):
    """Where the expression that ends at `end` (behind its `.` or `->`) begins."""
    i = end
    while i > 0:
        c = text[i - 1]
        if c in ")]":
            depth, i = 1, i - 1
            while depth:
                i -= 1
                depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(text[i], 0)
        elif c.isalnum() or c in "_.*":
            i -= 1
        elif text[i - 2:i] == "->":
            i -= 2
        else:
            break
    return i


def rewrite(path, text, sites):
    out, done = [], 0
    for match in re.finditer(LIKELY, text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        line = text[line_start:text.find("\n", match.start())]
        before = text[line_start:match.start()]
        if before.lstrip().startswith("//") or "//" in before:
            continue
        if match.group("name") in HOLDERS:
            continue
        if not re.fullmatch(NAMES, match.group("name")):
            raise SystemExit(f"{path}: does this order work? Name it in {pathlib.Path(__file__).name}: {line.strip()}")
        start = match.start()
        if before.endswith((".", "->")):
            start = receiver_start(text, match.start())
            before = text[line_start:start]
        # A call stands behind nothing, a parenthesis, a brace, `return` or `else`.
        lead = before.strip()
        if DECLARATION.fullmatch(lead):
            continue
        if lead and not re.search(r"([({;]|\)|return|else)$", lead):
            raise SystemExit(f"{path}: neither a declaration nor a call by itself: {line.strip()}")
        if start < done:
            raise SystemExit(f"{path}: nested sites")
        end = matching(text, match.end() - 1) + 1
        if text[end:end + 1] != ";":
            raise SystemExit(f"{path}: a call that is no statement: {line}")
        number = len(sites)
        sites.append((path, text.count("\n", 0, start) + 1, " ".join(text[start:end].split())))
        out.append(text[done:start])
        out.append(f"(::ordering::kept({number}) ? (void)({text[start:end]}) : (void)0)")
        done = end
    out.append(text[done:])
    return "".join(out)


def main():
    source, target = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(target, ignore_errors=True)
    sites = []
    for header in sorted(source.rglob("*.hpp")):
        relative = header.relative_to(source)
        text = header.read_text(encoding="utf-8")
        if str(relative) == SWAP[0]:
            if SWAP[1] not in text:
                raise SystemExit(f"{relative}: the place of the swap was not found")
            text = text.replace(SWAP[1], SWAP[2])
        if len(relative.parts) > 2 and relative.parts[1] not in LEFT_OUT:
            text = rewrite(str(relative), text, sites)
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        (target / relative).write_text(text, encoding="utf-8")
    if len(sites) < 30:
        raise SystemExit(f"only {len(sites)} sites were found: the pattern no longer fits the sources")
    lines = "".join('    {"%s", %d, "%s"},\n' % (p, n, t.replace("\\", "\\\\").replace('"', '\\"')) for p, n, t in sites)
    (target / "ordering_sites.hpp").write_text(f"""// Made by ordering_sites.py.
#pragma once
namespace ordering {{
struct Site {{
  const char* file;
  int line;
  const char* call;
}};
inline constexpr Site sites[] = {{
{lines}}};
inline constexpr int site_count = {len(sites)};
}}  // namespace ordering
""", encoding="utf-8")


main()
