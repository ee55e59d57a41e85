#!/usr/bin/env bash
# Everything that a GPU is wanted for, in a quarter of an hour or less: is every kernel right, how fast are they, beside
# PyTorch too where that is there, the GPU's profile, how well steps are predicted that calibration has not seen, one rank
# of a large plan, NCCL with a world of one.
#
#   measure_gpu.sh [PATH OF foretrain] [FOLDER FOR RESULTS] [PARTS..]
#
# In the folder, when it ends: summary.txt, to be read first; NAME.json, what each part said; gpu.json, the profile. A part
# that fails ends no other. Parts that are named are run alone, and find the profile of an earlier call in the folder. Exit
# code: the number of parts that failed.
set -u
program=$(realpath "${1:-target/release/foretrain}")
out=${2:-measured}
shift $(($# < 2 ? $# : 2))
wanted=" $* "
mkdir -p "$out" || exit 2
out=$(realpath "$out")
cd "$(dirname "$0")/../.." || exit 2
export FORETRAIN_CACHE=${FORETRAIN_CACHE:-${TMPDIR:-/tmp}/foretrain-kernels} FORETRAIN_TIMEOUT=${FORETRAIN_TIMEOUT:-30}
profile=$out/gpu.json

# A line for each part that failed: parts side by side are processes of their own.
failures=$(mktemp)
trap 'rm -f "$failures"' EXIT
# note SECONDS NAME COMMAND..: what it says goes to NAME.json.
note() {
  local limit=$1 name=$2 begun=$SECONDS code why=""
  shift 2
  if [ "$wanted" != "  " ]; then case $wanted in *" $name "*) ;; *) return ;; esac; fi
  timeout -k 5 "$limit" "$@" > "$out/$name.json" 2> "$out/$name.log"
  code=$?
  if [ $code -ne 0 ]; then
    echo "$name" >> "$failures"
    why=$(tr '\n' ' ' < "$out/$name.json" | grep -o '"\(error\|wrong\)": *"[^"]*"' | tail -n 1 | cut -c1-300)
    [ -z "$why" ] && why=$(tail -n 3 "$out/$name.log" | tr '\n' ' ' | cut -c1-300)
    [ $code -eq 124 ] && why="not done in $limit s"
  fi
  [ -s "$out/$name.log" ] || rm -f "$out/$name.log"
  printf '%-16s exit %3s  %4s s  %s\n' "$name" $code $((SECONDS - begun)) "$why" | tee -a "$out/summary.txt"
}
part() { local limit=$1 name=$2; shift 2; note "$limit" "$name" "$program" "$@" --json; }

[ "$wanted" = "  " ] && nvidia-smi > "$out/summary.txt" 2>&1
# Right? These take turns on the GPU with each other, five at a time: of twenty contexts at once some could not be made.
# Nothing is timed.
some() { while [ "$(jobs -rp | wc -l)" -ge 5 ]; do sleep 0.2; done; }
part 90 selftest selftest --on cuda &
for way in "run1 --attention own" "ring4 --ring 4 --attention own" "run4c --ring 4 --attention cudnn" "usp4 --ulysses 2 --ring 2" "tp2dp2 --tp 2 --dp 2" \
  "zero3 --dp 4 --zero 3" "pp2 --pp 2 --dp 2 --global-batch 4" "pure --dp 2 --options no-master+bf16-moments" \
  "chunks --tp 2 --options mlp-chunks-4+loss-chunks-2" "wide --ring 2 --options wide-loss"; do
  read -r name words <<< "$way"
  some
  part 90 "check-$name" run --on cuda --devices 0 --check $words &
done
some
part 60 nccl selftest --on cuda --group nccl &
for group in forward backward onto backward_onto head_dims narrow_values; do
  some
  part 60 "cudnn-$group" selftest --on cuda --attention cudnn --group "attention_$group" &
done
if python3 -c 'import transformers' 2> /dev/null; then
  note 300 beside_transformers python3 tests/beside_transformers.py "$program" cuda "$out/transformers.json"
fi
wait
# How fast, and how well predicted?
part 480 calibrate calibrate --on cuda --out "$profile" --attention best
for seed in 1 2 3 4 5 6; do part 60 "1-rank-$seed" validate --on cuda --profile "$profile" --seed $seed; done
for seed in 11 12 14 15 17 19 24 25 29 36 58; do
  part 60 "4-ranks-$seed" validate --on cuda --profile "$profile" --ranks 4 --devices 0 --seed $seed
done
# A rank of a large plan alone: long sequences, tensors and pipelines, experts, ZeRO 3, all of them. The cluster says how long
# its messages are waited for. tests/measured_gpu.rs reads these lines.
while read -r name rank words; do
  "$program" plan --cluster dgx-h200 $words --out "$out/$name-plan.json" > /dev/null
  part 90 "$name" validate --on cuda --cluster dgx-h200 --profile "$profile" --plan "$out/$name-plan.json" --solo "$rank" --repeat 2
  rm -f "$out/$name-plan.json"
done << 'PLANS'
solo 5 --model llama-3-8b --gpus 64 --dp 4 --ring 4 --ulysses 4 --seq-len 65536 --recompute full
solo-tp-pp 300 --model llama-3-70b --gpus 1024 --tp 8 --pp 8 --dp 16 --seq-len 8192 --global-batch 64
solo-experts 9 --model mixtral-8x7b --routing uniform --gpus 64 --dp 64 --ep 8 --seq-len 4096
solo-zero 77 --model llama-3-8b --gpus 512 --dp 512 --zero 3 --seq-len 8192
solo-long 40 --model llama-3-70b --gpus 128 --dp 4 --ulysses 8 --ring 4 --zero 3 --seq-len 32768 --recompute full
solo-deepseek 700 --model deepseek-v3 --no-mtp --gpus 2048 --dp 128 --pp 16 --ep 64 --seq-len 4096 --global-batch 256 --routing uniform --recompute full
PLANS
part 60 block-steps run --on cuda --model benches/llama-3-8b-block.json --seq-len 32768 --steps 5
# With one small group, since all were tested above.
part 60 speed selftest --on cuda --speed --group residuals
if python3 -c 'import torch' 2> /dev/null; then
  note 180 beside_torch python3 benches/beside_torch.py "$program" "$out/torch.json"
  mv "$out/beside_torch.json" "$out/beside_torch.txt" 2> /dev/null
fi
failed=$(wc -l < "$failures")
echo "$failed parts failed" | tee -a "$out/summary.txt"
exit $failed
