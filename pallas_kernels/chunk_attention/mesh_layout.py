"""The op on a mesh: rows and heads are cut, a backend sees its own part.

Where fewer groups of queries than heads are given, head h reads group h mod N: heads
are cut into parts of whole rounds of the groups, each device holds all groups, and
their gradient is summed over the devices.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.chunk_attention.arrays import ChunkEnds
from pallas_kernels.mesh_cut import Cut, find_cut, local_shapes, run


def layout_of_call(q, own_logits, own_values, ends, first, documents) -> Cut | None:
    """Returns how the call is cut on the mesh that is set; None: it is not."""
    del own_values, ends, first, documents
    groups, heads = q.shape[2], own_logits.shape[2]

    def divide(devices: int) -> bool:
        part, rest = divmod(heads, devices)
        return rest == 0 and (groups == heads or part % groups == 0)

    return find_cut(q.shape[0], divide)


def refusal(backend: Any, layout: Cut | None, *arrays: Any, **options) -> str | None:
    """Returns why a backend cannot run each device's part, None when it can."""
    if layout is None:
        return backend.supported(*arrays, **options)
    if layout.refusal is not None:
        return layout.refusal
    reasons = []

    def ask(*parts: Any) -> None:
        reasons.append(backend.supported(*parts, **options))

    jax.eval_shape(ask, *local_shapes(layout, _specs(layout, *arrays), arrays))
    return reasons[0]


def forward(backend: Any, layout: Cut | None, *arrays: Any, **options) -> Any:
    """Runs a backend's forward on each device's part."""
    if layout is None:
        return backend.forward(*arrays, **options)
    specs = _specs(layout, *arrays)

    def local(*parts: Any) -> Any:
        return backend.forward(*parts, **options)

    return run(layout, local, specs, (specs[2], _by_head(layout)), *arrays)


def backward(backend: Any, layout: Cut | None, *arrays: Any, **options) -> Any:
    """Runs a backend's backward likewise.

    Args:
      arrays: those of the call, o, its log normalizer, and the gradient of o.
    """
    if layout is None:
        return backend.backward(*arrays, **options)
    q, own_logits = arrays[:2]
    specs = _specs(layout, *arrays[:6])
    o = specs[2]
    shares_queries = layout.columns is not None and q.shape[2] != own_logits.shape[2]

    def local(*parts: Any) -> Any:
        for_q, *others = backend.backward(*parts, **options)
        if shares_queries:
            for_q = jax.lax.psum(for_q, layout.columns)
        return for_q, *others

    by_head = _by_head(layout)
    results = (*specs[:3], by_head, by_head)
    return run(layout, local, (*specs, o, by_head, o), results, *arrays)


def _specs(
    layout: Cut, q, own_logits, own_values, ends, first, documents
) -> tuple[Any, ...]:
    rows, columns = layout.by_row, layout.columns
    heads = P(rows, None, columns)
    by_head, by_row = _by_head(layout), P(rows)
    known = None if ends.documents is None else by_row
    return (
        heads if q.shape[2] == own_logits.shape[2] else by_row,
        heads,
        heads,
        ChunkEnds(by_head, by_head, known),  # pyright: ignore[reportArgumentType]
        None if first is None else by_row,
        None if documents is None else by_row,
    )


def _by_head(layout: Cut) -> P:
    """Of arrays with heads before positions: keys, values, the log normalizer."""
    return P(layout.by_row, layout.columns)
