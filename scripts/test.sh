#!/usr/bin/env bash
# What is checked: makes .venv if there is none, installs grpo-cli with its dev extras, then lint, format, types and tests.
#
#     scripts/test.sh              every contract once, in some minutes: leaves out what pyproject.toml marks as process,
#                                  cluster, study or matrix
#     scripts/test.sh --all        everything: those too, a real pretrained model, the default run with 8 threads, all
#                                  annotations checked and, on Linux, in .venv-vllm, a GPU's kernels and engine=vllm
#     scripts/test.sh ARGUMENTS    pytest with these alone, for example: scripts/test.sh -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/test.sh
source scripts/setup.sh
ensure_venv dev
vllm=
if [[ ${1:-} == --all && $(uname -s) == Linux ]]; then
    said="$(mktemp)"
    scripts/install_vllm.sh >"$said" 2>&1 & # which takes minutes, and mostly waits
    vllm=$!
fi
ruff check .
ruff format --check .
mypy
# As many processes as cores, one thread each: tests of other numbers of threads set them, or start programs of their own.
together=(-n logical --maxprocesses 8 --dist worksteal --durations=15)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
few="not (process or cluster or study or matrix)"
(($#)) || exec pytest "${together[@]}" -m "$few"
[[ $1 == --all ]] || exec pytest "$@"
if ! scripts/get_smollm2.sh; then
    echo "NOT RUN: the tests of a real pretrained model, which could not be downloaded (see above)" >&2
fi
# Every annotation is checked where each contract is proven once: what remains runs the same functions, or processes that
# check nothing.
pytest "${together[@]}" -m "$few" --jaxtyping-packages=grpo_cli,beartype.beartype
pytest "${together[@]}" -m "not ($few)"
! command -v nvidia-smi >/dev/null || pytest -m gpu
# The default run as on a machine with more cores (MKL takes no more threads than there are, unless told to).
echo "grpo train with 8 threads"
MKL_DYNAMIC=FALSE OMP_NUM_THREADS=8 grpo train logger=jsonl train.steps=10 hydra.run.dir="$(mktemp -d)/run" | tail -n 2
[[ $vllm ]] || exit 0
if ! wait "$vllm"; then
    cat "$said" >&2
    echo "NOT RUN: the tests of engine=vllm, since vLLM could not be installed (see above)" >&2
    exit 0
fi
# Without a GPU its kernels are interpreted, by the Triton that vLLM brings.
TRITON_INTERPRET=1 .venv-vllm/bin/python -m pytest -n 2 --dist worksteal -m triton tests/test_attention.py tests/test_engine.py
exec .venv-vllm/bin/python -m pytest -n 2 --dist worksteal -m vllm tests/test_vllm.py
