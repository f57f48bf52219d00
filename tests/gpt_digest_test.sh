#!/usr/bin/env bash
# The trainer's digest is the same wherever state lives and however it is paged, and the bytes it moves are those of a
# closed form worked out here from the list of tensors.
#   gpt_digest_test.sh TRAIN_GPT
set -euo pipefail
train_gpt=${1:?usage: gpt_digest_test.sh TRAIN_GPT}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec python3 - "$train_gpt" "$root/examples/gpt/text/war_and_peace.txt" <<'PYTHON'
import json, subprocess, sys, tempfile

train_gpt, text = sys.argv[1:]
MIB = 1 << 20
L, C, H, T, B, M, V, STEPS = 12, 256, 4, 16, 1, 2, 256, 2
WORK = tempfile.TemporaryDirectory()
short = WORK.name + "/text.txt"
open(short, "wb").write(open(text, "rb").read(20000))


def up(n, unit):
    return (n + unit - 1) // unit * unit


def tensors(layers):
    layer = [C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C]
    return [V * C, T * C] + layer * layers + [C, C]


def optimizer_pages(layers, dtype, page):
    """Bytes of each page: m, v and, for 16-bit weights, masters of the same elements side by side."""
    arrays = 2 if dtype == "fp32" else 3
    capacity = page // (4 * arrays) // 64 * 64
    pages, used = [], 0
    for count in tensors(layers):
        while count:
            start = up(used, 16)
            if start >= capacity:
                pages.append(used)
                used = 0
                continue
            taken = min(count, capacity - start)
            used = start + taken
            count -= taken
    pages.append(used)
    return [(arrays - 1) * up(4 * n, 256) + 4 * n for n in pages]


def bundle(dtype):
    """Bytes of a layer's offloaded tensors when all are, and when only its input is."""
    n, e = B * T, 4 if dtype == "fp32" else 2
    sizes = [C * e, C * e, 8, 3 * C * e, 4 * H, C * e, C * e, C * e, 8, 4 * C * e, 4 * C * e]
    return sum(up(n * s, 256) for s in sizes[:-1]) + n * sizes[-1], n * C * e


def moved(layers, dtype, offload, page, depth, keep_last=0, recompute=0):
    """Bytes each way in the whole run."""
    total = 0
    if offload in ("optimizer", "all"):
        pages = optimizer_pages(layers, dtype, page)
        assert len(pages) >= 2 * depth, (len(pages), depth)
        total += sum(pages)
    if offload in ("activations", "all"):
        whole, checkpoint = bundle(dtype)
        paged = [checkpoint if l < recompute else whole for l in range(layers - keep_last)]
        assert layers > 2 * depth
        # The last `depth` paged layers of the forward are the first of the backward and stay in their slots.
        total += M * sum(paged[: max(0, len(paged) - depth)])
    return STEPS * total


def run(dtype, offload, page=64 << 10, depth=3, layers=L, threads=1, keep_last=0, recompute=0, hbm=None):
    command = [train_gpt, "--data", short, "--layers", layers, "--channels", C, "--heads", H, "--context", T,
               "--batch", B, "--micro-batches", M, "--steps", STEPS, "--eval-batches", 1, "--seed", 3,
               "--dtype", dtype, "--offload", offload, "--page", page, "--depth", depth, "--threads", threads,
               "--keep-last", keep_last, "--recompute", recompute, "--summary", "json"]
    if hbm is not None:
        command += ["--hbm", hbm]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}: {' '.join(map(str, command))}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


runs = failures = 0


def check(what, found, expected):
    global failures
    if found != expected:
        failures += 1
        print(f"FAILED {what}: {found}, expected {expected}", file=sys.stderr)


for dtype in ("fp32", "bf16"):
    expected = run(dtype, "none")["digest"]
    settings = [dict(offload="none", threads=2), dict(offload="none", recompute=5, threads=2)]
    for page in (64 << 10, MIB, 7 * MIB):
        for depth in (2, 3, 4):
            settings.append(dict(offload="optimizer", page=page, depth=depth, threads=1 + depth % 2))
            settings.append(dict(offload="all", page=page, depth=depth, threads=2 - depth % 2,
                                 keep_last=depth - 2, recompute=0 if page == MIB else depth))
    for depth in (2, 3, 4):
        settings.append(dict(offload="activations", depth=depth, threads=depth // 2))
        settings.append(dict(offload="activations", depth=depth, keep_last=2, recompute=3))
        settings.append(dict(offload="all", depth=depth, recompute=L))
    for s in settings:
        found = run(dtype, **s)
        runs += 1
        what = f"{dtype} {s}"
        check(what + " digest", found["digest"], expected)
        closed = moved(L, dtype, s["offload"], s.get("page", 64 << 10), s.get("depth", 3), s.get("keep_last", 0),
                       s.get("recompute", 0))
        check(what + " h2d", found["h2d_bytes"], closed)
        check(what + " d2h", found["d2h_bytes"], closed)
        if s["offload"] != "none":
            check(what + " moves something", closed > 0, True)
        check(what + " takes what was predicted", found["peak_hbm_bytes"], found["hbm_limit_bytes"])

# What paging holds in HBM does not grow with the number of layers: of twice the layers, only weights, gradients and the
# optimizer's tables are twice as large.
one, two = (run("fp32", "all", page=MIB, layers=l) for l in (L, 2 * L))
parameters = [sum(up(t, 128) for t in tensors(l)) for l in (L, 2 * L)]
grown = two["peak_hbm_bytes"] - one["peak_hbm_bytes"]
weights_and_gradients = 2 * 4 * (parameters[1] - parameters[0])
tables = 12 * L * 200 + (parameters[1] - parameters[0]) // 4096 * 8 + len(optimizer_pages(L, "fp32", MIB)) * 64
check("twice the layers: less than weights and gradients grows", grown >= weights_and_gradients, True)
check("twice the layers: more than weights, gradients and tables grows", grown <= weights_and_gradients + tables + 8192, True)
check("twice the layers: the host holds twice as much", two["host_bytes"] > 1.7 * one["host_bytes"], True)

print(f"{runs} runs compared, {failures} failures")
sys.exit(failures != 0)
PYTHON
