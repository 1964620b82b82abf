#!/usr/bin/env bash
# Trains on a GKE cluster of TPU slices through xpk.
#
#   CLUSTER=my-cluster PROJECT=my-project ZONE=us-west4-a NAME=rat TYPE=v5litepod-256 \
#   IMAGE=us-docker.pkg.dev/my-project/recurjax/recurjax:1 RUNS=/runs \
#     experiments/launch/xpk.sh experiments/rat/runs.py:fineweb_4k_rat16 --mesh.fsdp 256
#
# DRY_RUN=1 prints the command and runs it not. IMAGE has this repository in /recurjax
# with recurjax[tpu] installed; RUNS is a storage of the cluster that every pod mounts
# (`xpk storage create`). Kubernetes sends SIGTERM and waits for the grace period before
# a pod is removed; recurjax then saves and entry.sh says 75, so that the workload does
# not count as done: `--max-restarts` with `--restart-on-user-code-failure` starts all
# pods again, and the run directory makes them resume. Logs: `kubectl logs`, and
# RUNS/logs/NAME-POD.log. Flags: `xpk workload create --help`
# (https://github.com/AI-Hypercomputer/xpk).
set -euo pipefail

: "${CLUSTER:?name of the cluster}" "${PROJECT:?the Google Cloud project}"
: "${ZONE:?such as us-west4-a}" "${NAME:?of the workload}"
: "${TYPE:?such as v5litepod-256}" "${IMAGE:?a container image}" "${RUNS:?a folder}"
if (($# == 0)); then
  echo "usage: CLUSTER= PROJECT= ZONE= NAME= TYPE= IMAGE= RUNS= $0 EXPERIMENT [--field value ...]" >&2
  exit 2
fi

printf -v words '%q ' "$@"
command=(
  xpk workload create
  --cluster "$CLUSTER" --project "$PROJECT" --zone "$ZONE"
  --workload "$NAME" --tpu-type "$TYPE" --num-slices 1
  --docker-image "$IMAGE"
  --max-restarts "${RESTARTS:-20}"
  --termination-grace-period-seconds "${GRACE:-120}"
  --restart-on-user-code-failure
  # exec: entry.sh itself is the process that gets SIGTERM.
  --command "cd /recurjax && exec experiments/launch/entry.sh \
$RUNS/logs/$NAME-\$(hostname).log recurjax train $words --runs $RUNS"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${command[@]}"
  echo
else
  "${command[@]}"
fi
