"""The op: L Recurrent Transformer layers over T more positions of every row."""

from functools import partial
from typing import Any, get_args

from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from pallas_kernels import dispatch, mesh_cut
from pallas_kernels.dispatch import Implementation, check_kinds, check_shapes
from pallas_kernels.mesh_cut import Cut
from pallas_kernels.recurrent_prefill.call import (
    Array,
    BlockSizes,
    LayerSpec,
    LayerWeights,
    RecurrentCache,
    RecurrentPrefillCall,
    RecurrentPrefillOptions,
    Rows,
    Schedule,
    source_width,
)
from pallas_kernels.recurrent_prefill.mesh_layout import (
    cache_specs,
    check_stages,
    find_cut,
    options_on_device,
    specs,
)
from pallas_kernels.recurrent_prefill.xla.one_position import write_pending


def recurrent_prefill(
    x: Float[Array, "B T D"],
    weights: LayerWeights,
    cache: RecurrentCache,
    *,
    spec: LayerSpec,
    rows: Rows | None = None,
    schedule: Schedule | None = None,
    tile: int | None = None,
    blocks: BlockSizes | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T D"], RecurrentCache]:
    """Runs z_i = layer(x_i, persistent pairs of j < i, temporary pair of i) for all i.

    With n the pre-norm, kt_i, vt_i = W_k n(x_i), W_v n(x_i) and k_i, v_i those of z_i:

        a_i = W_out softmax_j([q_i k_j + b_ij for j < i, q_i kt_i]) [v_j ..., vt_i]
        y_i = x_i + s a_i;   z_i = y_i + s MLP(n'(y_i))

    Source: the Recurrent Transformer paper, section 3.2. Differentiable in x, weights
    and cache; the backward pass keeps O(T) memory a layer.

    On a mesh set with `jax.set_mesh` the batch is cut over its axes data and fsdp, and
    the layers of a wavefront over its axis stage, where it has them.

    Args:
      x: residual stream; it is at least float32 inside, z has x's dtype.
      weights: weights of L layers, which run one after the other.
      cache: cache of the positions before x; of length 0 for training from position 0.
      spec: every switch of the layer.
      rows: lengths and segments; None: full rows of one document.
      schedule: "naive": position by position over the full prefix; "prefix": each tile
        first meets all earlier ones; "wavefront": the same for all L layers at once,
        each one tile behind the one below. A name means one order of work on every
        backend; all give the same result up to rounding. None: a wavefront where
        launches would take most of a training call on a GPU (`choose_schedule`), else
        prefix.
      tile: positions handled between two tile updates, a multiple of spec.block. None:
        chosen by measurement.
      blocks: how kernels cut the call apart from that; None: they choose.
      implementation: a backend, which then runs or raises; None: the first that can.

    Returns:
      z, and the cache with the new positions: after a decode step without the last
      one's pair (`RecurrentCache`).

    Raises:
      ValueError: shapes disagree, more positions than the cache has slots, an unknown
        schedule, a tile that is not valid, or stages that do not divide the layers.
      NotImplementedError: the named backend cannot; segments with a real cache.
    """
    rows = Rows() if rows is None else rows
    options = RecurrentPrefillOptions(
        spec=spec, schedule=schedule, tile=tile, blocks=blocks or BlockSizes()
    )
    call = RecurrentPrefillCall(x, weights, cache, rows, options)
    # Before any backend sees it, so that a mistake reads the same whatever would run.
    check_call(call)
    check_stages(weights, schedule)
    return dispatch.run(OP, call, implementation=implementation)


def check_call(call: RecurrentPrefillCall) -> None:
    """Raises ValueError or NotImplementedError when a call makes no sense."""
    x, weights, cache, rows, options = call
    spec, schedule, tile = options.spec, options.schedule, options.tile
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(_wants(f"x of shape [B, T >= 1, D], none 0, got {x.shape}"))
    _check_weights(x.shape[2], weights, spec)
    _check_cache(x, weights, cache, spec)
    _check_rows(x, cache, rows)
    named = {f"weights.{name}": leaf for name, leaf in weights._asdict().items()}
    pairs = {f"cache.{name}": leaf for name, leaf in cache._asdict().items()}
    places = {name: pairs.pop(f"cache.{name}") for name in ("position", "written")}
    check_kinds(
        "recurrent_prefill",
        floating={"x": x} | named | pairs,
        integers={f"cache.{name}": leaf for name, leaf in places.items()}
        | rows._asdict(),
    )
    if schedule not in (None, *get_args(Schedule)):
        raise ValueError(
            _wants(f"a schedule of {list(get_args(Schedule))}, got {schedule!r}")
        )
    if tile is not None and tile < 1:
        raise ValueError(_wants(f"tile of at least 1 position, got {tile}"))
    if tile is not None and schedule == "naive":
        raise ValueError(_wants(f'no tile with schedule "naive", got {tile}'))
    if tile is not None and tile % spec.block:
        raise ValueError(
            _wants(f"tile to be a multiple of spec.block={spec.block}, got {tile}")
        )


def _check_weights(width: int, weights: LayerWeights, spec: LayerSpec) -> None:
    # Sizes that the spec does not have are read off w_up; every other weight must
    # agree.
    L, F = weights.w_up.shape[0], weights.w_up.shape[-1]
    H, K, E = spec.heads, spec.key_heads, spec.head_width
    shapes = {
        "w_q": (width, H, E),
        "w_k": (width, K, E),
        "w_v": (width, K, E),
        "w_out": (H, E, width),
        "w_up": (width, F),
        "w_gate": (width, F),
        "w_down": (F, width),
        "q_norm_scale": (H * E,),
        "q_norm_bias": (H * E,),
        "k_norm_scale": (K * E,),
        "k_norm_bias": (K * E,),
        "b_q": (H, E),
        "b_k": (K, E),
        "b_v": (K, E),
        "b_up": (F,),
        "b_gate": (F,),
    }
    expected = {
        f"weights.{name}": (leaf, (L, *shapes.get(name, (width,))))
        for name, leaf in weights._asdict().items()
    }
    check_shapes("recurrent_prefill", expected)
    if weights.b_gate is not None and weights.w_gate is None:
        raise ValueError(_wants("weights.b_gate with a w_gate only"))


def _check_cache(
    x: Array, weights: LayerWeights, cache: RecurrentCache, spec: LayerSpec
) -> None:
    (B, T, D), L = x.shape, weights.w_q.shape[0]
    S = cache.keys.shape[2]
    # A training cache keeps nothing, not even an unfinished block.
    open_slots = spec.block - 1 if S else 0
    shapes = {
        "keys": (L, B, S, spec.key_heads, spec.head_width),
        "temporary_keys": (L, B, open_slots, spec.key_heads, spec.head_width),
        "source": (L, B, source_width(S, D, spec)),
        "position": (B,),
        "written": (B,),
    }
    shapes["values"] = shapes["keys"]
    shapes["temporary_values"] = shapes["temporary_keys"]
    check_shapes(
        "recurrent_prefill",
        {f"cache.{name}": (getattr(cache, name), shapes[name]) for name in shapes},
    )
    # Slot s holds position s: unlike a ring buffer, this cache never overwrites.
    if S and T > S:
        raise ValueError(
            _wants(f"at most as many positions as the cache has slots, {S}, got {T}")
        )


def _check_rows(x: Array, cache: RecurrentCache, rows: Rows) -> None:
    B, T = x.shape[:2]
    arrays = {"lengths": (rows.lengths, (B,)), "segments": (rows.segments, (B, T))}
    check_shapes("recurrent_prefill", arrays)
    if rows.segments is not None and cache.slots:
        raise NotImplementedError(
            "recurrent_prefill: segments work with the training cache (length "
            "0) only: leave them out"
        )


def _wants(what: str) -> str:
    return f"recurrent_prefill: needs {what}"


def _prepare(call: RecurrentPrefillCall, backend: Any, cut: Cut | None) -> Any:
    """Writes the pair that a decode step has left, each device that of its rows.

    A backend that makes the pair together with its own reads it as it was left.
    """
    part = call
    if cut is not None:
        part = call._replace(options=options_on_device(cut, call.options))
    if not call.cache.source.size or backend.reads_pending(part):
        return call
    write = partial(write_pending, spec=call.spec)
    cut = find_cut(call)
    if cut is None or not cut.cuts:
        return call._replace(cache=write(call.weights, call.cache))
    of_cache = cache_specs(cut)
    in_specs = (P(cut.columns), of_cache)
    cache = mesh_cut.run(cut, write, in_specs, of_cache, call.weights, call.cache)
    return call._replace(cache=cache)


OP = dispatch.Op(
    name="recurrent_prefill",
    backends=dispatch.backends_in("pallas_kernels.recurrent_prefill", module="backend"),
    find_cut=find_cut,
    specs=specs,
    prepare=_prepare,
    on_device=options_on_device,
    # The compiler alone would sum weights' gradients over the devices once per tile.
    cuts_xla=True,
)
