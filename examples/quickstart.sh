#!/usr/bin/env bash
# Builds the trainer and shows what paging does, on the CPU, with real text (examples/gpt/text/SOURCE.md):
#   1. a deep model, three short runs: resident without a limit, resident under an HBM limit, offloaded under it;
#   2. a longer training, offloaded, under a limit that does not hold it resident, against a bigram model.
# Installs what is missing (Debian: apt-get, as root); where everything is there it needs neither root nor network.
# Ends with a non-zero exit status when anything is not as told here. About 5 minutes on 2 cores.
#
#   bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "quickstart: $*" >&2; exit 1; }

# --- what is missing ------------------------------------------------------------------------------------------------
packages=()
need_command() { command -v "$1" >/dev/null || packages+=("$2"); }
need_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ] || packages+=("$2"); }
need_command g++ g++
need_command cmake cmake
need_command ninja ninja-build
need_command pkg-config pkg-config
need_header CLI/CLI.hpp libcli11-dev
need_header nlohmann/json.hpp nlohmann-json3-dev
need_header zlib.h zlib1g-dev
pkg-config --exists openblas 2>/dev/null || packages+=(libopenblas-dev)
if [ ${#packages[@]} -gt 0 ]; then
  echo "installing ${packages[*]}"
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    fail "missing; run as root: apt-get install ${packages[*]}"
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q && apt-get install -qq -y --no-install-recommends "${packages[@]}"
fi

# --- build ----------------------------------------------------------------------------------------------------------
out=build/quickstart
mkdir -p $out
echo "building (the compiler's words are in $out/build.log)"
# A compiler newer than those hbmoff is tested with may warn of something; that is no reason to stop here.
{ cmake --preset release --compile-no-warning-as-error && cmake --build --preset release --target train_gpt; } \
  >$out/build.log 2>&1 || { tail -n 40 $out/build.log; fail "the build failed"; }
train_gpt=build/release/bin/train_gpt
text=examples/gpt/text/war_and_peace.txt
[ "$(wc -c <$text)" -ge 1000000 ] || fail "$text is smaller than 1 MB"

# summary RUN NAME: a field of the JSON object that is the last line of the run's output.
summary() { tail -n 1 "$out/$1.out" | sed -n 's/.*"'"$2"'": *"\{0,1\}\([^,"}]*\).*/\1/p'; }
in_mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
mib() { in_mib "$(summary "$1" "$2")"; }
rounded() { printf "%.${3:-4}f" "$(summary "$1" "$2")"; }
holds() { awk "BEGIN { exit !($1) }"; }
# run NAME ARGS...: puts the exit code into `code`.
run() {
  local name=$1
  shift
  code=0
  "$train_gpt" --data $text --summary json "$@" >"$out/$name.out" 2>"$out/$name.err" || code=$?
}

# --- 1. one model, three ways ---------------------------------------------------------------------------------------
limit=56MiB
limit_bytes=$((56 << 20))
deep=(--layers 16 --channels 128 --heads 4 --context 64 --batch 12 --steps 5 --eval-batches 2 --page 512KiB)
echo
echo "A model of 16 layers, 5 steps; HBM limit $limit."
run resident "${deep[@]}" --offload none
[ $code -eq 0 ] || { cat $out/resident.err; fail "the resident run ended with exit code $code"; }
run over "${deep[@]}" --offload none --hbm $limit
[ $code -eq 3 ] || { cat $out/over.err; fail "the resident run under the limit ended with exit code $code, not 3"; }
run offloaded "${deep[@]}" --offload all --hbm $limit
[ $code -eq 0 ] || { cat $out/offloaded.err; fail "the offloaded run ended with exit code $code"; }

needs=$(sed -n 's/.* needs \([0-9.]* [KMG]iB\) of HBM.*/\1/p' $out/over.err)
row='%-24s %-22s %-22s %-22s\n'
echo
# shellcheck disable=SC2059  # the format is the table's
{
  printf "$row" "" "resident, no limit" "resident, $limit" "offloaded, $limit"
  printf "$row" "" "------------------" "------------------" "------------------"
  printf "$row" "result" "trained" "does not fit" "trained"
  printf "$row" "digest of all bits" "$(summary resident digest)" "-" "$(summary offloaded digest)"
  printf "$row" "final loss" "$(rounded resident final_loss)" "-" "$(rounded offloaded final_loss)"
  printf "$row" "HBM, peak" "$(mib resident peak_hbm_bytes)" "needs $needs" "$(mib offloaded peak_hbm_bytes)"
  printf "$row" "pinned host memory" "$(mib resident host_bytes)" "-" "$(mib offloaded host_bytes)"
  printf "$row" "moved to the device" "$(mib resident h2d_bytes)" "-" "$(mib offloaded h2d_bytes)"
  printf "$row" "moved to the host" "$(mib resident d2h_bytes)" "-" "$(mib offloaded d2h_bytes)"
  printf "$row" "seconds per step" "$(rounded resident step_seconds_median 3)" "-" \
    "$(rounded offloaded step_seconds_median 3)"
}
echo
echo "Resident under the limit, in its own words:"
sed 's/^/  /' $out/over.err

digest=$(summary resident digest)
if [ -z "$digest" ] || [ "$digest" != "$(summary offloaded digest)" ]; then fail "the digests differ"; fi
peak=$(summary offloaded peak_hbm_bytes)
kept=$((peak + $(summary offloaded host_bytes)))
[ "$peak" -le $limit_bytes ] || fail "the offloaded run took more HBM than the limit"
echo "Same digest. The offloaded run keeps $(in_mib $kept) in all tiers," \
  "$(awk "BEGIN { printf \"%.1f\", $kept / $limit_bytes }") times the limit."
holds "$kept >= 2 * $limit_bytes" || fail "that is less than twice the limit"

# --- 2. a longer training -------------------------------------------------------------------------------------------
limit=32MiB
steps=2000
shallow=(--layers 4 --channels 128 --heads 4 --context 64 --batch 12 --lr 3e-3 --warmup 100 --page 128KiB)
run over "${shallow[@]}" --hbm $limit --steps 1 --offload none
[ $code -eq 3 ] || fail "4 layers fit under $limit without offloading"
echo
echo "4 layers, $steps steps, offloaded under $limit (resident they do not fit), on $(wc -c <$text) bytes of prose:"
SECONDS=0
"$train_gpt" --data $text "${shallow[@]}" --hbm $limit --offload all --steps $steps \
  --eval-every 400 --eval-batches 100 --sample 400 --log $out/training.jsonl --summary json | tee $out/training.out |
  awk '!/^\{/ && (!/^step .*tok\/s/ || ++n % 100 == 1) { print; fflush() }' || fail "the training failed"
loss=$(summary training val_loss)
bigram=$(summary training bigram_loss)
echo
echo "$steps steps in $SECONDS s. Held-out tenth: $(rounded training val_loss) nats per byte," \
  "a bigram model of the same text $(rounded training bigram_loss);" \
  "ratio $(awk "BEGIN { printf \"%.3f\", $loss / $bigram }"), to reach 0.85."
holds "$loss <= 0.85 * $bigram" || fail "the ratio is above 0.85"
echo "Everything as told. The runs' output is in $out/."
