#!/usr/bin/env bash
# The first hour with a GPU, in parts of ten minutes each. Install first: make setup (it sees the GPU).
#
#   infra/gpu/check.sh tests     the tests marked gpu
#   infra/gpu/check.sh kernels   promises of both GPU backends; steps of 0.1 to 8 billion parameters
#   infra/gpu/check.sh speed     the same with 32 billion, which needs 80 GB
#   infra/gpu/check.sh train     nine minutes of training the default target's adapter (needs ../shared/data or DATA=FOLDER)
#
# Results are written under infra/results/gpu/.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
results=infra/results/gpu
mkdir -p "$results"

benchmark() {  # the last line is the result as JSON
    $python -m pipelines.benchmark --suite backends "$@" | tee "$results/$part.txt"
    tail -n 1 "$results/$part.txt" >"$results/$part.json"
}

part=${1:-}
case "$part" in
    tests) $python -m pytest -m gpu -p no:xdist -q | tee "$results/tests.txt" ;;
    kernels) benchmark --quick ;;
    speed) benchmark ;;
    train) $python -m pipelines.train_target --data "${DATA:-../shared/data}" --out runs/gpu --rows 32 --minutes 9 ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
