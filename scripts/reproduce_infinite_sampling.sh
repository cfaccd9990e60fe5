#!/usr/bin/env bash
# Memory and throughput of full, micro and infinite sampling (Infinite Sampling, arXiv 2506.22950) on random weights: makes
# .venv if there is none, installs grpo-cli and measures each arm in processes of its own.
# Arguments go to reproduce_infinite_sampling.py, for example: scripts/reproduce_infinite_sampling.sh --n 32 64 --json out.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
ensure_venv
exec python scripts/reproduce_infinite_sampling.py "$@"
