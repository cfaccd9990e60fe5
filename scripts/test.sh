#!/usr/bin/env bash
# Everything that is checked: makes .venv if there is none, installs grpo-cli with its dev extras, then lint, format, types
# and all tests that this machine can run. Arguments go to pytest, for example: scripts/test.sh -m "not slow" -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
ensure_venv dev
# Idle OpenMP threads sleep, so that a busy machine does not take minutes more (`grpo` sets the same for itself).
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
ruff check .
ruff format --check .
mypy
exec pytest "$@"
