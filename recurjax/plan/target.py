"""Reaching a compiler without its hardware; for the child process of `compilation`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from pallas_kernels import target
from recurjax.errors import UserError
from recurjax.plan.topology import Topology

H100_CONFIG = Path(__file__).parent / "h100_target_config.txtpb"
"""What XLA's GPU compiler asks of the device that it compiles for."""

STAND_IN = (
    "cuDNN's attention cannot be compiled without cuDNN: from 256 tokens on our own "
    "kernel stands in, which keeps as little; shorter rows are planned with plain "
    "attention, which keeps their logits"
)
"""What a plan for GPUs says of its attention."""


def open_devices(topology: Topology) -> list[Any]:
    """Returns the devices of a topology; those of TPUs and GPUs only compile."""
    if topology.platform == "cpu":
        return jax.devices()[: topology.devices]
    if topology.platform == "cuda":
        return _gpus(topology.devices)
    options: dict[str, Any] = {}
    # The compiler describes whole hosts unless told otherwise.
    if topology.devices == 1:  # part of a host: the default host has four chips
        options["chips_per_host_bounds"] = [1, 1, 1]
    if topology.kind == "v4":  # as on the pod: a chip's two cores are one device
        options["chip_config_name"] = "megacore"
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, **options
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"the compiler has no topology {topology.name}: {first}"
        ) from error
    return list(described.devices)


def _gpus(count: int) -> list[Any]:
    return list(
        topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{count}",
            target_config=H100_CONFIG.read_text(),
        ).devices
    )


@contextmanager
def as_if_on(devices: list[Any], topology: Topology, mesh: Mesh) -> Iterator[None]:
    """Makes tracing and lowering choose what they would on these devices.

    Backends of operations ask the target that is set, Mosaic asks the mesh. A GPU's
    programs do without cuDNN, which only a machine that has it can compile: see
    `STAND_IN`.
    """
    if topology.platform == "cpu":
        with jax.set_mesh(mesh):
            yield
        return
    # Without cuDNN: the compiler would look for the library when it compiles.
    planned = target.Target.of(devices[0], cudnn=False)
    with (
        target.as_if(planned),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield
