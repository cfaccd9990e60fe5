#!/usr/bin/env bash
# Training on rollouts from evicted caches (Sparse-RL, arXiv 2601.10079), uncorrected and corrected, against dense rollouts:
# makes .venv if there is none, installs grpo-cli with the plot extra, runs every arm with every seed, evaluates each trained
# policy dense and sparse, and writes tables, figures and JSON below outputs/.
# Arguments go to reproduce_sparse_rl.py, for example: scripts/reproduce_sparse_rl.sh --seeds 0 --steps 20 --policies rkv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
ensure_venv plot
exec python scripts/reproduce_sparse_rl.py "$@"
