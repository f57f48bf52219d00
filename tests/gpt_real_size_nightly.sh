#!/usr/bin/env bash
# The size of a real model: GPT-2 with 124 million parameters, context 1024, under 60 % of the HBM it takes resident.
# Neither state alone is enough to page; both together fit, and every bit is that of the resident run.
#   gpt_real_size_nightly.sh TRAIN_GPT [RESULT.json]
# Needs about 8 GiB of memory and some minutes. With RESULT.json the figures are written there.
set -euo pipefail
train_gpt=${1:?usage: gpt_real_size_nightly.sh TRAIN_GPT [RESULT.json]}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec python3 - "$train_gpt" "$root/examples/gpt/text/war_and_peace.txt" "${2:-}" <<'PYTHON'
import json, subprocess, sys

train_gpt, text, result = sys.argv[1:]
base = [train_gpt, "--model", "gpt2", "--vocab", "50257", "--context", "1024", "--batch", "1", "--steps", "2", "--data", text,
        "--eval-batches", "1", "--summary", "json"]


def run(*more):
    done = subprocess.run(base + [str(word) for word in more], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def summary(out):
    return json.loads(out.splitlines()[-1])


code, out, err = run("--offload", "none")
assert code == 0, err
resident = summary(out)
limit = resident["peak_hbm_bytes"] * 60 // 100 // 256 * 256
for one in ("none", "optimizer", "activations"):
    code, out, err = run("--offload", one, "--hbm", limit)
    assert code == 3, f"--offload {one} under {limit} bytes ended with {code}: {err}"
    print(err.strip())
code, out, err = run("--offload", "all", "--hbm", limit)
assert code == 0, err
paged = summary(out)
for name, run_of in (("resident", resident), ("paged", paged)):
    print(name, json.dumps(run_of))
assert paged["digest"] == resident["digest"], "the digests differ"
assert paged["peak_hbm_bytes"] <= limit
print(f"the same digest in {paged['peak_hbm_bytes'] / resident['peak_hbm_bytes']:.3f} of the HBM,"
      f" step time x {paged['step_seconds_median'] / resident['step_seconds_median']:.2f}")
if result:
    json.dump({"limit": limit, "resident": resident, "paged": paged}, open(result, "w"), indent=2)
PYTHON
