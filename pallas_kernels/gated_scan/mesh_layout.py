"""The op on a mesh: rows and channels are cut, a backend sees its own part.

A stream narrower than the gate is tiled over the channels: where channels are cut, each
device holds it whole, and its gradient is summed over them.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.mesh_cut import Cut, find_cut, local_shapes, run


def layout_of_call(gate, values, initial, starts, lengths) -> Cut | None:
    """Returns how the call is cut on the mesh that is set; None: it is not."""
    del initial, starts, lengths
    B, _, D = gate.shape
    widths = [v.shape[2] for v in values]

    def divide(devices: int) -> bool:
        part, rest = divmod(D, devices)
        return rest == 0 and all(W == D or part % W == 0 for W in widths)

    return find_cut(B, divide)


def refusal(backend: Any, layout: Cut | None, *arrays: Any, chunk) -> str | None:
    """Returns why a backend cannot run each device's part, None when it can."""
    if layout is None:
        return backend.supported(*arrays, chunk=chunk)
    if layout.refusal is not None:
        return layout.refusal
    reasons = []

    def ask(*parts: Any) -> None:
        reasons.append(backend.supported(*parts, chunk=chunk))

    jax.eval_shape(ask, *local_shapes(layout, _specs(layout, *arrays), arrays))
    return reasons[0]


def forward(backend: Any, layout: Cut | None, *arrays: Any, chunk) -> Any:
    """Runs a backend's forward on each device's part."""
    if layout is None:
        return backend.forward(*arrays, chunk=chunk)
    specs = _specs(layout, *arrays)
    streams = len(arrays[1])

    def local(*parts: Any) -> Any:
        return backend.forward(*parts, chunk=chunk)

    return run(layout, local, specs, _results(layout, streams), *arrays)


def backward(backend: Any, layout: Cut | None, *arrays: Any, chunk) -> Any:
    """Runs a backend's backward likewise.

    Args:
      arrays: those of the call, its states, and the gradients of states and finals.
    """
    if layout is None:
        return backend.backward(*arrays, chunk=chunk)
    gate, values = arrays[:2]
    specs = _specs(layout, *arrays[:5])
    states, finals = _results(layout, len(values))
    narrow = [v.shape[2] != gate.shape[2] for v in values]

    def local(*parts: Any) -> Any:
        for_gate, for_values, for_initial = backend.backward(*parts, chunk=chunk)
        if layout.columns is not None:
            for_values = tuple(
                jax.lax.psum(d, layout.columns) if is_narrow else d
                for d, is_narrow in zip(for_values, narrow, strict=True)
            )
        return for_gate, for_values, for_initial

    return run(
        layout, local, (*specs, states, states, finals), tuple(specs[:3]), *arrays
    )


def _specs(layout: Cut, gate, values, initial, starts, lengths) -> tuple[Any, ...]:
    rows, columns = layout.by_row, layout.columns
    wide = P(rows, None, columns)
    return (
        wide,
        tuple(wide if v.shape[2] == gate.shape[2] else P(rows) for v in values),
        tuple(P(rows, columns) for _ in initial),
        None if starts is None else P(rows),
        None if lengths is None else P(rows),
    )


def _results(layout: Cut, streams: int) -> tuple[Any, Any]:
    rows, columns = layout.by_row, layout.columns
    return (P(rows, None, columns),) * streams, (P(rows, columns),) * streams
