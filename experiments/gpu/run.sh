#!/usr/bin/env bash
# What only a GPU can tell, in a fixed order. Each step has its own time; one that fails or takes longer stops no other.
#   experiments/gpu/run.sh OUT                     with a GPU, at most 30 minutes
#   STEPS="tests kernels" experiments/gpu/run.sh OUT
#   TINY=1 experiments/gpu/run.sh OUT              the same commands on a CPU with tiny shapes: a test of this script
# OUT gets a folder for each step, with its log and its run, and summary.md. What was not run is written `not run`.
set -uo pipefail
OUT=${1:?usage: experiments/gpu/run.sh OUT}
cd "$(dirname "$0")/../.."
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
BUDGET=${BUDGET:-1800}
BEGAN=$SECONDS
device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 1
reason=
if [ -n "${TINY:-}" ]; then device="CPU, tiny shapes"; elif [ -z "$device" ]; then reason="no CUDA device"; fi
summary=$OUT/summary.md
printf '# %s\n\n| Step | Result | Seconds |\n| --- | --- | ---: |\n' "${device:-No GPU}" > "$summary"

step() {  # NAME SECONDS COMMAND...
    local name=$1 most=$2 left=$((BUDGET - SECONDS + BEGAN)) began=$SECONDS result
    shift 2
    if [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $name "* ]]; then result="not run: not asked for"
    elif [ -n "$reason" ]; then result="not run: $reason"
    elif [ "$left" -lt 20 ]; then result="not run: no time left"
    else
        mkdir -p "$OUT/$name"
        echo "$name: at most $((most < left ? most : left)) s"
        timeout --signal=INT --kill-after=20 "$((most < left ? most : left))" "$@" > "$OUT/$name/log.txt" 2>&1
        case $? in
            0) result=finished ;;
            124 | 137) result="ended by the time limit" ;;
            *) result="failed: $(grep -v '^[[:space:]]*$' "$OUT/$name/log.txt" | tail -n 1 | cut -c 1-160 | tr '|' '/')" ;;
        esac
    fi
    printf '| %s | %s | %s |\n' "$name" "$result" "$((SECONDS - began))" >> "$summary"
}

run() {  # NAME SECONDS ARGUMENTS... of src.run
    local name=$1 most=$2
    shift 2
    step "$name" "$most" "$PYTHON" -m src.run "$@" hydra.run.dir="$OUT/$name/run"
}

gpu() { [ -z "${TINY:-}" ]; }

if gpu; then
    step tests 300 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider
    lines=(hardware=gpu bench.dtype=bfloat16 task=wikitext2 mode=bench task.model.d_model=2048 task.attention_heads=32 bench.prefix=0)
    run kernels 240 "${lines[@]}" attention=mla bench.what=kernels bench.batch=64 'bench.context=[4096,32768]' 'bench.references=[mtla,mha,gqa,mqa]'
    run table1 240 experiment=mtla/bench_table1 hardware=gpu
    for stride in 2 4; do
        run "training_s$stride" 120 "${lines[@]}" attention=mtla stride=$stride bench.what=training bench.batch=1 'bench.text=[4096,8192,16384]' 'bench.references=[mha,mla,tpa]' 'bench.overrides=["tpa.rank=2"]'
    done
    run generation 150 "${lines[@]}" attention=mla bench.what=generation bench.batch=16 'bench.context=[4096,32768]' bench.steps=64 'bench.reorder=[false]' 'bench.references=[mtla,mha,gqa,mqa,tpa]' 'bench.overrides=["tpa.rank=2"]'
    budget=(hardware=gpu task.train.max_minutes=3)
else
    step tests 120 "$PYTHON" -m pytest -m gpu -q -n 0 -p no:cacheprovider tests/attention/test_cuda.py
    lines=(hardware=cpu task=wikitext2 mode=bench task.model.d_model=32 task.attention_heads=2 bench.prefix=0 bench.rounds=1 bench.memory=false)
    run kernels 120 "${lines[@]}" attention=mla bench.what=kernels bench.batch=2 'bench.context=[16]' 'bench.references=[mha]'
    run table1 120 experiment=mtla/bench_table1 hardware=cpu scale=sample bench.batch=1 bench.beam=2 bench.prefix=8 bench.steps=2 bench.rounds=1 bench.memory=false
    for stride in 2 4; do
        run "training_s$stride" 120 "${lines[@]}" attention=mtla stride=$stride bench.what=training bench.batch=1 'bench.text=[16]' 'bench.references=[mha,mla,tpa]' 'bench.overrides=["tpa.rank=2"]'
    done
    run generation 120 "${lines[@]}" attention=mla bench.what=generation bench.batch=1 'bench.context=[8]' bench.steps=2 'bench.reorder=[false]' 'bench.references=[mtla,mha,tpa]' 'bench.overrides=["tpa.rank=2"]'
    budget=(hardware=cpu task.train.max_minutes=0.02)
fi
run lm 240 "${budget[@]}" task=wikitext2 attention=mtla stride=2
run st 240 "${budget[@]}" task=mustc attention=mtla stride=2
for task in wmt16 ami slurp xsum imagenet ptb fineweb_edu; do
    run "$task" 100 "${budget[@]}" task=$task $([ $task = imagenet ] || echo attention=mtla stride=2)
done
cat "$summary"
[ -z "$reason" ]
