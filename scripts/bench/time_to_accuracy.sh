#!/usr/bin/env bash
# Minutes to an accuracy, TRL's trainer beside ours: installs the extra bench. See time_to_accuracy.py --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup.sh
ensure_venv bench
exec python scripts/bench/time_to_accuracy.py "$@"
