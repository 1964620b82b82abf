"""The paper's Tables 6 to 8: one layer's training, forward and decode.

D 2048, heads of 128, bfloat16, projections included: 262,144 tokens in all for training
and forward at T 4096 to 262144; one token at position T - 1 for a batch of 64, 512 and
1024. RNN, RAT(128), RAT(64), RAT(16) and, on a GPU, cuDNN's flash attention. "forward"
is Table 7 without the copy of keys and values into a cache. A decode's time is that of
one of 16 steps in one program. Expect what the paper has from one H100 of a GH200,
shown in brackets. Writes latency.json and latency.md. `--tiny` runs it on any CPU.

    python experiments/rat/latency.py --out results
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from device_memory import unless_out_of_memory
from flax import nnx
from paper_latency import PAPER, Table

from recurjax.bench.rat import mixers
from recurjax.bench.report import device_name
from recurjax.bench.timing import repeat
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.layers.initialization import InitConfig
from recurjax.types import Array, Tokens
from recurjax.variants.rat import MixerConfig, presets
from recurjax.variants.rat.mixers import make_mixer

_STEPS = 16  # of decode in one program: what a launch from the host costs is divided.


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times the layers and writes both files.

    Attributes:
      out: a folder for latency.json and latency.md.
      lengths: T.
      batches: batch sizes of the decode.
      tokens: in all, of training and forward.
      layers: layers to time: rnn, rat128, rat64, rat16, attention, swa.
      repeats: timed calls of each program.
      tiny: width 64: for a CPU.
    """

    out: Path = Path(".")
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072, 262144)
    batches: tuple[int, ...] = (64, 512, 1024)
    tokens: int = 262_144
    layers: tuple[str, ...] = ("rnn", "rat128", "rat64", "rat16", "attention")
    repeats: int = 5
    tiny: bool = False

    def __post_init__(self):
        unknown = set(self.layers) - set(_mixers(64, 64))
        if unknown:
            raise UserError(f"--layers: there is no {', '.join(sorted(unknown))}")
        if not self.out.is_dir():
            raise UserError(f"--out: there is no directory {self.out}")
        if min(self.lengths) < 1 or self.tokens < max(self.lengths):
            raise UserError("--tokens must be at least the longest of --lengths")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyCell:
    """One cell of a table.

    Attributes:
      table: training, forward or decode.
      layer: its name.
      length: T, for decode the position + 1.
      batch: B.
      ms: the fastest of the repeats; None: out of memory.
    """

    table: Table
    layer: str
    length: int
    batch: int
    ms: float | None


def main(argv: list[str] | None = None) -> int:
    """Measures cell by cell; both files are rewritten after each."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="latency.py")
    cells = []
    for cell in measure(options):
        cells.append(cell)
        text = "out of memory" if cell.ms is None else f"{cell.ms:,.2f} ms"
        where = f"{cell.table} {cell.layer} T {cell.length} batch {cell.batch}"
        print(f"{where}: {text}", flush=True)
        record = {"device": device_name(), "rows": [asdict(cell) for cell in cells]}
        write_atomic(options.out / "latency.json", json_text(record, indent=2) + "\n")
        write_atomic(options.out / "latency.md", markdown(cells))
    print(markdown(cells), end="")
    return 0


def measure(options: Options) -> Iterator[LatencyCell]:
    """Times every layer at every length."""
    width = 64 if options.tiny else 2048
    for length in options.lengths:
        batch = options.tokens // length
        for name in options.layers:
            mixer = _mixers(width, length)[name]
            layer = jax.jit(partial(_make, mixer, width))(jax.random.key(0))
            cell = partial(LatencyCell, layer=name, length=length)
            for table in ("training", "forward"):
                ms = _pass_ms(table, layer, batch, length, width, options.repeats)
                yield cell(table=table, batch=batch, ms=ms)
            for rows in options.batches:
                ms = _decode_ms(layer, rows, length, width, options.repeats)
                yield cell(table="decode", batch=rows, ms=ms)


def markdown(cells: list[LatencyCell]) -> str:
    """Returns a table each, the paper's figure in brackets."""
    lengths = sorted({cell.length for cell in cells})
    lines = [device_name(), ""]
    for table in ("training", "forward", "decode"):
        lines += [f"{table}, ms (paper's, H100)", ""]
        heads = " | ".join(f"T {length}" for length in lengths)
        lines += [f"| layer | {heads} |", "|---" * (len(lengths) + 1) + "|"]
        rows = [cell for cell in cells if cell.table == table]
        batches = sorted({cell.batch for cell in rows}) if table == "decode" else [None]
        for batch in batches:
            for name in dict.fromkeys(cell.layer for cell in rows):
                columns = [_column(rows, name, length, batch) for length in lengths]
                label = name if batch is None else f"{name}, batch {batch}"
                lines.append(f"| {label} | {' | '.join(columns)} |")
        lines.append("")
    return "\n".join(lines)


def _column(cells: list[LatencyCell], name: str, length: int, batch: int | None) -> str:
    mine = [
        cell
        for cell in cells
        if (cell.layer, cell.length) == (name, length) and batch in (None, cell.batch)
    ]
    if not mine:
        return ""
    ours = "OOM" if mine[0].ms is None else f"{mine[0].ms:.2f}"
    theirs = PAPER.get((mine[0].table, name, batch, length), "none")
    return ours if theirs == "none" else f"{ours} ({theirs})"


def _mixers(width: int, length: int) -> dict[str, MixerConfig]:
    """Returns what `recurjax bench rat` times, and RAT(128), which the paper has."""
    heads = 16 if width == 2048 else 4
    rat128 = presets.rat(width=width, heads=heads, chunk=128)
    return mixers({"D": width, "H": heads, "T": length}) | {"rat128": rat128}


def _make(mixer: MixerConfig, width: int, key: Array) -> nnx.Module:
    init = InitConfig(output="same")
    layer = make_mixer(mixer, width, init, layer=0, layers=1, rngs=nnx.Rngs(key))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)


def _pass_ms(
    table: Literal["training", "forward"], layer, batch, length, width, repeats
) -> float | None:
    ids = jnp.zeros((batch, length), jnp.int32)

    def forward(layer, x: Array) -> Array:
        return layer(x, layer.init_cache(1, batch, 0, x.dtype), Tokens(ids))[0]

    def gradient(layer, x: Array):
        # The cotangent is y itself: ones alone would let products be left out.
        y, back = jax.vjp(forward, layer, x)
        return back(y)

    program = jax.jit(gradient if table == "training" else forward)

    def timed() -> float:
        x = jax.random.normal(jax.random.key(1), (batch, length, width), jnp.bfloat16)
        return min(repeat(partial(program, layer, x), repeats=repeats))

    seconds = unless_out_of_memory(timed)
    return None if seconds is None else 1e3 * seconds


def _decode_ms(layer, batch: int, length: int, width: int, repeats: int):
    ids = jnp.zeros((batch, 1), jnp.int32)

    @partial(jax.jit, donate_argnums=2)
    def steps(layer, x: Array, cache):
        def step(_, carry):
            x, cache = carry
            y, cache = layer(x, cache, Tokens(ids))
            return y, cache  # The position stays: every step is at T - 1.

        return jax.lax.fori_loop(0, _STEPS, step, (x, cache))

    def timed() -> float:
        cache = layer.init_cache(1, batch, length, jnp.bfloat16)
        at = jnp.full(batch, length - 1, jnp.int32)
        held = [cache._replace(position=at)]
        del cache
        x = jax.random.normal(jax.random.key(1), (batch, 1, width), jnp.bfloat16)

        def advance() -> Array:
            y, held[0] = steps(layer, x, held[0])
            return y

        return min(repeat(advance, repeats=repeats)) / _STEPS

    seconds = unless_out_of_memory(timed)
    return None if seconds is None else 1e3 * seconds


if __name__ == "__main__":
    run_script(main)
