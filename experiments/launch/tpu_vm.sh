#!/usr/bin/env bash
# Trains on a Cloud TPU slice without Kubernetes: asks for it, installs, starts, follows.
#
#   PROJECT=my-project ZONE=us-west4-a NAME=rat TYPE=v5litepod-256 BUCKET=gs://my-runs \
#     experiments/launch/tpu_vm.sh experiments/rat/runs.py:fineweb_4k_rat16 --mesh.fsdp 256
#
# DRY_RUN=1 prints the commands and runs none. A spot slice that is preempted is gone:
# the loop deletes what is left of the request, asks again and starts the same command,
# which resumes from the run directory. All hosts write to BUCKET/runs, mounted as
# ~/runs by gcsfuse; each host's log is ~/runs/logs/NAME-HOST.log there.
# Commands: https://docs.cloud.google.com/tpu/docs/queued-resources and
# https://docs.cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
set -euo pipefail

: "${PROJECT:?the Google Cloud project}" "${ZONE:?such as us-west4-a}"
: "${NAME:?of the slice}" "${TYPE:?such as v5litepod-256}" "${BUCKET:?such as gs://runs}"
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
# What the hosts clone: this clone's origin, else the public repository.
REPOSITORY=${REPOSITORY:-$(git config --get remote.origin.url ||
  python3 -c "from recurjax.version import REPOSITORY; print(REPOSITORY)" || true)}
: "${REPOSITORY:?the address of a repository that the hosts can clone}"
TRIES=${TRIES:-20}
if (($# == 0)); then
  echo "usage: PROJECT= ZONE= NAME= TYPE= BUCKET= $0 EXPERIMENT [--field value ...]" >&2
  exit 2
fi

run() {
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}
everywhere() {
  run gcloud compute tpus tpu-vm ssh "$NAME" --project "$PROJECT" --zone "$ZONE" \
    --worker=all --command "$1"
}
state() {
  gcloud compute tpus queued-resources describe "$NAME" --project "$PROJECT" \
    --zone "$ZONE" --format='value(state.state)' 2>/dev/null || true
}
ask() {
  run gcloud compute tpus queued-resources create "$NAME" --project "$PROJECT" \
    --zone "$ZONE" --node-id "$NAME" --accelerator-type "$TYPE" \
    --runtime-version "$RUNTIME" --spot
}
give_back() {
  run gcloud compute tpus queued-resources delete "$NAME" --project "$PROJECT" \
    --zone "$ZONE" --force --quiet
}
wait_until_active() {
  if [[ -n ${DRY_RUN:-} ]]; then return 0; fi
  until [[ $(state) == ACTIVE ]]; do
    case $(state) in FAILED | SUSPENDED) return 1 ;; esac
    sleep 30
  done
}

printf -v words '%q ' "$@"
INSTALL="test -d recurjax || git clone $REPOSITORY recurjax; cd recurjax && \
python3 -m venv .venv && .venv/bin/pip install -q '.[tpu]'"
MOUNT="mkdir -p ~/runs && (mountpoint -q ~/runs || \
gcsfuse --implicit-dirs ${BUCKET#gs://} ~/runs) && mkdir -p ~/runs/logs"
# Hosts find each other through the slice's environment. A VM that Google stops gets
# SIGTERM; recurjax then saves on all of them and entry.sh says 75.
TRAIN="cd recurjax && exec experiments/launch/entry.sh \
~/runs/logs/$NAME-\$(hostname).log .venv/bin/recurjax train $words --runs ~/runs"

for ((try = 1; try <= TRIES; try++)); do
  ask
  if wait_until_active; then
    if everywhere "$MOUNT" && everywhere "$INSTALL" && everywhere "$TRAIN"; then
      give_back
      exit 0
    fi
  fi
  echo "try $try of $TRIES: the slice is $(state)" >&2
  give_back
done
exit 1
