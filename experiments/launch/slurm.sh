#!/usr/bin/env bash
# Trains on GPU nodes under SLURM and comes back by itself after preemption.
#
#   sbatch --nodes=2 experiments/launch/slurm.sh experiments/rat/runs.py:fineweb_4k_rat16 --mesh.fsdp 8
#
# One task a GPU: jax finds rank, count and coordinator in SLURM's environment. Two
# minutes before the time limit, and at a preemption, SIGTERM reaches every task of the
# step (`--signal` without "B:"); recurjax saves, entry.sh says 75, and the job goes
# into the queue again: its run directory makes it resume. A preempted job that the
# partition requeues by itself (PreemptMode=REQUEUE) resumes likewise. Logs:
# slurm-JOB.log of the job, runs/logs/JOB-TASK.log of each task.
# Options: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/preempt.html
#SBATCH --job-name=recurjax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

if (($# == 0)); then
  echo "usage: sbatch [options] $0 EXPERIMENT [--field value ...]" >&2
  exit 2
fi
task=(
  experiments/launch/entry.sh "runs/logs/${SLURM_JOB_ID:-job}-%TASK%.log"
  .venv/bin/recurjax train "$@"
)
# Each task writes its own log. One that ends early must not have the others killed
# while they save; when one crashes, jax's heartbeat ends the others.
start=(
  srun --kill-on-bad-exit=0 bash -c
  'log=${1/\%TASK\%/$SLURM_PROCID}; shift; exec "$0" "$log" "$@"' "${task[@]}"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${start[@]}"
  echo
  exit 0
fi
"${start[@]}"
code=$?
if ((code == 75)); then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
