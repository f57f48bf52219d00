#!/usr/bin/env bash
# What the trainer does with bad input, under a limit that is too low, on Ctrl-C, and when it goes on from a file.
#   gpt_cli_test.sh TRAIN_GPT
set -uo pipefail
train_gpt=${1:?usage: gpt_cli_test.sh TRAIN_GPT}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

failures=0
checks=0
fail() { echo "FAILED: $*" >&2; failures=$((failures + 1)); }
ok() { checks=$((checks + 1)); }
check() { ok; local what=$1; shift; "$@" || fail "$what"; }

head -c 20000 "$root/examples/gpt/text/war_and_peace.txt" >text.txt
small=(--data text.txt --layers 3 --channels 16 --heads 2 --context 16 --batch 2 --page 4KiB)

# run WANTED_CODE ARGS...: the output in `out`, errors in `err`.
run() {
  local wanted=$1 code
  shift
  "$train_gpt" "$@" >out 2>err
  code=$?
  ok
  [ "$code" -eq "$wanted" ] || fail "exit code $code, not $wanted: train_gpt $* ($(head -c 300 err))"
}
# refused PATTERN ARGS...: exit code 2 and one line on standard error that matches.
refused() {
  local pattern=$1
  shift
  run 2 "$@"
  [ "$(wc -l <err)" -eq 1 ] || fail "not one line on standard error: train_gpt $*: $(cat err)"
  grep -q "^train_gpt: " err || fail "no name before the message: train_gpt $*: $(cat err)"
  grep -q -- "$pattern" err || fail "no '$pattern' in the message: train_gpt $*: $(cat err)"
}
# field NAME: a field of the summary, which is the last line of `out`.
field() { tail -n 1 out | python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
# Every line of the log is whole and JSON.
whole_log() {
  python3 - "$1" <<'PYTHON'
import json, sys
text = open(sys.argv[1]).read()
assert text.endswith("\n"), "the last line is not whole"
events = [json.loads(line)["event"] for line in text.splitlines()]
print(*events)
PYTHON
}

# --- options --------------------------------------------------------------------------------------------------------
run 0 --help
check "help on standard output" grep -q -- "--offload" out
check "nothing on standard error" test ! -s err
run 0 --version
refused "--data is required"
refused "--nonsense" --nonsense
refused "stray" "${small[@]}" stray
refused "does not divide" "${small[@]}" --channels 30 --heads 4
refused "--layers" "${small[@]}" --layers 0
refused "--batch" "${small[@]}" --batch -1
refused "--context" "${small[@]}" --context 18446744073709551616
refused "--hbm" "${small[@]}" --hbm 99999999999GiB
refused "--page" "${small[@]}" --page 0
refused "--lr" "${small[@]}" --lr nan
refused "--page" "${small[@]}" --page 512
refused "4 EiB" "${small[@]}" --layers 1000000 --channels 1000000 --heads 1
refused "--save-every needs --save" "${small[@]}" --save-every 2

refused "overlap" "${small[@]}" --keep-last 2 --recompute 2
refused "--share-slots" "${small[@]}" --share-slots
refused "--share-slots" "${small[@]}" --share-slots --offload optimizer

# --- no file that is written is one that is read --------------------------------------------------------------------
cp text.txt precious.txt
ln precious.txt hard.txt
ln -s precious.txt soft.txt
mkdir folder && cp text.txt folder/part.txt
ln -s ../folder/part.txt folder_link.txt
for other in precious.txt ./precious.txt hard.txt soft.txt "$PWD/precious.txt"; do
  refused "--data" "${small[@]}" --data precious.txt --log "$other"
  refused "--data" "${small[@]}" --data precious.txt --save "$other"
done
refused "--save" "${small[@]}" --log both --save both
refused "folder of --data" "${small[@]}" --data folder --log folder/log
refused "folder of --data" "${small[@]}" --data folder --save folder/below/save
check "the data is as it was" cmp text.txt precious.txt
check "the folder is as it was" test "$(ls folder)" = part.txt
run 0 "${small[@]}" --steps 1 --decay-steps 3 --save first.ckpt
cp first.ckpt kept.ckpt
refused "--resume" --resume first.ckpt --log first.ckpt --steps 2
check "the saved file is as it was" cmp first.ckpt kept.ckpt
run 0 --resume first.ckpt --save first.ckpt --steps 2  # on to itself is how one goes on

# --- data -----------------------------------------------------------------------------------------------------------
: >empty.txt
head -c 100 text.txt >short.txt
mkdir empty_folder
python3 - <<'PYTHON'
import array
def shard(name, tokens, count=None, magic=20240520, version=1):
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    with open(name, "wb") as file:
        array.array("i", header).tofile(file)
        array.array("H", tokens).tofile(file)
good = [i * 7919 % 100 for i in range(3000)]
shard("good.bin", good)
shard("magic.bin", good, magic=1)
shard("version.bin", good, version=2)
shard("cut.bin", good, count=3001)
shard("range.bin", good[:-1] + [50257])
PYTHON
refused "no such file" "${small[@]}" --data missing.txt
refused "empty" "${small[@]}" --data empty.txt
refused "too few" "${small[@]}" --data short.txt
refused "no file" "${small[@]}" --data empty_folder
refused "not a token shard" "${small[@]}" --data magic.bin
refused "version 2" "${small[@]}" --data version.bin
refused "truncated" "${small[@]}" --data cut.bin
refused "50257, not below" "${small[@]}" --data range.bin
refused "not below the vocabulary of 50" "${small[@]}" --data good.bin --vocab 50
run 0 "${small[@]}" --data good.bin --vocab 100 --steps 1 --summary json
check "a loss from a shard" test "$(field steps)" = 1

# --- files that are written -----------------------------------------------------------------------------------------
refused "--log" "${small[@]}" --log no_folder/log.jsonl
refused "--log" "${small[@]}" --log .
refused "--log" "${small[@]}" --steps 1 --log /dev/full
refused "--save" "${small[@]}" --save no_folder/a.ckpt
refused "--save" "${small[@]}" --save .
refused "--save" "${small[@]}" --save /dev/null
check "/dev/null is still there" test -c /dev/null

# --- a run, its log and summary -------------------------------------------------------------------------------------
run 0 "${small[@]}" --steps 3 --offload all --log log.jsonl --summary json --sample 20 --eval-every 2
for name in steps first_loss final_loss val_loss bigram_loss digest peak_hbm_bytes hbm_limit_bytes host_bytes \
  h2d_bytes d2h_bytes stall_seconds step_seconds_median tokens_per_second offload depth page_bytes; do
  check "$name in the summary" test -n "$(field "$name")"
done
check "whole log" test "$(whole_log log.jsonl)" = "start step step evaluation step evaluation summary"
check "nothing on standard error" test ! -s err

# --- 10 steps are 5, saved, and 5 more ------------------------------------------------------------------------------
# Different places for the state in the two halves; they are no part of the file.
for dtype in fp32 bf16; do
  run 0 "${small[@]}" --dtype $dtype --steps 10 --save whole.ckpt --summary json
  expected=$(field digest)
  run 0 "${small[@]}" --dtype $dtype --steps 5 --decay-steps 10 --save half.ckpt --offload all --log resumed.jsonl
  run 0 --resume half.ckpt --page 64KiB --save half.ckpt --threads 2 --log resumed.jsonl --summary json
  check "digest of a resumed $dtype run" test "$(field digest)" = "$expected"
  check "ten steps in all" test "$(field steps)" = 10
  check "same $dtype file" cmp whole.ckpt half.ckpt
  check "the log goes on" test "$(whole_log resumed.jsonl | tr ' ' '\n' | grep -c step)" = 10
  # What is at its end already is evaluated, changes nothing, and ends well.
  run 0 --resume half.ckpt --save again.ckpt --summary json
  check "digest of a finished $dtype run" test "$(field digest)" = "$expected"
  check "a finished run saves what it read" cmp whole.ckpt again.ckpt
done
run 0 "${small[@]}" --steps 6 --save a.ckpt --save-every 4
refused "was saved with layers 3, not 4" --resume a.ckpt --layers 4
refused "other data" --resume a.ckpt --data good.bin --steps 9
refused "missing.ckpt" --resume missing.ckpt
refused "not a file that train_gpt saved" --resume text.txt
head -c 5000 a.ckpt >cut.ckpt
refused "damaged" --resume cut.ckpt
python3 -c 'b = bytearray(open("a.ckpt", "rb").read()); b[1000] ^= 1; open("altered.ckpt", "wb").write(b)'
refused "damaged" --resume altered.ckpt

# A save for which there is no room ends in an error and leaves the file that was there.
cp a.ckpt before.ckpt
(trap '' XFSZ; ulimit -f 16; "$train_gpt" "${small[@]}" --steps 1 --save a.ckpt >out 2>err)
code=$?
check "exit code $code of a save without room" test $code -ne 0
check "a message of a save without room" test -s err
check "no crash" test $code -lt 126
check "the previous file" cmp a.ckpt before.ckpt
check "nothing beside it" test ! -e a.ckpt.partial

# --- over the limit: what fills HBM, how much is missing, and options under which it does fit -----------------------
# over LIMIT ARGS...: does not fit; then runs with the options that the message names, under the same limit.
over() {
  local limit=$1 words
  shift
  run 3 "$@" --hbm "$limit" --steps 1
  [ "$(wc -l <err)" -eq 1 ] || fail "not one line on standard error under $limit: $(cat err)"
  check "the missing bytes under $limit" grep -q "([0-9]* bytes) more than the limit" err
  for role in weights gradients activations workspace; do check "$role under $limit" grep -q "$role [0-9]" err; done
  words=$(sed -n 's/.*It fits with\( --[^(]*\) (.*/\1/p' err)
  if [ -z "$words" ]; then
    fail "no options named under $limit: $(cat err)"
    return
  fi
  # shellcheck disable=SC2086  # the options are words
  run 0 "$@" --hbm "$limit" --steps 1 --summary json $words
  check "the peak under $limit" test "$(field peak_hbm_bytes)" -le "$(field hbm_limit_bytes)"
}
deep=(--data text.txt --layers 12 --channels 32 --heads 2 --context 32 --batch 4)
run 0 "${deep[@]}" --steps 1 --summary json
resident=$(field peak_hbm_bytes)
digest=$(field digest)
run 0 "${deep[@]}" --steps 1 --summary json --hbm "$resident"
check "the digest at the very limit" test "$(field digest)" = "$digest"
run 0 "${deep[@]}" --steps 1 --summary json --hbm 1024TiB
check "the digest under a limit that no machine has" test "$(field digest)" = "$digest"
for percent in 99 80 60 50; do over $((resident * percent / 100)) "${deep[@]}"; done
over $((resident - 1)) "${deep[@]}"
over $((resident * 70 / 100)) "${deep[@]}" --dtype bf16 --micro-batches 2
run 3 "${deep[@]}" --hbm 4096
check "no option is named where none helps" grep -q "None of the options tried makes it fit" err
# Wherever one of these fits, options are found.
flat=(--data text.txt --layers 3 --channels 32 --heads 4 --context 64 --batch 12)
for least in "--page 4KiB --depth 1" "--page 64KiB --depth 2 --recompute 3" "--page 1KiB --depth 1 --recompute 3"; do
  # shellcheck disable=SC2086
  run 0 "${flat[@]}" --offload all --steps 1 --summary json $least
  limit=$(field peak_hbm_bytes)
  over "$limit" "${flat[@]}" --offload activations
  over "$limit" "${flat[@]}" --keep-last 2
done
run 3 "${deep[@]}" --hbm $((resident * 60 / 100)) --offload all --share-slots --depth 8 --page 1MiB
check "options are named for shared slots" grep -q "It fits with" err
run 0 "${small[@]}" --offload all --depth 300 --steps 1
run 0 "${small[@]}" --offload all --share-slots --depth 300 --steps 1
# Without a limit it is the machine's memory that is too small; a log that is there stays as it was.
echo '{"event":"before"}' >kept.jsonl
run 3 "${small[@]}" --batch 1048576 --context 1024 --log kept.jsonl
check "the missing bytes on this machine" grep -q "([0-9]* bytes) more than the limit" err
check "what the machine has" grep -q "what this machine has left: " err
check "a log of before" test "$(cat kept.jsonl)" = '{"event":"before"}'
run 3 "${small[@]}" --hbm 4096 --log kept.jsonl
check "a log of before" test "$(cat kept.jsonl)" = '{"event":"before"}'

# --- Ctrl-C ends after the step, with a whole log, and saves --------------------------------------------------------
"$train_gpt" "${small[@]}" --steps 1000000 --decay-steps 20 --log int.jsonl --save int.ckpt --offload all >out 2>err &
pid=$!
for _ in $(seq 600); do
  [ "$(grep -c '"event":"step"' int.jsonl 2>/dev/null)" -ge 3 ] 2>/dev/null && break
  sleep 0.05
done
kill -INT $pid
wait $pid
check "exit code of Ctrl-C" test $? -eq 130
check "a whole log after Ctrl-C" test -n "$(whole_log int.jsonl)"
steps=$(grep -c '"event":"step"' int.jsonl)
run 0 --resume int.ckpt --steps $((steps + 2)) --save int.ckpt --summary json
resumed=$(field digest)
run 0 "${small[@]}" --steps $((steps + 2)) --decay-steps 20 --save straight.ckpt --summary json
check "digest after Ctrl-C and resume" test "$(field digest)" = "$resumed"
check "file after Ctrl-C and resume" cmp int.ckpt straight.ckpt

# --- Ctrl-C while sampling: what was trained is saved already -------------------------------------------------------
"$train_gpt" "${small[@]}" --steps 2 --sample 100000000 --save sampled.ckpt --log sampled.jsonl >out 2>err &
pid=$!
for _ in $(seq 600); do
  [ -s sampled.ckpt ] && grep -q '"event":"evaluation"' sampled.jsonl && break
  sleep 0.05
done
kill -INT $pid
wait $pid
check "exit code of Ctrl-C while sampling" test $? -eq 130
check "a whole log after Ctrl-C while sampling" test -n "$(whole_log sampled.jsonl)"
run 0 --resume sampled.ckpt --steps 2
# ... and while evaluating; a second one ends it at once.
"$train_gpt" "${small[@]}" --data "$root/examples/gpt/text/war_and_peace.txt" --steps 1 --eval-batches 1000000 --save evaluated.ckpt >out 2>err &
pid=$!
for _ in $(seq 600); do
  [ -s evaluated.ckpt ] && break
  sleep 0.05
done
kill -INT $pid
wait $pid
check "exit code of Ctrl-C while evaluating" test $? -eq 130
run 0 --resume evaluated.ckpt --steps 1 --eval-batches 1

# --- a terminal gets a bar, a pipe does not -------------------------------------------------------------------------
run 0 "${small[@]}" --steps 2
check "no control characters in a pipe" bash -c '! grep -q "[[:cntrl:]]" out'
python3 - "$train_gpt" "${small[@]}" --steps 3 >terminal <<'PYTHON'
import pty, sys
sys.exit(pty.spawn(sys.argv[1:]) != 0)
PYTHON
check "a bar on a terminal" grep -q "left" terminal

echo "$checks checks, $failures failed"
[ $failures -eq 0 ]
