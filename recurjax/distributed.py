"""Starting several processes as one program."""

import os

import jax

from recurjax.errors import UserError


def start_processes() -> None:
    """Joins the other processes of this program, if the environment tells of any.

    On TPU pods, under SLURM and under Open MPI jax finds them by itself. Elsewhere set
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. Does nothing for a single process.

    Raises:
      UserError: the variables are incomplete or the processes do not find each other.
    """
    if jax.distributed.is_initialized():
        return
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [name for name in names if name in os.environ]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise UserError(
            f"{given[0]} is set but {missing} is not: set all three or none"
        )
    try:
        if given:
            jax.distributed.initialize(
                os.environ[names[0]],
                int(os.environ[names[1]]),
                int(os.environ[names[2]]),
            )
        elif _cluster():
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes could not be joined: {error}") from error


def _cluster() -> bool:
    """Whether the environment is that of a job with more than one process."""
    tasks = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    if any(int(os.environ.get(name, "1")) > 1 for name in tasks):
        # An interactive shell inside an allocation has SLURM_NTASKS but no rank.
        return "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ
    return "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
