#!/usr/bin/env bash
# One training as a SLURM job that goes on by itself after a time limit, a preemption or a lost node:
#
#     sbatch --gpus=1 --time=12:00:00 scripts/slurm.sh /shared/runs/pods model=qwen2_5_3b n=64 m=16
#
# The folder comes first and is one that every machine sees; the rest is for `grpo train`. Two minutes before the limit
# SLURM sends SIGUSR1 here: the run leaves its step and saves, and the job is queued again. Without SLURM it is a script
# like any other: called again, it goes on.
#SBATCH --job-name=grpo --requeue --signal=B:USR1@120
#SBATCH --open-mode=append --output=grpo-%j.txt
set -u
folder=${1:?name a folder: sbatch scripts/slurm.sh <folder> [settings of grpo train]}
asked=
trap 'asked=yes; kill -TERM ${!:-} 2>/dev/null' USR1 TERM # there may be no run yet
grpo train "${@:2}" "hydra.run.dir='$folder'" resume=here &
run=$!
while kill -0 $run 2>/dev/null; do wait $run; done # a signal ends `wait`, while the run saves
wait $run
code=$?
if [[ $asked && -n ${SLURM_JOB_ID:-} ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
