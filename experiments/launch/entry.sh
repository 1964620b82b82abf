#!/usr/bin/env bash
# Runs one process of a job: hands SIGTERM on, keeps a log, tells "stopped" from "done".
#
#   entry.sh LOG COMMAND [ARGUMENT ...]
#
# recurjax exits 0 when it was stopped by SIGTERM and has saved, as when it is finished.
# A scheduler must start the first again and not the second: here the first is 75
# (EX_TEMPFAIL of sysexits.h). All else is the command's own code.
set -uo pipefail

if (($# < 2)); then
  echo "usage: $0 LOG COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
log=$1
shift
mkdir -p "$(dirname "$log")" || exit 2
this=$(mktemp)

exec 3> >(tee -a "$log" "$this")
writer=$!
stopped=""
trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" >&3 2>&1 &
child=$!
wait "$child"
code=$?
# A signal ends `wait` before the child has ended.
while [[ -n $stopped ]] && kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
if [[ -n $stopped ]]; then
  wait "$child"
  code=$?
fi
exec 3>&-
wait "$writer"
if ((code == 0)) && grep -q '^terminated at step' "$this"; then
  code=75
fi
rm -f "$this"
exit "$code"
