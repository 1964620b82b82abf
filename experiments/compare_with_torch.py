"""Our layers and steps compared with PyTorch's, in one run: float32, on CPU.

    python experiments/compare_with_torch.py CASE --torch-python PYTHON

| CASE | ours | theirs |
|---|---|---|
| attention | the layers of `bench rat`: attention, RAT(16), RNN | attention by SDPA |
| transformer | the Transformer of `bench recurrent_transformer` | its block by SDPA |
| tiled | the Recurrent Transformer there | the authors', eager and compiled |
| mamba | the mixer of `bench recurformer` | MambaMixer of transformers |
| nanochat | the base of `bench latent_recurrent_transformer` | eager and compiled |

Layers have the same weights and input on both sides, and the output's largest
difference is printed. Sides take turns, so that a ratio comes from one machine at one
load; each figure is the fastest of all turns. PYTHON is an interpreter that has torch
and numpy (for mamba transformers too, which runs its loop over positions in PyTorch
without mamba-ssm's CUDA kernels). `tiled` and `nanochat` take a checkout:

    git clone https://github.com/geniucos/recurrent-transformer authors
    PYTHON -m pip install omegaconf boto3 cached_path datasets importlib_resources
    python experiments/compare_with_torch.py tiled --torch-python PYTHON \
        --checkout authors --lengths 256 --width 128

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 3c3a3d7
    PYTHON -m pip install filelock
    python experiments/compare_with_torch.py nanochat --torch-python PYTHON \
        --checkout nanochat
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from recurjax.bench import (
    latent_recurrent_transformer,
    rat,
    recurformer,
    recurrent_transformer,
)
from recurjax.bench.timing import repeat
from recurjax.bench.torch_peer import answer_of
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.layers.mamba import Mamba
from recurjax.layers.position import Alibi, alibi_slopes
from recurjax.machine import host
from recurjax.model import ModelConfig, count_parameters
from recurjax.parameters import to_nested_dict
from recurjax.ranges import PositiveInt, RangeChecks
from recurjax.training.objective import NextToken
from recurjax.types import Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.recurformer import MambaConfig

Shape = Mapping[str, int]
Times = dict[tuple[str, str], float]
"""(side, pass): milliseconds."""

PEERS = Path(__file__).with_name("torch_peers.py")
"""What runs in PyTorch's interpreter."""

PASSES = ("forward", "forward_backward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(RangeChecks):
    """Times both sides in turns.

    Attributes:
      case: what is compared.
      torch_python: an interpreter that has torch and numpy.
      checkout: the authors' or nanochat's code, for `tiled` and `nanochat`.
      lengths: T; none: the case's own.
      batch, width, heads, layers, vocabulary: B, D, H, L, V; None: the case's own.
      turns: turns of each side.
      repeats: timed calls of each program in a turn.
      threads: torch's threads.
    """

    case: Annotated[
        Literal["attention", "transformer", "tiled", "mamba", "nanochat"],
        tyro.conf.Positional,
    ]
    torch_python: str
    checkout: Path | None = None
    lengths: tuple[PositiveInt, ...] = ()
    batch: PositiveInt | None = None
    width: PositiveInt | None = None
    heads: PositiveInt | None = None
    layers: PositiveInt | None = None
    vocabulary: PositiveInt | None = None
    turns: PositiveInt = 3
    repeats: PositiveInt = 5
    threads: PositiveInt = 2

    def shape(self, case: "Case") -> dict[str, int]:
        """Returns the case's sizes with those that were named."""
        named = {"B": self.batch, "D": self.width, "H": self.heads}
        named |= {"L": self.layers, "V": self.vocabulary}
        shape = dict(case.shape) | {k: v for k, v in named.items() if v is not None}
        if shape["D"] % (2 * shape.get("H", 1)):
            raise UserError(
                f"--width must be a multiple of 2 x --heads, got {shape['D']} and "
                f"{shape.get('H', 1)}"
            )
        return shape


class Side(NamedTuple):
    """One of PyTorch's implementations.

    Attributes:
      name: in the table.
      peer: its function in `torch_peers.py`.
      eager: whether torch.compile is off where the peer would use it.
    """

    name: str
    peer: str
    eager: bool = False


class Case(NamedTuple):
    """One comparison.

    Attributes:
      shape: sizes by letter, without T.
      lengths: T.
      passes: columns of the table.
      sides: PyTorch's.
      reference: the side that ratios divide by.
      arrays: function of a shape that returns the arguments of the peer's module, the
        input and our output.
      ours: function of a shape and repeats that returns our milliseconds.
      parameters: function of a shape that returns the model's number of parameters;
        None: outputs are compared.
      checkout: what a checkout of the code has; empty: none is needed.
    """

    shape: Shape
    lengths: tuple[int, ...]
    passes: tuple[str, ...]
    sides: tuple[Side, ...]
    reference: str
    arrays: Callable[[Shape], dict[str, Any]]
    ours: Callable[[Shape, int], Times]
    parameters: Callable[[Shape], int] | None = None
    checkout: str = ""


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table for each length."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="compare_with_torch.py")
    case = CASES[options.case]
    lengths, shape = options.lengths or case.lengths, options.shape(case)
    if case.checkout and not (
        options.checkout and (options.checkout / case.checkout).exists()
    ):
        raise UserError(
            f"--checkout {options.checkout} is not a checkout of the code that "
            f"{options.case} compares with: it has no {case.checkout}"
        )
    for length in lengths:
        times = measure(case, shape | {"T": length}, options)
        print(markdown(case, length, times), flush=True)
    return 0


def measure(case: Case, shape: Shape, options: Options) -> Times:
    """Runs all sides in turns; returns the fastest time of each pass."""
    best: Times = {}
    question = {"shape": shape, "threads": options.threads, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        np.savez(arrays, allow_pickle=False, **case.arrays(shape))
        for _ in range(options.turns):
            times: Times = {}
            for side in case.sides:
                answer = _ask(side, question | {"arrays": str(arrays)}, options)
                _compare(side, answer, case, shape)
                times |= {(side.name, what): ms for what, ms in answer.items()}
            for key, ms in (times | case.ours(shape, options.repeats)).items():
                best[key] = min(ms, best.get(key, ms))
    return best


def markdown(case: Case, length: int, times: Times) -> str:
    """Returns a table of milliseconds, with those over the reference's in brackets."""
    lines = [f"| T {length}, ms (over {case.reference}) | {' | '.join(case.passes)} |"]
    lines.append("|---" * (len(case.passes) + 1) + "|")
    for name in dict.fromkeys(name for name, _ in times):
        cells = []
        for what in case.passes:
            ms, of = times.get((name, what)), times.get((case.reference, what))
            ratio = "" if ms is None or of is None else f" ({ms / of:.2f})"
            cells.append("" if ms is None else f"{ms:.2f}{ratio}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _ask(side: Side, question: dict[str, Any], options: Options) -> dict[str, Any]:
    """Times a side in a process of its own."""
    environment = {}
    if options.checkout is not None:
        environment["PYTHONPATH"] = str(options.checkout.absolute())
    if side.eager:  # An optimizer may be compiled too.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    question = question | {"eager": side.eager}
    return answer_of(
        *(options.torch_python, PEERS, side.peer, json.dumps(question)),
        environment=environment,
    )


def _compare(side: Side, answer: dict[str, Any], case: Case, shape: Shape) -> None:
    """Removes from an answer what is not time, and prints or checks it."""
    if case.parameters is None:
        apart = answer.pop("difference")
        print(f"{side.name}, T {shape['T']}: outputs apart by {apart:.1e}", flush=True)
        return
    theirs, ours = answer.pop("parameters"), case.parameters(shape)
    if theirs != ours:
        raise UserError(
            f"{side.name}'s model has {theirs:,} parameters and ours {ours:,}: "
            "check out the version that this file names"
        )


def _attention_arrays(shape: Shape) -> dict[str, Any]:
    """Returns the attention layer's weights by path, an input x, and our output y."""
    mixer = rat.mixers(dict(shape))["attention"]
    layer = jax.jit(partial(rat.MixerLayer, mixer, shape["D"]))(jax.random.key(0))
    x = _input(shape)
    ids = jnp.zeros(x.shape[:2], jnp.int32)

    @jax.jit
    def forward(layer, x):
        return layer(x, layer.mixer.init_cache(1, len(x), 0, x.dtype), Tokens(ids))[0]

    nested = to_nested_dict(layer)
    weights = {"scale": nested["norm"]["scale"]} | nested["mixer"]["attention"]
    return _numpy(weights | {"x": x, "y": forward(layer, x)})


def _attention_times(shape: Shape, repeats: int) -> Times:
    mixers = rat.mixers(dict(shape))
    rows = [
        row
        for name in ("attention", "rat16", "rnn")
        for row in rat.layer_rows(name, mixers[name], dict(shape), "float32", repeats)
    ]
    sides = [row.name.split("/")[1:] for row in rows]
    return {(name, what): r.min_ms for (name, what), r in zip(sides, rows, strict=True)}


def _block(shape: Shape, layer: str) -> recurrent_transformer.LayerPasses:
    sizes = dict(shape)
    config = recurrent_transformer.layers(sizes)[layer]
    return recurrent_transformer.programs(config, sizes, "float32")


def _block_arrays(shape: Shape, *, layer: str) -> dict[str, Any]:
    """Returns the layer's weights by path, the input x and our output y."""
    passes = _block(shape, layer)
    block = jax.tree.map(lambda leaf: leaf[0], to_nested_dict(passes.stack))["blocks"]
    if len(block) == 1:  # The Transformer's are in runs of equal layers.
        (block,) = block.values()
    flat = jax.tree_util.tree_flatten_with_path(block)[0]
    arrays = {".".join(str(key.key) for key in path): leaf for path, leaf in flat}
    arrays |= {"x": passes.x, "y": passes.forward(passes.stack, passes.x)}
    arrays["slopes"] = alibi_slopes(shape["H"], Alibi()).astype(np.float32)
    return _numpy(arrays)


def _block_times(shape: Shape, repeats: int, *, layer: str) -> Times:
    passes = _block(shape, layer)
    times = {}
    for what in PASSES:
        call = partial(getattr(passes, what), passes.stack, passes.x)
        times["ours", what] = 1e3 * min(repeat(call, repeats=repeats))
    return times


def _mamba_arrays(shape: Shape) -> dict[str, Any]:
    """Returns the mixer's weights by name, an input x, and our output y."""
    config = MambaConfig(dt_rank=recurformer.DT_RANK)
    mamba, x = Mamba(config, shape["D"], rngs=nnx.Rngs(0)), _input(shape)
    y = jax.jit(lambda mamba, x: mamba(x, mamba.init_cache(len(x)))[0])(mamba, x)
    return _numpy(to_nested_dict(mamba) | {"x": x, "y": y})


def _mamba_times(shape: Shape, repeats: int) -> Times:
    rows = recurformer.mixer_rows(dict(shape), "float32", repeats)
    return {("ours", row.name.split("/")[1]): row.min_ms for row in rows}


def _base_model(shape: Shape) -> ModelConfig:
    """Returns the bench's baseline, its value embeddings where nanochat has them."""
    config = latent_recurrent_transformer.model_of("base", dict(shape), "float32")
    stack = cast(LatentRecurrentTransformerConfig, config.stack)
    return replace(config, stack=replace(stack, value_embeddings="alternating"))


def _base_arrays(shape: Shape) -> dict[str, Any]:
    stack = cast(LatentRecurrentTransformerConfig, _base_model(shape).stack)
    return {"heads": np.asarray(stack.heads)}


def _base_times(shape: Shape, repeats: int) -> Times:
    rows = latent_recurrent_transformer.training_rows(
        *("nanochat", _base_model(shape), NextToken()),
        shape=dict(shape),
        repeats=repeats,
    )
    return {("ours", row.name.rpartition("/")[2]): row.min_ms for row in rows}


def _input(shape: Shape) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (shape["B"], shape["T"], shape["D"]))


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def _without_length(shape: Shape) -> dict[str, int]:
    return {letter: size for letter, size in shape.items() if letter != "T"}


_BLOCK = recurrent_transformer.SMALL[-1]
_BASE = latent_recurrent_transformer.SMALL
CASES = {
    "attention": Case(
        shape={"B": 1, "D": rat.SMALL["D"], "H": rat.SMALL["H"]},
        lengths=(4096,),
        passes=(*PASSES, "decode"),
        sides=(Side("PyTorch, SDPA", "attention"),),
        reference="PyTorch, SDPA",
        arrays=_attention_arrays,
        ours=_attention_times,
    ),
    "transformer": Case(
        shape=_without_length(_BLOCK),
        lengths=(_BLOCK["T"],),
        passes=PASSES,
        sides=(Side("PyTorch, SDPA", "transformer"),),
        reference="ours",
        arrays=partial(_block_arrays, layer="transformer"),
        ours=partial(_block_times, layer="transformer"),
    ),
    "tiled": Case(
        shape=_without_length(_BLOCK),
        lengths=(_BLOCK["T"],),
        passes=PASSES,
        sides=(
            Side("the authors' tiled layer, eager", "tiled", eager=True),
            Side("the authors' tiled layer, compiled", "tiled"),
        ),
        reference="ours",
        arrays=partial(_block_arrays, layer="prefix"),
        ours=partial(_block_times, layer="prefix"),
        checkout="olmo",
    ),
    "mamba": Case(
        shape={"B": 1, "D": recurformer.SMALL_LAYER["D"]},
        lengths=(256, 2048),
        passes=PASSES,
        sides=(Side("transformers", "mamba"),),
        reference="ours",
        arrays=_mamba_arrays,
        ours=_mamba_times,
    ),
    "nanochat": Case(
        shape=_without_length(_BASE),
        lengths=(_BASE["T"],),
        passes=("forward_backward", "train_step"),
        sides=(
            Side("nanochat, eager", "nanochat", eager=True),
            Side("nanochat, compiled", "nanochat"),
        ),
        reference="ours",
        arrays=_base_arrays,
        ours=_base_times,
        parameters=lambda shape: count_parameters(_base_model(shape)).total,
        checkout="nanochat/gpt.py",
    ),
}


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    run_script(main)
