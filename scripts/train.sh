#!/usr/bin/env bash
# From a fresh clone to a trained policy: makes .venv if there is none, installs grpo-cli, and runs `grpo train`.
# Arguments go to `grpo train`, for example: scripts/train.sh n=32 seed=3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
ensure_venv
exec grpo train "$@"
