#!/usr/bin/env bash
# Builds and runs every test, installing what is missing first (Debian: apt-get, as root). Where everything is there,
# it needs neither root nor network.
#
#   bash tests/run.sh [--nightly] [--stages LIST]
#
#   --nightly       adds the long tests (CTest label `nightly`)
#   --stages LIST   some of: dev,asan-ubsan,tsan,clang16,clang19,coverage,fuzz (default: all, comma-separated)
#
# Every build, every CTest test and every check counts once. The last line is `N passed, N failed`; the exit status is
# zero only when nothing failed. A test that is not run counts as failed; so does one that is skipped, unless it needs a
# GPU and HBMOFF_CUDART_STANDIN (see CONTRIBUTING.md) is not set.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

all_stages=dev,asan-ubsan,tsan,clang16,clang19,coverage,fuzz
stages=$all_stages
nightly=no
minimum_coverage=95

while [ $# -gt 0 ]; do
  case $1 in
    --nightly) nightly=yes ;;
    --stages) stages=${2:?--stages needs a list}; shift ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "tests/run.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
for stage in ${stages//,/ }; do
  case ,$all_stages, in *,"$stage",*) ;; *) echo "tests/run.sh: no stage $stage in $all_stages" >&2; exit 2 ;; esac
done
has_stage() { case ,$stages, in *,"$1",*) return 0 ;; *) return 1 ;; esac; }

passed=0
failed=0
report=()
finish() {
  echo
  printf '%s\n' "${report[@]}"
  if [ "$stages" != "$all_stages" ]; then echo "stages left out on request: all but $stages of $all_stages"; fi
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
  exit
}
pass() { passed=$((passed + 1)); report+=("passed  $1"); }
fail() { failed=$((failed + 1)); report+=("FAILED  $1"); }

# --- what is missing -------------------------------------------------------------------------------------------------

packages=()
need_command() { command -v "$1" >/dev/null || packages+=("$2"); }
need_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ] || packages+=("$2"); }

need_command g++ g++
need_command cmake cmake
need_command ninja ninja-build
need_command pkg-config pkg-config
need_command python3 python3
need_header doctest/doctest.h doctest-dev
need_header CLI/CLI.hpp libcli11-dev
need_header nlohmann/json.hpp nlohmann-json3-dev
need_header fmt/format.h libfmt-dev
need_header zlib.h zlib1g-dev
pkg-config --exists openblas 2>/dev/null || packages+=(libopenblas-dev)
if has_stage dev; then
  need_command clang-format-19 clang-format-19
  need_command clang-tidy-19 clang-tidy-19
  need_command valgrind valgrind
fi
if has_stage clang16; then need_command clang++-16 clang-16; fi
if has_stage clang19 || has_stage asan-ubsan; then need_command clang++-19 clang-19; fi
if has_stage asan-ubsan && [ ! -d /usr/lib/llvm-19/lib/clang/19/lib ]; then packages+=(libclang-rt-19-dev); fi
if has_stage coverage; then need_command gcovr gcovr; fi
if has_stage fuzz; then
  need_command clang++-19 clang-19
  compgen -G '/usr/lib/llvm-19/lib/clang/19/lib/*/*fuzzer*.a' >/dev/null || packages+=(libclang-rt-19-dev)
fi

if [ ${#packages[@]} -gt 0 ]; then
  echo "missing: ${packages[*]}"
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    fail "installing; run as root: apt-get install ${packages[*]}"
    finish
  fi
  export DEBIAN_FRONTEND=noninteractive
  if apt-get update -q && apt-get install -qq -y --no-install-recommends "${packages[@]}"; then
    pass "installed ${packages[*]}"
  else
    fail "installing ${packages[*]}"
    finish
  fi
fi

# --- building and running --------------------------------------------------------------------------------------------

# build PRESET: false when the tests cannot be run.
build() {
  local start=$SECONDS
  if cmake --preset "$1" && cmake --build --preset "$1" -- -k 0; then
    pass "build $1 ($((SECONDS - start)) s)"
  else
    fail "build $1"
    return 1
  fi
}

# run_tests NAME COMMAND...: runs a ctest command and counts each of its tests.
run_tests() {
  local name=$1 start=$SECONDS results=$PWD/build/ctest-$1.xml attributes
  shift
  rm -f "$results"
  "$@" --output-junit "$results"
  attributes=$(grep -m1 -A8 '<testsuite' "$results" 2>/dev/null | tr '\n' ' ')
  count() { sed -n "s/.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" <<<"$attributes"; }
  local tests failures disabled skipped
  tests=$(count tests) failures=$(count failures) disabled=$(count disabled) skipped=$(count skipped)
  if [ -z "$tests" ] || [ "$tests" -eq 0 ]; then
    fail "tests $name: none was run"
    return
  fi
  # Without a GPU, nor what stands in for one, tests that need it are skipped, and that is all right.
  if [ "${skipped:-0}" -gt 0 ] && [ -z "${HBMOFF_CUDART_STANDIN:-}" ]; then
    report+=("skipped tests $name: $skipped, for want of a GPU")
    tests=$((tests - skipped)) skipped=0
  fi
  local bad=$((failures + ${disabled:-0} + ${skipped:-0}))
  passed=$((passed + tests - bad))
  failed=$((failed + bad))
  local word=passed
  if [ "$bad" -gt 0 ]; then word=FAILED; fi
  report+=("$word  tests $name: $((tests - bad)) passed, $failures failed, $((${disabled:-0} + ${skipped:-0})) not run ($((SECONDS - start)) s)")
}

if has_stage dev && [ -n "${HBMOFF_CUDART_STANDIN:-}" ] && ! command -v nvcc >/dev/null; then
  fail "tests of CudaDevice: there is a stand-in for the CUDA runtime, but no nvcc"
fi
if has_stage dev && build dev; then
  run_tests dev ctest --preset dev
  if [ $nightly = yes ]; then run_tests nightly ctest --preset nightly; fi
elif [ $nightly = yes ]; then
  fail "nightly tests: they need the dev build"
fi

if has_stage asan-ubsan && build asan-ubsan; then run_tests asan-ubsan ctest --preset asan-ubsan; fi

if has_stage tsan && build tsan; then
  # GCC 12's ThreadSanitizer cannot map its shadow where the kernel randomises addresses by more than 28 bits.
  fixed_addresses=(setarch "$(uname -m)" -R)
  if ! "${fixed_addresses[@]}" true 2>/dev/null; then fixed_addresses=(); fi
  run_tests tsan "${fixed_addresses[@]}" ctest --preset tsan
fi

if has_stage clang16 && build clang16; then run_tests clang16 ctest --preset clang16; fi
# clang 19 has built everything in asan-ubsan; these tests compile by themselves.
if has_stage clang19; then
  if cmake --preset clang19; then run_tests clang19 ctest --preset clang19; else fail "configure clang19"; fi
fi

if has_stage coverage && build coverage; then
  find build/coverage \( -name '*.gcda' -o -path '*CompilerId*' -name '*.gcno' \) -delete
  run_tests coverage ctest --preset coverage
  start=$SECONDS
  if gcovr --root . --filter 'include/hbmoff/' --object-directory build/coverage --exclude-throw-branches -j 2 \
    --fail-under-line $minimum_coverage --txt build/coverage/lines.txt; then
    verdict=pass
  else
    verdict=fail
  fi
  cat build/coverage/lines.txt
  $verdict "line coverage $(sed -n 's/^TOTAL.* \([0-9]*%\).*/\1/p' build/coverage/lines.txt), at least $minimum_coverage% asked ($((SECONDS - start)) s)"
fi

# Searches with every fuzz target, two at a time, for HBMOFF_FUZZ_SECONDS in all (default: 3 minutes; nightly: 3 hours).
# What is found lies in build/fuzz/findings; what widened the search is kept in build/fuzz/corpus.
if has_stage fuzz && build fuzz; then
  fuzz_targets=(tests/fuzz/*_fuzz.cpp)
  fuzz_targets=("${fuzz_targets[@]##*/}")
  fuzz_targets=("${fuzz_targets[@]%_fuzz.cpp}")
  fuzz_seconds=180
  if [ $nightly = yes ]; then fuzz_seconds=10800; fi
  fuzz_seconds=$((${HBMOFF_FUZZ_SECONDS:-$fuzz_seconds} / ${#fuzz_targets[@]}))
  search() {  # search TARGET
    rm -rf "build/fuzz/findings/$1"
    mkdir -p "build/fuzz/corpus/$1" "build/fuzz/findings/$1"
    "build/fuzz/tests/$1_fuzz" "build/fuzz/corpus/$1" "tests/fuzz/corpus/$1" -max_len=1024 -len_control=0 -timeout=20 \
      -rss_limit_mb=2048 -max_total_time="$fuzz_seconds" -print_final_stats=1 \
      -artifact_prefix="build/fuzz/findings/$1/" >"build/fuzz/$1.log" 2>&1
    echo $? >"build/fuzz/$1.status"
  }
  for target in "${fuzz_targets[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge 2 ]; do wait -n; done
    search "$target" &
  done
  wait
  for target in "${fuzz_targets[@]}"; do
    tail -n 15 "build/fuzz/$target.log"
    if [ "$(cat "build/fuzz/$target.status")" -eq 0 ]; then
      pass "fuzz $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$target.log") programs in $fuzz_seconds s"
    else
      fail "fuzz $target: see build/fuzz/$target.log"
      grep -a FINDING -A4 "build/fuzz/$target.log"
      for reproducer in "build/fuzz/findings/$target"/*; do
        if [ -f "$reproducer" ]; then echo "reproducer of fuzz $target, base64: $(base64 -w0 "$reproducer")"; fi
      done
    fi
  done
fi

finish
