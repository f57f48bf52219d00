"""The report in README.md is what the example prints.

  readme_report.py README.md PROGRAM
"""

import pathlib
import re
import subprocess
import sys

text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
blocks = [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)]
printed = subprocess.run([sys.argv[2]], check=True, capture_output=True, text=True).stdout
printed = re.sub(r"at \S*(examples/check_ordering\.cpp)", r"at \1", printed)
reports = [block for block in blocks if "check_ordering.cpp" in block]
if len(reports) != 1:
    sys.exit(f"README.md has {len(reports)} reports, not one")
if reports[0] not in printed:
    sys.exit(f"README.md says\n{reports[0]}\nthe program prints\n{printed}")
print("the same")
