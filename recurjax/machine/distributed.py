"""Starting several processes as one program."""

import os
import re
import urllib.error
import urllib.request

import jax
from jax._src import cloud_tpu_init

from recurjax.errors import UserError
from recurjax.machine import process_group

_COORDINATOR, _COUNT, _RANK = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
_METADATA_SECONDS, _METADATA_TRIES = 2.0, 3
"""The metadata server is on the machine's own link: if it is silent, it is absent."""


def start_processes() -> None:
    """Joins the other processes of this program, if the environment tells of any.

    On TPU slices (TPU VMs, GKE, several slices), under SLURM and under Open MPI jax
    finds them by itself. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port of process
    0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. JAX_NUM_PROCESSES=1 alone keeps a process
    for itself wherever it runs. Does nothing for a single process.

    From here on an error of one process ends all of them: `machine/process_group.py`.

    Raises:
      UserError: the variables are incomplete or the processes do not find each other.
    """
    # A caller may have joined the processes already; only the listening is left to
    # start.
    if jax.distributed.is_initialized():
        return process_group.watch()
    names = (_COORDINATOR, _COUNT, _RANK)
    present = [name for name in names if name in os.environ]
    if present == [_COUNT] and os.environ[_COUNT] == "1":
        return
    # Two of three would have jax guess the third, and guess wrongly without a word.
    if present and len(present) < len(names):
        missing = ", ".join(name for name in names if name not in present)
        raise UserError(
            f"{present[0]} is set but {missing} is not: set all three or none"
        )
    try:
        if present:
            count, rank = int(os.environ[_COUNT]), int(os.environ[_RANK])
            jax.distributed.initialize(
                os.environ[_COORDINATOR],
                count,
                rank,
                heartbeat_timeout_seconds=process_group.HEARTBEAT_SECONDS,
            )
        elif _has_peers():
            jax.distributed.initialize(
                heartbeat_timeout_seconds=process_group.HEARTBEAT_SECONDS
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"the processes cannot connect to each other: {error}"
        ) from error
    process_group.watch()


def require_joined() -> None:
    """Refuses devices of several processes that have not joined each other.

    A TPU shows the entire slice to every process, joined or not: such a run would
    train, and fail at its first save or not see SIGTERM.

    Raises:
      UserError: they have not.
    """
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise UserError(
            f"the devices belong to {jax.process_count()} processes that are "
            "not connected, because neither the environment nor the metadata "
            f"server names the slice's hosts: set {_COORDINATOR}, {_COUNT} and "
            f"{_RANK} on each"
        )


def _has_peers() -> bool:
    """Whether the environment is that of a job with more than one process."""
    tasks = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    # What follows asks nothing over the network until the environment has said nothing.
    if any(int(os.environ.get(name, "1")) > 1 for name in tasks):
        # An interactive shell inside an allocation has SLURM_NTASKS but no rank.
        return "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ
    # GKE says it in the environment; several slices are several processes at least.
    slices = int(os.environ.get("MEGASCALE_NUM_SLICES") or 1)
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if name in os.environ:
            return slices > 1 or "," in os.environ[name]
    # jax asks the metadata server of TPU VMs itself, but never gives up in good time
    # where there is none, and would start a service for a host that is alone.
    if not cloud_tpu_init.running_in_cloud_tpu_vm or "TPU_SKIP_MDS_QUERY" in os.environ:
        return slices > 1
    hosts = _metadata("worker-network-endpoints")
    if not hosts:
        return slices > 1
    match = re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", _metadata("tpu-env"))
    return max(slices, int(match[1]) if match else 1) > 1 or "," in hosts


def _metadata(key: str) -> str:
    """Reads an attribute of this TPU VM; empty where it or the server is missing."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{key}",
        headers={"Metadata-Flavor": "Google"},
    )
    # The server is never behind a proxy, whatever the environment names.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(_METADATA_TRIES):
        try:
            with direct.open(request, timeout=_METADATA_SECONDS) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
        except OSError:
            pass
    return ""
