#!/usr/bin/env bash
# What a GPU has to show, one part at a time, each under ten minutes: figures as JSON, and a line per criterion.
#
#     scripts/gpu_campaign.sh PART FOLDER                a part by its number or name, into a folder of its own
#     scripts/gpu_campaign.sh all FOLDER                 one after the other
#     scripts/gpu_campaign.sh PART FOLDER --device cpu   the same at toy size, which shows that it runs and measures nothing
#
# 1 contact   the tests marked gpu (every part of the torch path once), three runs of grpo train
# 2 decode    a decode step against its floor, 16 to 256 rows, and launched in place of replayed
# 3 rollouts  full, micro and infinite with log-normal lengths
# 4 sparse    tokens/s at equal KV bytes, dense and evicted
# 5 update    forward and backward against their floor: padded, without padding, with shared prefixes
# 6 learn     the embedded model learns as on a CPU, and memory does not grow
#
# Python is $PYTHON, else .venv's, else python3; it needs torch, transformers and peft, and hydra-core, omegaconf, jaxtyping
# and psutil, for the tests of part 1 pytest, pytest-xdist and hypothesis too (and no wandb: the logger is jsonl). Ends
# with 1 where a criterion is missed.
set -euo pipefail
[[ ${1:---help} == --help || $1 == -h ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python3)}"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/scripts/gpu/campaign.py" "$@"
