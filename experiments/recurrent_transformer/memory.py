"""Whether the 300M training step fits: compiled for devices that are not here.

    make compilers
    python experiments/recurrent_transformer/memory.py

The step is that of c4_300m_recurrent_12 (12 layers of width 1408, batch 512 x 512) for
one H100 (80 GB) and for a v5e slice of 16 chips (16 GB each) with the batch spread over
all of them, on the XLA path and with the kernels. Bytes are from the compiler's own
analysis of the program, by device; `accumulation` cuts the batch into parts. A program
that the compiler finds no room for is reported in its words.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("runs.py")
COMPILERS = ROOT / ".compilers"
H100_CONFIG = ROOT / "recurjax" / "plan" / "h100_target_config.txtpb"

CAPACITY = {"h100": 80e9, "v5e:4x4": 16 * 2**30}
"""Bytes of memory of one device."""

CASES = tuple(
    (target, path, accumulation)
    for target, parts in (("h100", (1, 2, 4, 8)), ("v5e:4x4", (1, 2, 4)))
    for path in ("xla", "kernels")
    for accumulation in parts
)


def compile_step(target: str, path: str, accumulation: int) -> dict[str, int]:
    """Compiles the training step and returns its bytes; run in a process of its own."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

    from pallas_kernels.recurrent_prefill.mosaic_tpu import backend as mosaic_tpu
    from pallas_kernels.recurrent_prefill.triton import backend as triton
    from recurjax.run_table import load_experiment
    from recurjax.sharding import (
        AXES,
        MeshConfig,
        batch_sharding,
        make_mesh,
        replicated,
        shardings,
    )
    from recurjax.training.optimizer import build_optimizer
    from recurjax.training.step import new_state, train_step
    from recurjax.types import Batch

    on_gpu = target == "h100"
    if on_gpu:
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=H100_CONFIG.read_text()
        )
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target)
    if path == "kernels":  # what runs is asked of the device that is here otherwise
        backend: Any = triton if on_gpu else mosaic_tpu
        backend.supported = backend.expressible
    mesh = make_mesh(MeshConfig(), list(topology.devices))
    kind = "NVIDIA H100 80GB HBM3" if on_gpu else topology.devices[0].device_kind
    device = AbstractDevice(kind, None if on_gpu else 1, "cuda" if on_gpu else "tpu")
    around = AbstractMesh(
        mesh.axis_sizes, AXES, axis_types=mesh.axis_types, abstract_device=device
    )
    experiment = load_experiment(f"{TABLE}:c4_300m_recurrent_12")
    training = experiment.training
    optimizer = build_optimizer(
        experiment.optimizer, lambda step: 1e-3, clip=training.gradient_clip
    )
    state = jax.eval_shape(
        lambda key: new_state(key, experiment.model, optimizer, training.spikes),
        jax.random.key(0),
    )
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        shardings(state, mesh),
    )
    ids: Any = jax.ShapeDtypeStruct(
        (training.batch, training.length), "int32", sharding=batch_sharding(mesh)
    )
    objective = dataclasses.replace(experiment.objective, vocabulary_chunks=8)

    def step(state, batch):
        return train_step(
            state,
            batch,
            objective=objective,
            optimizer=optimizer,
            spikes=training.spikes,
            accumulation=accumulation,
        )

    out = (shardings(state, mesh), NamedSharding(mesh, replicated(mesh).spec))
    with jax.sharding.use_abstract_mesh(around):
        lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(
            placed, Batch(ids, ids)
        )
    text = lowered.as_text()
    memory: Any = lowered.compile().memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "kernels": len(re.findall(r"tpu_custom_call|gpu\.triton", text)),
    }


def ask(target: str, path: str, accumulation: int) -> dict[str, Any]:
    """Compiles one case in a child process; on failure returns its last words."""
    child = subprocess.run(
        [sys.executable, __file__, "--case", target, path, str(accumulation)],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(COMPILERS)]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    lines = child.stderr.strip().splitlines()
    told = next((line for line in lines if "RESOURCE_EXHAUSTED" in line), lines[-1])
    return {"failed": told.strip()[:300]}


def line(target: str, path: str, accumulation: int, got: dict[str, Any]) -> str:
    """Returns a row of the Markdown table."""
    start = f"| {target} | {path} | {accumulation} | "
    if "failed" in got:
        return start + f" | | no: {got['failed']} |"
    total = got["arguments"] + got["temporary"]
    fits = "yes" if total <= CAPACITY[target] else "no"
    sizes = (got["arguments"], got["temporary"])
    return start + " | ".join(f"{size / 1e9:.1f}" for size in sizes) + f" | {fits} |"


def main() -> None:
    """Prints a table, a row a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs=3, metavar=("TARGET", "PATH", "ACCUMULATION"))
    parser.add_argument("--targets", nargs="+", default=list(CAPACITY))
    parser.add_argument("--paths", nargs="+", default=["xla", "kernels"])
    parser.add_argument("--accumulation", nargs="+", type=int)
    options = parser.parse_args()
    if options.case:
        target, path, accumulation = options.case
        print(json.dumps(compile_step(target, path, int(accumulation))))
        return
    if not (COMPILERS / "jax_plugins").is_dir():
        sys.exit("no compilers for GPU and TPU here: run make compilers")
    print("| target | path | accumulation | arguments, GB | temporary, GB | fits |")
    print("|---|---|---|---|---|---|")
    for target, path, accumulation in CASES:
        chosen = options.accumulation is None or accumulation in options.accumulation
        if target in options.targets and path in options.paths and chosen:
            got = ask(target, path, accumulation)
            print(line(target, path, accumulation, got), flush=True)


if __name__ == "__main__":
    main()
