#!/usr/bin/env bash
# A published claim, tried again on this machine: makes .venv if there is none, installs grpo-cli and measures.
#
#     scripts/reproduce.sh default             the default run, with three seeds
#     scripts/reproduce.sh turns               episodes of several turns: a game, and a tool
#     scripts/reproduce.sh pods                training on few of many rollouts against training on all (arXiv 2504.13818)
#     scripts/reproduce.sh sparse_rl           training on rollouts from evicted caches, against dense (arXiv 2601.10079)
#     scripts/reproduce.sh frontier_a          which problems, and how often: curricula, collectors, small groups
#     scripts/reproduce.sh dapo                asking until enough groups teach, at equal tokens (arXiv 2503.14476)
#     scripts/reproduce.sh rivals              AERO, the shortest; partial, tail, sorted
#     scripts/reproduce.sh rivals_long         eviction that bites: 64 or 40 keys of replies of up to 350 tokens
#     scripts/reproduce.sh frontier_b          reused tokens: partial rollouts, corrections, optim.ess
#     scripts/reproduce.sh frontier_c          few rollouts of many problems; imitation where nothing is solved
#     scripts/reproduce.sh frontier_d          rollouts by rounded weights
#
# The same of a real model of 135 M parameters, which scripts/get_smollm2.sh makes:
#
#     scripts/reproduce.sh rivals_real         AERO and the shortest rollouts against max variance
#     scripts/reproduce.sh pods_real           where right answers are rare when training begins
#     scripts/reproduce.sh turns_real          three attempts with feedback against one
#     scripts/reproduce.sh gym                 a task of reasoning-gym (the extra gym)
#     scripts/reproduce.sh infinite_real       replies to GSM8K (--data FILE)
#     scripts/reproduce.sh sparse_rl_real      how far evicted caches lead a sampler from its policy (--data FILE)
#
# Further arguments are the study's (--help lists them; --quick is a small size): scripts/reproduce.sh pods --seeds 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
case "${1:-}" in
infinite_real) ensure_venv && exec python scripts/reproduce/real_rollouts.py "${@:2}" ;;
rivals_long)
    ensure_venv plot
    long=(--terms 12 18 --careless 0.3 0.02 --steps 2800 --careful-steps 2300)
    [[ -f models/long_sums/config.json ]] || python scripts/make_tiny.py --out models/long_sums "${long[@]}"
    exec python scripts/reproduce/study.py rivals_long --model models/long_sums "${@:2}"
    ;;
default | rivals | rivals_real | turns | turns_real | gym | pods | sparse_rl | frontier_a | dapo | frontier_b | frontier_c | frontier_d | pods_real | sparse_rl_real) ensure_venv plot && exec python scripts/reproduce/study.py "$@" ;;
-h | --help) exec sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/reproduce.sh ;;
*) echo "error: name a study: default, rivals, rivals_long, rivals_real, turns, turns_real, gym, pods, sparse_rl, frontier_a, dapo, frontier_b, frontier_c, frontier_d, pods_real, infinite_real or sparse_rl_real" >&2 && exit 2 ;;
esac
