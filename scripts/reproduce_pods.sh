#!/usr/bin/env bash
# Training on few of many rollouts (PODS, arXiv 2504.13818) against training on all: makes .venv if there is none, installs
# grpo-cli with the plot extra, runs every arm with every seed, and writes tables, figures and JSON below outputs/.
# Arguments go to reproduce_pods.py, for example: scripts/reproduce_pods.sh --seeds 0 --steps 20 --arms grpo_ga maxvar
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
ensure_venv plot
exec python scripts/reproduce_pods.py "$@"
