#!/usr/bin/env bash
# The trainer end to end, small enough for sanitizer builds: the digest is the same whatever is paged.
#   gpt_smoke_test.sh TRAIN_GPT
set -euo pipefail
train_gpt=${1:?usage: gpt_smoke_test.sh TRAIN_GPT}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
head -c 20000 "$root/examples/gpt/text/war_and_peace.txt" >"$work/text.txt"

digest() {
  local out
  out=$("$train_gpt" --data "$work/text.txt" --layers 8 --channels 16 --heads 2 --context 16 --batch 2 --micro-batches 2 \
    --steps 2 --eval-every 0 --page 4KiB --seed 1 --summary json "$@") || { echo "train_gpt $* failed" >&2; return 1; }
  tail -n 1 <<<"$out" | sed -n 's/.*"digest": *"\{0,1\}\([0-9a-zA-Zx]*\).*/\1/p'
}

expected=$(digest --offload none --threads 1)
[ -n "$expected" ] || { echo "no digest in the summary" >&2; exit 1; }
for options in "--offload optimizer --threads 1" "--offload activations --threads 2 --keep-last 1" \
  "--offload all --threads 2 --recompute 3 --depth 2"; do
  # shellcheck disable=SC2086  # the options are words
  found=$(digest $options)
  if [ "$found" != "$expected" ]; then
    echo "digest $found with $options, $expected without paging" >&2
    exit 1
  fi
done
echo "digest $expected, four times"
