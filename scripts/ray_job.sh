#!/usr/bin/env bash
# grpo train with engine=ray as a job of a running Ray cluster. The trainer runs on the cluster's head, rollouts on all of
# its nodes, in this folder (which every node sees) and with the grpo that is found here:
#
#     scripts/ray_job.sh n=64 m=16
#     RAY_API_SERVER_ADDRESS=http://10.0.0.1:8265 scripts/ray_job.sh n=64 m=16 engine.workers=16 engine.gpus=1
#
# Ray ends jobs without a save (`ray job stop`): the same line with resume=auto goes on from the last checkpoint.
set -euo pipefail
[[ ${1:-} == --help ]] && exec sed -n '2,/^set/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
for program in ray grpo; do
    command -v "$program" >/dev/null || {
        echo "error: $program is not on the PATH: pip install 'grpo-cli[ray]', and activate its environment" >&2
        exit 2
    }
done
# The job begins in a folder of Ray's.
exec ray job submit -- bash -c 'cd "$1" && shift && exec "$@"' job "$PWD" \
    "$(command -v grpo)" train engine=ray engine.address=auto "$@"
