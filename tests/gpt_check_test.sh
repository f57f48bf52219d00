#!/usr/bin/env bash
# A whole training under CheckedDevice, in every way that memory moves: no report, and the bits of the unchecked one.
#
#   gpt_check_test.sh TRAIN_GPT
set -uo pipefail
train_gpt=$(realpath "$1")
text=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../examples/gpt/text/war_and_peace.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
head -c 100000 "$text" >text.txt

checks=0
failures=0
check() {  # WHAT COMMAND...
  local what=$1
  shift
  checks=$((checks + 1))
  "$@" && return
  failures=$((failures + 1))
  echo "FAILED: $what"
}
field() { tail -n 1 "$1" | sed -n 's/.*"'"$2"'": *"\{0,1\}\([^,"}]*\).*/\1/p'; }
run() {  # NAME ARGS...
  local name=$1
  shift
  "$train_gpt" --data text.txt --layers 9 --channels 32 --heads 2 --context 16 --batch 2 --micro-batches 2 --page 4KiB \
    --steps 3 --decay-steps 4 --eval-batches 2 --eval-every 2 --sample 3 --summary json "$@" >"$name.out" 2>"$name.err"
}

for type in fp32 bf16; do
  run plain --dtype $type
  check "$type: the unchecked run" test $? -eq 0
  expected=$(field plain.out digest)
  check "$type: it says that it is unchecked" test "$(field plain.out check)" = false
  for options in "" "--offload all --depth 1" "--offload all --depth 64" "--offload optimizer --depth 2" "--offload activations --depth 3" "--offload all --depth 2" \
    "--offload all --depth 4" "--offload all --recompute 4" "--offload activations --keep-last 3 --depth 4" \
    "--offload all --keep-last 2 --recompute 3 --depth 2" "--offload all --share-slots --depth 2" \
    "--offload all --share-slots --depth 3 --recompute 2" "--offload all --share-slots --depth 4 --keep-last 2"; do
    # shellcheck disable=SC2086
    run checked --check --dtype $type $options
    code=$?
    check "$type $options: $(head -c 2000 checked.err)" test $code -eq 0
    check "$type $options: it says that it was checked" test "$(field checked.out check)" = true
    check "$type $options: the same bits" test "$(field checked.out digest)" = "$expected"
  done
done

# Saved and gone on with, checked.
run first --check --offload all --steps 2 --decay-steps 3 --save saved
code=$?
check "saving: $(head -c 2000 first.err)" test $code -eq 0
run second --check --offload all --share-slots --resume saved --steps 3 --decay-steps 3
code=$?
check "going on: $(head -c 2000 second.err)" test $code -eq 0
run whole --decay-steps 3
check "the same bits after going on" test "$(field second.out digest)" = "$(field whole.out digest)"

# A pool holds depth + 1 slots, each as large as the larger of both needs: what is estimated is what is taken.
run shared --offload all --share-slots --hbm 1GiB
peak=$(field shared.out peak_hbm_bytes)
check "bytes move through the shared slots" test "$(field shared.out h2d_bytes)" -gt 0
run exactly --offload all --share-slots --hbm "$peak"
check "the peak is enough of a limit" test $? -eq 0
run less --offload all --share-slots --hbm "$((peak - 1))"
check "one byte less is not" test $? -eq 3

echo "$checks checks, $failures failed"
[ "$failures" -eq 0 ]
