#!/usr/bin/env bash
# Everything that a GPU is wanted for, in one call of at most ten minutes (the limits below add up to 575 s): is it right, how fast is it, its profile, how
# well steps are predicted, one rank of a large plan, NCCL with a world of one. Every part writes a file of its own,
# whatever became of the others, and has a share of the time; what it said is beside it as .log.
#
#   first_hour.sh [PATH OF foretrain] [FOLDER FOR RESULTS]
#
# What to read first: summary.txt. Exit code: the number of parts that failed.
set -u
program=${1:-./target/release/foretrain}
out=${2:-./first_hour}
mkdir -p "$out" || exit 2
program=$(command -v "$program" || echo "$program")
cd "$(dirname "$0")/../.." || exit 2
case $out in /*) ;; *) out=$OLDPWD/$out ;; esac
case $program in /*) ;; *) program=$OLDPWD/$program ;; esac
export FORETRAIN_CACHE=${FORETRAIN_CACHE:-$out/kernels} FORETRAIN_TIMEOUT=${FORETRAIN_TIMEOUT:-30}
# NVRTC, cuBLASLt and NCCL where they come as Python wheels.
wheels=$(python3 - 2>/dev/null <<'PYTHON'
import glob, site
folders = site.getsitepackages() + [site.getusersitepackages()]
found = {p.rsplit("/", 1)[0] for d in folders for p in glob.glob(d + "/nvidia/**/lib*.so*", recursive=True)}
print(":".join(sorted(found)))
PYTHON
)
export LD_LIBRARY_PATH=${wheels:+$wheels:}${LD_LIBRARY_PATH:-}

: > "$out/summary.txt"
failed=0
# part SECONDS NAME WORDS..: `foretrain WORDS`, its JSON in NAME.json.
part() {
  local limit=$1 name=$2 begun=$SECONDS code
  shift 2
  timeout "$limit" "$program" "$@" --json > "$out/$name.json" 2> "$out/$name.log"
  code=$?
  [ $code -ne 0 ] && failed=$((failed + 1))
  # The last words say why; with --json they are in the JSON.
  local why=""
  [ $code -ne 0 ] && why=$(cat "$out/$name.json" "$out/$name.log" | tr '\n' ' ' | grep -o '"error": *"[^"]*"\|error: .*' | tail -n 1 | cut -c1-300)
  [ $code -eq 124 ] && why="not done in $limit s"
  printf '%-12s exit %3d  %4d s  %s\n' "$name" $code $((SECONDS - begun)) "$why" | tee -a "$out/summary.txt"
}

nvidia-smi > "$out/nvidia-smi.txt" 2>&1 || true
"$program" --version > "$out/version.txt" 2>&1 || { echo "no program at $program" | tee -a "$out/summary.txt"; exit 2; }

part 130 selftest selftest --on cuda
part  50 speed    selftest --on cuda --group norms --speed --repeat 20
part  30 nccl     selftest --on cuda --group nccl
part  25 run1     run --on cuda --check
part  25 ring4    run --on cuda --devices 0 --ring 4 --check
part  25 usp4     run --on cuda --devices 0 --ulysses 2 --ring 2 --check
part 130 profile  calibrate --on cuda --quick --out "$out/gpu.json"
for seed in 1 2; do part 30 "validate$seed" validate --on cuda --profile "$out/gpu.json" --seed $seed; done
part  40 validate4 validate --on cuda --profile "$out/gpu.json" --ranks 4 --devices 0 --seed 11
part  15 planned  plan --model llama-3-8b --gpus 64 --dp 4 --ring 4 --ulysses 4 --seq-len 131072 --recompute full --out "$out/plan.json"
part  45 solo     validate --on cuda --profile "$out/gpu.json" --plan "$out/plan.json" --solo 5

echo "$failed parts failed; all files are in $out" | tee -a "$out/summary.txt"
exit $failed
