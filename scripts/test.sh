#!/usr/bin/env bash
# Everything that is checked: makes .venv if there is none, installs grpo-cli with its dev extras, then lint, format,
# types, all tests that this machine can run and the default run with 8 threads; on Linux also the tests of engine=vllm,
# in .venv-vllm. Arguments go to pytest, and then only that runs, for example: scripts/test.sh -m "not slow" -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/test.sh
source scripts/setup.sh
ensure_venv dev
ruff check .
ruff format --check .
mypy
(($#)) && exec pytest "$@"
if ! scripts/get_smollm2.sh; then
    echo "NOT RUN: the tests of a real pretrained model, which could not be had (see above)" >&2
fi
# As many processes as cores, one thread each: tests of other numbers of threads start programs of their own.
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" pytest -n logical --maxprocesses 8 --dist worksteal --durations=15
# The default run to its end as on a machine with more cores (MKL takes no more threads than there are, unless told to).
echo "grpo train with 8 threads"
MKL_DYNAMIC=FALSE OMP_NUM_THREADS=8 grpo train logger=jsonl hydra.run.dir="$(mktemp -d)/run" | tail -n 2
[[ $(uname -s) == Linux ]] || exit 0
if ! scripts/install_vllm.sh; then
    echo "NOT RUN: the tests of engine=vllm, since vLLM could not be installed (see above)" >&2
    exit 0
fi
exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" .venv-vllm/bin/python -m pytest -m vllm tests/test_vllm.py
