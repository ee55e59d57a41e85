#!/usr/bin/env bash
# Everything that a GPU is wanted for, in one call of at most ten minutes: does a step run, is every kernel right, is cuDNN's
# attention, its profile, how well steps are predicted, one rank of a large plan, how fast the kernels are, NCCL with a world of one. In
# the order of their worth; every part has a share of the time and goes on whatever became of the others.
#
#   first_hour.sh [PATH OF foretrain] [FOLDER FOR RESULTS] [PARTS..]
#
# In the folder, after every part: summary.txt, to be read first; gpu.json, the profile; parts.tar.gz, what each part said
# (NAME.json) and complained of (NAME.log). Parts that are named are run alone, and find the profile of an earlier call
# there. Exit code: the number of parts that failed. FIRST_HOUR_SECONDS: how long all of it may take [580].
set -u
begin=$SECONDS
program=${1:-./target/release/foretrain}
out=${2:-./first_hour}
shift $(($# < 2 ? $# : 2))
wanted=" $* "
mkdir -p "$out" || exit 2
program=$(command -v "$program" || echo "$program")
cd "$(dirname "$0")/../.." || exit 2
case $out in /*) ;; *) out=$OLDPWD/$out ;; esac
case $program in /*) ;; *) program=$OLDPWD/$program ;; esac
# Compiled kernels and the parts stay out of the results' folder, which may have to be carried home file by file.
work=${FIRST_HOUR_WORK:-${TMPDIR:-/tmp}/first_hour}
mkdir -p "$work/parts" || exit 2
export FORETRAIN_CACHE=${FORETRAIN_CACHE:-$work/kernels} FORETRAIN_TIMEOUT=${FORETRAIN_TIMEOUT:-30}
profile=$out/gpu.json

failed=0
say() { printf '%-19s exit %3s  %4s s  %s\n' "$@" | tee -a "$out/summary.txt"; }
# part SECONDS NAME WORDS..: `foretrain WORDS`, its JSON in NAME.json.
part() {
  local limit=$1 name=$2 begun=$SECONDS code why=""
  shift 2
  if [ "$wanted" != "  " ]; then case $wanted in *" $name "*) ;; *) return ;; esac; fi
  local left=$((${FIRST_HOUR_SECONDS:-580} - (SECONDS - begin)))
  [ $limit -gt $left ] && limit=$left
  if [ $limit -lt 5 ]; then
    failed=$((failed + 1))
    say "$name" - 0 "no time was left"
    return
  fi
  timeout -k 5 "$limit" "$program" "$@" --json > "$work/parts/$name.json" 2> "$work/parts/$name.log"
  code=$?
  if [ $code -ne 0 ]; then
    failed=$((failed + 1))
    # The last words say why; with --json they are in the JSON.
    why=$(tr '\n' ' ' < "$work/parts/$name.json" | grep -o '"\(error\|wrong\)": *"[^"]*"' | tail -n 1 | cut -c1-300)
    [ -z "$why" ] && why=$(tail -n 3 "$work/parts/$name.log" | tr '\n' ' ' | cut -c1-300)
    [ $code -eq 124 ] && why="not done in $limit s"
    [ $code -ge 128 ] && why="signal $((code - 128)): $why"
  fi
  say "$name" $code $((SECONDS - begun)) "$why"
  tar -C "$work" -czf "$out/parts.tar.gz" parts
}

[ "$wanted" = "  " ] && : > "$out/summary.txt"
nvidia-smi > "$work/parts/nvidia-smi.txt" 2>&1 || true
"$program" --version > "$work/parts/version.txt" 2>&1 || { echo "no program at $program" | tee -a "$out/summary.txt"; exit 2; }

part  60 run1     run --on cuda --check --attention own
part 150 selftest selftest --on cuda
# cuDNN's attention, and from here on our own where that did not go well. A part's exit code is what the summary says of it.
for group in forward backward onto backward_onto head_dims narrow_values; do
  part 20 "cudnn_$group" selftest --on cuda --attention cudnn --group "attention_$group"
done
part  30 run4c    run --on cuda --devices 0 --ring 4 --check --attention cudnn
if grep -qE '^(cudnn_[a-z_]+|run4c) +exit +[1-9-]' "$out/summary.txt"; then attention=own; else attention=best; fi
part 175 profile  calibrate --on cuda --quick --out "$profile" --attention $attention
part  30 validate1 validate --on cuda --profile "$profile" --seed 1
part  30 ring4    run --on cuda --devices 0 --ring 4 --check --attention own
part  40 validate4 validate --on cuda --profile "$profile" --ranks 4 --devices 0 --seed 11
part  15 planned  plan --model llama-3-8b --gpus 64 --dp 4 --ring 4 --ulysses 4 --seq-len 65536 --recompute full --out "$work/plan.json"
part  60 solo     validate --on cuda --profile "$profile" --plan "$work/plan.json" --solo 5 --repeat 2
part  50 speed    selftest --on cuda --group norms --speed --repeat 20
part  40 speedc   selftest --on cuda --group norms --speed --repeat 20 --attention cudnn
part  30 nccl     selftest --on cuda --group nccl
part  30 usp4     run --on cuda --devices 0 --ulysses 2 --ring 2 --check --attention own
part  30 validate2 validate --on cuda --profile "$profile" --seed 2

echo "$failed parts failed; summary.txt, gpu.json and parts.tar.gz are in $out" | tee -a "$out/summary.txt"
exit $failed
