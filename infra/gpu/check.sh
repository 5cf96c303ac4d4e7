#!/usr/bin/env bash
# The first hour with a GPU, in parts of ten minutes each. With a network, install first: make setup (it sees the GPU). Without,
# the packages that `import ragspec.engine` needs, Triton and pytest are enough; `python3` runs if there is no .venv.
#
#   infra/gpu/check.sh tests     the tests marked gpu: the promises of both GPU backends
#   infra/gpu/check.sh kernels   steps of models of 0.1 to 8 billion parameters by both GPU backends
#   infra/gpu/check.sh speed     the same, first with 8 and 32 billion, which need 80 GB
#   infra/gpu/check.sh serve     the engine under 1 to 64 users without HTTP, models of 0.1 and 8 billion; a second run of the
#                                same commit goes on after the last row
#   infra/gpu/check.sh faiss     the index on the GPU finds what it finds on the CPU; installs FAISS for GPUs if it is missing
#   infra/gpu/check.sh bits      a certificate: rows, tiles, batches, drafts and preemption change no bit; prints the numerics id
#   infra/gpu/check.sh tune      measures the tiles of products and writes ragspec/numerics/cuda/tiles.json
#   infra/gpu/check.sh train     trains the default target's adapter, then an EAGLE-3 head; MINUTES each, 2.5 unless given.
#                                Reads ../shared/data or DATA, or the folder PACK that `infra/gpu/pack.py training` wrote
#
# For `train`, TARGET is another model than the pack's or the default one; CHATS is how many requests it answers first, and PROBES how
# often it answers questions.
# Results are written under infra/results/gpu/, trained weights under build/gpu/ and, in parts of 15 MiB, under build/gpu/parts/.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
results=infra/results/gpu
mkdir -p "$results"

benchmark() {  # the last line is the result as JSON
    $python -m pipelines.benchmark "$@" | tee "$results/$part.txt"
    tail -n 1 "$results/$part.txt" >"$results/$part.json"
}

train() {
    local data=${DATA:-../shared/data} minutes=${MINUTES:-2.5}
    if [ -n "${PACK:-}" ]; then
        $python infra/gpu/pack.py unpack "$PACK" build/gpu/pack
        data=build/gpu/pack/data
        export PYTHONPATH="$PWD/build/gpu/pack/site:${PYTHONPATH:-}"
    fi
    local target=${TARGET:-} rows=()
    for path in build/gpu/pack/model/*; do [ ! -e "$path" ] || target=${target:-$path}; done
    target=${target:-SmolLM2-135M-Instruct}
    [ ! -e "$data/documentation.jsonl" ] || rows=(--documentation "$data/documentation.jsonl")
    $python -m pipelines.train_target --target "$target" --data "$data" --out build/gpu/adapter --rows "${ROWS:-32}" \
        --minutes "$minutes" --chats "${CHATS:-3000}" --probes "${PROBES:-8}" "${rows[@]}"
    $python -m pipelines.train_drafter --family eagle3 --target "$target" --data "$data" --out build/gpu/eagle3 \
        --step-tokens 4096 --minutes "$minutes"
    for name in adapter eagle3; do cp "build/gpu/$name/curves.png" "$results/$name.png"; done
    $python infra/gpu/pack.py files build/gpu/parts build/gpu/adapter/adapter build/gpu/eagle3/head --part-mib 15
}

gpu_tests() {
    $python -m pytest -m gpu -p no:xdist -W default --continue-on-collection-errors -q --durations=10 "$@" | tee "$results/$part.txt"
}

part=${1:-}
case "$part" in
    tests) # other tests are not collected: they import packages that a machine for this alone may lack
        gpu_tests $(grep -rlE 'mark\.gpu' tests --include='test_*.py' | grep -v test_gpu_bits)
        ;;
    bits) gpu_tests -s tests/engine/test_gpu_bits.py ;;
    tune)
        $python infra/gpu/tune.py | tee "$results/tune.txt"
        cp ragspec/numerics/cuda/tiles.json "$results/tiles.json"
        ;;
    kernels) benchmark --suite gpu --quick ;;
    speed) benchmark --suite gpu ;;
    serve) benchmark --suite serve --resume ;;
    faiss)
        $python -c 'import faiss; faiss.StandardGpuResources' || $python -m pip install -e '.[gpu]'
        gpu_tests tests/retrieval/test_gpu.py
        ;;
    train) train ;;
    *)
        sed -n '2,19s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
