#!/usr/bin/env bash
# Measures the harness on a GPU host: benchmarks/gpu_host.sh [--budget SECONDS] [--cpu-rehearsal] OUT STAGE...
#
# Stages: setup | bf16 (throughput, repeats and scores on one server, or those of them that $BF16 names) | calibrate (the
# other configs side by side, and the damaged model) | shared | leftovers | cold (the list with nothing compiled before) |
# list | ahead (with --prestart) | gpus (who gets which, as far as there are several).
# Records go to $STATE (/tmp/gpu-host), which later calls go on from, and packed into OUT after every step, each of
# which has a limit of its own and never takes down the next. --budget bounds the whole call; what no longer fits is
# left out and says so. --cpu-rehearsal tries all of it with a small model on a CPU.
#
# Wants: vLLM and this project's dependencies importable, $MODEL (/tmp/kit/model), and GSM8K in $ACCURACY_GATE_DATA.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
BUDGET=540 REHEARSAL=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --budget) BUDGET=$2; shift 2 ;;
    --cpu-rehearsal) REHEARSAL=1; shift ;;
    *) echo "unknown option $1" >&2; exit 4 ;;
  esac
done
[[ $# -ge 2 ]] || { sed -n '2,14s/^# \?//p' "$0" >&2; exit 4; }
OUT=$1; shift
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export STATE=${STATE:-/tmp/gpu-host}
DEADLINE=${GPU_HOST_DEADLINE:-$(($(date +%s) + BUDGET))}; export GPU_HOST_DEADLINE=$DEADLINE
PYTHON=${PYTHON:-python3} MODEL=${MODEL:-/tmp/kit/model} DAMAGED=${DAMAGED:-/tmp/kit/damaged}
LAYER=${LAYER:-10} FACTOR=${FACTOR:-8} WORKERS=${WORKERS:-5} RUNS=${RUNS:-5} BF16_LIMIT=530
CALIBRATED=${CALIBRATED:-fp8 kv-cache-fp8 ngram eager}
QUESTIONS=1319 TOKENS=256 SWEEP=256,100,512,1319,64 ROUNDS=5
if [[ $REHEARSAL ]]; then
  QUESTIONS=6 TOKENS=16 SWEEP=${REHEARSAL_SWEEP:-4,2} ROUNDS=${REHEARSAL_ROUNDS:-1} RUNS=2
  MODEL=$("$PYTHON" -c 'from harness.servers.embedded_model import model_folder; print(model_folder("embedded:smollm2-135m-instruct"))')
  DAMAGED=$STATE/damaged
fi
RECORDS=$STATE/records SHARED=$STATE/configs WHOLE=$STATE/whole TOOLS=benchmarks/gpu_host
mkdir -p "$OUT" "$RECORDS"
WHOLE_FLAG=(); [[ $REHEARSAL ]] && WHOLE_FLAG=(--one-by-one)

remaining() { echo $((DEADLINE - $(date +%s))); }

# Packs what has changed in this call; a file that is half written there would be lost with the call.
pack() {
  local packed=$STATE/packed.$BASHPID
  (
    cd "$STATE" && find records configs -type f -newer began ! -name '*.html' ! -name '.*' -print0 |
      tar --null -czf "$packed" --files-from -
  ) 2> /dev/null
  mv "$packed" "$OUT/records-$GPU_HOST_CALL.tar.gz"
}

# step NAME LIMIT [COMMAND...]: output to NAME.log; what it came to is one line of steps-….jsonl.
step() {
  local name=$1 limit=$2 left began code=0; shift 2
  left=$(($(remaining) - 8)) began=$(date +%s.%N)
  ((limit > left)) && limit=$left
  if ((limit < 15)); then
    code=-1; echo "left out: $left s remain" > "$RECORDS/$name.log"
  else
    echo "--- $name (at most $limit s)"
    timeout -k 15 "$limit" "$@" > "$RECORDS/$name.log" 2>&1 < /dev/null; code=$?
  fi
  "$PYTHON" - "$name" "$code" "$began" "$limit" "$*" >> "$RECORDS/steps-$GPU_HOST_CALL.jsonl" <<'PY'
import json, sys, time
name, code, began, limit, command = sys.argv[1:]
seconds = round(time.time() - float(began), 1)
print(json.dumps({"name": name, "began": float(began), "exit": int(code), "seconds": seconds, "limit": int(limit), "command": command}))
PY
  pack
  return "$code"
}

suite() { # suite NAME LIMIT LIST [pytest options...]
  local name=$1 limit=$2 list=$3; shift 3
  step "$name" "$limit" "$PYTHON" $TOOLS/suite_wall.py "$name" "$list" "$RECORDS/suites" --within "$(within "$limit")" -- "$@"
}

within() { local left=$(($(remaining) - 40)); echo $(($1 - 25 < left ? $1 - 25 : left)); }

calibrate() { # calibrate NAME LIMIT YAML [options...]
  local name=$1 limit=$2 yaml=$3; shift 3
  step "calibrate-$name" "$limit" "$PYTHON" -m harness.cli calibrate "$yaml" --results-dir "$RECORDS/calibrate/$name" "$@"
}

store() { "$PYTHON" $TOOLS/store_calibration.py "$@" >> "$RECORDS/store.log" 2>&1; }

configs() { # once, and again for what calibration has written since
  local as=(); [[ $REHEARSAL ]] && as=(--rehearsal "$MODEL" --damaged "$DAMAGED")
  [[ -e $SHARED/models-gpu-kit.txt ]] || "$PYTHON" $TOOLS/prepare_configs.py configs "$SHARED" "${as[@]}" || exit
  "$PYTHON" $TOOLS/prepare_configs.py "$SHARED" "$WHOLE" --whole-gpu || exit
}

stage_setup() {
  step host 60 bash -c "$PYTHON $TOOLS/host_facts.py > $RECORDS/host.json"
  step damage 90 "$PYTHON" $TOOLS/damage_model.py "$MODEL" "$DAMAGED" --layer "$LAYER" --factor "$FACTOR"
}

stage_bf16() {
  step bf16 "$BF16_LIMIT" "$PYTHON" $TOOLS/serve.py "$WHOLE/gpu-kit/bf16.yaml" "$RECORDS/bf16" -- \
    "$BASH" "$PWD/benchmarks/gpu_host.sh" ${REHEARSAL:+--cpu-rehearsal} "$OUT" ${BF16:-throughput repeats scores}
}

stage_throughput() {
  step throughput 450 "$PYTHON" benchmarks/throughput.py --base-url "$BASE_URL" --out "$RECORDS/throughput.json" \
    --questions $QUESTIONS --max-tokens $TOKENS --concurrency $SWEEP --rounds $ROUNDS --within "$(within 450)"
}

stage_repeats() {
  local yaml=$SHARED/gpu-kit/bf16.yaml
  calibrate bf16 150 "$yaml" --task gsm8k --runs "$RUNS" --base-url "$BASE_URL" &&
    store "$yaml" "$RECORDS/calibrate-bf16.log" --task gsm8k
}

stage_scores() {
  local yaml=$SHARED/gpu-kit/bf16.yaml
  calibrate choice 60 "$yaml" --task choice --runs 3 --base-url "$BASE_URL" &&
    store "$yaml" "$RECORDS/calibrate-choice.log" --task choice
  suite scores 60 "$SHARED/models-gpu-kit.txt" --base-url "$BASE_URL" -k "perplexity or choice"
  local result; result=$(ls -d "$RECORDS"/suites/scores/*/gpu-kit/bf16/perplexity/result.json 2>/dev/null | tail -1)
  [[ $result ]] && store "$yaml" --perplexity "$result"
}

stage_calibrate() {
  local config runs pids=()
  for config in $CALIBRATED; do
    runs=$RUNS; [[ $config == eager ]] && ((runs > 3)) && runs=3 # it answers three times as slowly
    calibrate "$config" 330 "$SHARED/gpu-kit/$config.yaml" --runs "$runs" & pids+=($!)
    [[ $REHEARSAL ]] && wait
  done
  suite red 330 "$SHARED/only-damaged.txt" & pids+=($!)
  wait "${pids[@]}" 2> /dev/null
  for config in $CALIBRATED; do
    grep -q '^tolerance' "$RECORDS/calibrate-$config.log" && store "$SHARED/gpu-kit/$config.yaml" "$RECORDS/calibrate-$config.log"
  done
}

stage_shared() { suite shared 300 "$SHARED/models-gpu-kit.txt" -n "$WORKERS"; }

stage_cold() {
  "$PYTHON" -c 'import shutil; from harness.cache import cache_root; shutil.rmtree(cache_root() / "compile", True)'
  suite cold 520 "$WHOLE/models-gpu-kit.txt"
}

stage_list() { suite list 520 "$WHOLE/models-gpu-kit.txt"; }

stage_ahead() {
  suite ahead 520 "$WHOLE/models-gpu-kit.txt" --prestart ${AHEAD_ONLY:+-k "$AHEAD_ONLY"}
}

stage_leftovers() {
  step leftovers 300 "$PYTHON" $TOOLS/leftovers.py "$SHARED" "$RECORDS/suites" "${WHOLE_FLAG[@]}"
}

stage_gpus() { step gpus 400 "$PYTHON" $TOOLS/several_gpus.py "$SHARED" "$WHOLE" "$RECORDS/suites"; }

finish() {
  pack
  "$PYTHON" benchmarks/benchmark_tables.py "$STATE" --short 2>&1 | tail -c 9000
  echo "$(remaining) s of the budget remain; records: $(ls -sh "$OUT" | tail -n +2 | tr '\n' ' ')"
}

configs
if [[ -z ${GPU_HOST_CALL:-} ]]; then
  GPU_HOST_CALL=$(IFS=-; echo "$*"); export GPU_HOST_CALL
  touch "$STATE/began"
  trap finish EXIT
  trap 'exit 143' TERM INT
fi
for stage in "$@"; do
  declare -F "stage_$stage" > /dev/null || { echo "there is no stage $stage" >&2; exit 4; }
  configs
  "stage_$stage"
done
exit 0
