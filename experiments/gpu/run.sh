#!/usr/bin/env bash
# What only a GPU can tell, the most valuable first. Each step has its own time, 30 minutes together; one that fails or
# takes longer stops no other.
#   experiments/gpu/run.sh OUT                     with a GPU
#   PART=1 experiments/gpu/run.sh OUT              a quarter of it, at most 9 minutes: 1, 2, 3 or 4
#   STEPS="tests kernels" experiments/gpu/run.sh OUT
#   TINY=1 experiments/gpu/run.sh OUT              the same commands on a CPU with tiny shapes: a test of this script
#   DRY=1 experiments/gpu/run.sh OUT               print the command lines and run nothing
# Real corpora are those of ATTNLAB_CORPORA (lm_wikitext2, st_digits_en_de, asr_an4_mfcc); without it their steps are not
# run. OUT gets a folder for each step, records/ with the machine in the names, summary.md, and all of these but the
# checkpoints in gpu.tgz. What was not run is written `not run`.
set -uo pipefail
OUT=${1:?usage: experiments/gpu/run.sh OUT}
cd "$(dirname "$0")/../.."
mkdir -p "$OUT/records"
OUT=$(realpath "$OUT")
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
CORPORA=${ATTNLAB_CORPORA:-}
case ${PART:-} in
    "") : ;;
    1) STEPS="tests tests_bench kernels curves training_s2 training_s4" ;;
    2) STEPS="table1 training_memory generation wikitext2_mtla wikitext2_mha wikitext2_tpa" ;;
    3) STEPS="digits an4 lm st" ;;
    4) STEPS="wmt16 ami slurp xsum imagenet ptb fineweb_edu" ;;
    *) echo "PART=$PART: expected 1, 2, 3 or 4" >&2; exit 2 ;;
esac
BUDGET=${BUDGET:-$([ -n "${PART:-}" ] && echo 540 || echo 1800)}
BEGAN=$SECONDS
device=
[ -n "${DRY:-}" ] || "$PYTHON" -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)' || {
    echo "$PYTHON has no torch: run make install, or set PYTHON=, the interpreter of an environment that has attnlab" >&2
    exit 2
}
[ -n "${DRY:-}" ] || device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 1
reason=
if [ -n "${TINY:-}" ]; then device="CPU, tiny shapes"; elif [ -z "$device" ]; then reason="no CUDA device"; fi
machine=$([ -n "${TINY:-}" ] && echo cpu || printf '%s' "${device#NVIDIA }" | cut -d ' ' -f 1 | tr '[:upper:]' '[:lower:]' | tr -cd 'a-z0-9')
summary=$OUT/summary.md
[ -n "${DRY:-}" ] || printf '# %s\n\n| Step | Result | Seconds |\n| --- | --- | ---: |\n' "${device:-No GPU}" > "$summary"

step() {  # NAME SECONDS COMMAND...
    local name=$1 most=$2 left=$((BUDGET - SECONDS + BEGAN)) began=$SECONDS result
    shift 2
    if [ -n "${DRY:-}" ]; then
        printf '%s %s' "$name" "$most"
        printf ' %q' "$@"
        echo
        return
    fi
    if [ -n "${STEPS:-}" ] && [[ " $STEPS " != *" $name "* ]]; then result="not run: not asked for"
    elif [ -n "$reason" ]; then result="not run: $reason"
    elif [ "$left" -lt 20 ]; then result="not run: no time left"
    else
        mkdir -p "$OUT/$name"
        echo "$name: at most $((most < left ? most : left)) s"
        timeout --signal=INT --kill-after=10 "$((most < left ? most : left))" "$@" > "$OUT/$name/log.txt" 2>&1
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
    [ ! -f "$OUT/$name/run/record.json" ] || cp "$OUT/$name/run/record.json" "$OUT/records/${name}_$machine.json"
}

corpus() {  # NAME SECONDS FOLDER ARGUMENTS...: on a real corpus
    local name=$1 most=$2 folder=$3 before=$reason
    shift 3
    [ -d "$CORPORA/$folder" ] || [ -n "${DRY:-}" ] || reason=${reason:-"no ATTNLAB_CORPORA/$folder"}
    run "$name" "$most" "$@" data_root="$CORPORA/$folder"
    reason=$before
}

gpu() { [ -z "${TINY:-}" ]; }

tests=("$PYTHON" -m pytest -m gpu -q -p no:cacheprovider --tb=short --continue-on-collection-errors)
if gpu; then
    # Only the files that have such tests: others may need packages that this machine lacks.
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | grep -v '^tests/bench/' | sort)
    step tests 200 "${tests[@]}" -n 12 --dist worksteal --durations=20 "${files[@]}"
    step tests_bench 45 "${tests[@]}" -n 0 tests/bench/test_kernels.py tests/bench/test_bench.py
    lines=(hardware=gpu bench.dtype=bfloat16 task=wikitext2 mode=bench task.model.d_model=2048 task.attention_heads=32 bench.prefix=0)
    latent=256 batch=64 few=4 contexts=4096,32768 curve=4096,8192,16384,32768,65536,131072,262144,524288 texts=4096,8192,16384 longest=16384 steps=64 rows=16
    on=(hardware=gpu)
    budget=(hardware=gpu task.train.max_minutes=0.3)
    table1=()
    limits=(task.train.max_minutes=0.6 task.train.max_minutes=2.2 task.train.max_minutes=2.6)
    wikitext2=()
    pretrain=20
else
    step tests 120 "${tests[@]}" -n 0 tests/attention/test_cuda.py
    step tests_bench 60 "${tests[@]}" -n 0 tests/bench/test_kernels.py
    lines=(hardware=cpu bench.dtype=float32 task=wikitext2 mode=bench task.model.d_model=32 task.attention_heads=4 bench.prefix=0 bench.rounds=1)
    latent=32 batch=2 few=1 contexts=16 curve=16,32 texts=16 longest=16 steps=2 rows=1
    on=(hardware=cpu)
    budget=(hardware=cpu task.train.max_minutes=0.02)
    table1=(scale=sample bench.batch=1 bench.beam=2 bench.prefix=8 bench.steps=2 bench.rounds=1 bench.memory=false)
    limits=(task.train.max_minutes=0.02 task.train.max_minutes=0.02 task.train.max_minutes=0.02)
    wikitext2=(task.model.d_model=16 task.model.ffn_dim=16 task.model.num_layers=1 task.attention_heads=8 task.attention_head_dim=8)
    pretrain=1
fi
box() { gpu && echo "$1" || echo 300; }
fast=("${lines[@]}" bench.memory=false)
rank2='bench.overrides=["tpa.rank=2"]'
run kernels "$(box 45)" "${fast[@]}" attention=mla bench.what=kernels bench.batch=$batch "bench.context=[$contexts]" 'bench.references=[mtla,mha,gqa,mqa]'
run curves "$(box 100)" "${fast[@]}" attention=tpa bench.what=kernels bench.batch=$few "bench.context=[$curve]" 'bench.references=[mha,gqa,mqa,mla,mtla]' "bench.overrides=[\"mla.latent_dim=$latent\",\"mtla.latent_dim=$latent\"]"
for stride in 2 4; do
    run "training_s$stride" "$(box 50)" "${fast[@]}" attention=mtla stride=$stride bench.what=training bench.batch=1 "bench.text=[$texts]" 'bench.references=[mha,mla,tpa]' "$rank2"
done
run table1 "$(box 180)" experiment=mtla/bench_table1 "${on[@]}" "${table1[@]}"
run training_memory "$(box 100)" "${lines[@]}" attention=mtla stride=2 bench.what=training bench.batch=1 bench.text=$longest bench.rounds=1 'bench.references=[mha,mla,tpa,"mtla.stride=4"]' "$rank2"
run generation "$(box 50)" "${fast[@]}" attention=mla bench.what=generation bench.batch=$rows "bench.context=[$contexts]" bench.steps=$steps 'bench.reorder=[false]' 'bench.references=[mtla,mha,gqa,mqa,tpa]' "$rank2"
for name in mtla mha tpa; do  # 20 times the tokens of scale=comparison: 33 million
    corpus "wikitext2_$name" "$(box 60)" lm_wikitext2 "${on[@]}" "${limits[0]}" task=wikitext2 scale=comparison attention=$name task.train.batch.tokens=16384 task.data.batch_size=64 task.train.max_steps=2000 task.train.validate_every=500 "${wikitext2[@]}"
done
corpus digits "$(box 180)" st_digits_en_de "${on[@]}" "${limits[1]}" task=mustc attention=mtla stride=2
corpus an4 "$(box 200)" asr_an4_mfcc "${on[@]}" "${limits[2]}" experiment=corpora/an4
run lm "$(box 45)" "${budget[@]}" task=wikitext2 attention=mtla stride=2
run st "$(box 55)" "${budget[@]}" task=mustc attention=mtla stride=2
for task in wmt16 ami slurp xsum imagenet ptb fineweb_edu; do
    case $task in
        imagenet) more=(task.pretrain.epochs=$pretrain) ;;
        *) more=(attention=mtla stride=2) ;;
    esac
    case $task in
        imagenet) most=55 ;;
        ami | slurp) most=50 ;;
        wmt16) most=45 ;;
        *) most=40 ;;
    esac
    run "$task" "$(box $most)" "${budget[@]}" task=$task "${more[@]}"
done
[ -z "${DRY:-}" ] || exit 0
(cd "$OUT" && tar -czf gpu.tgz summary.md records $(find . -maxdepth 2 -name log.txt))
cat "$summary"
[ -z "$reason" ]
