"""What a run directory holds, for comparing runs."""

import json

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from recurjax.training.checkpoint import Checkpoints
from recurjax.training.checkpoint.manifest import Manifest, named, nested

TIMINGS = ("tokens_per_second", "mfu")


def arrays(root):
    """Returns the newest checkpoint's step and, by name, all of its arrays."""
    checkpoints = Checkpoints(root / "checkpoints")
    step = checkpoints.steps()[-1]
    file = root / "checkpoints" / str(step) / "manifest" / "manifest.json"
    place = SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=place)
        for name, entry in Manifest.from_text(file.read_text()).arrays.items()
    }
    restored = checkpoints.restore(nested(wanted), step=step)
    checkpoints.close()
    return step, {n: np.asarray(x) for n, x in named(restored.tree).items()}


def metrics(root):
    """Returns the rows of metrics.jsonl without their timings."""
    rows = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def assert_same_run(got, want):
    """Compares parameters, optimizer state and metrics bit for bit."""
    (step, left), (last, right) = arrays(got), arrays(want)
    assert step == last and left.keys() == right.keys()
    for name, array in left.items():
        assert array.tobytes() == right[name].tobytes(), name
    assert metrics(got) == metrics(want)
