"""Maximum throughput of the full 1.3B models: the paper's Table 1 and Fig. 5.

Generates 1024 tokens greedily after a prompt of 3072 (T 4096; also T 8192 and 16384),
with the largest batch that fits the device. The cache is filled by the real prefill, in
pieces, as any cut of a sequence gives the same; weights are bfloat16 and random.
Expect on one H100, after the paper: attention 3,052 tokens/s, RAT(16) 31,170,
attention-SWA 4,605, RAT(16)-SWA 13,582 at T 4096. `--tiny` runs the same on any CPU.

    python experiments/rat/throughput.py --json throughput.json
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from device_memory import largest_batch, unless_out_of_memory
from flax import nnx

from recurjax.bench.report import device_name
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import json_text
from recurjax.inference.engine.slots import (
    SequenceWise,
    Slots,
    decode_slots,
    empty_slots,
)
from recurjax.inference.sampling import SamplingConfig, sampling_rows
from recurjax.model import Decoder, ModelConfig
from recurjax.types import Array, Cache, Tokens
from recurjax.variants.rat import MixerConfig, presets

_PIECE_TOKENS = 2**14  # of one prefill call, over all rows: what its logits may take.


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Measures every model at every length.

    Attributes:
      models: models to time: rnn, rat16, attention, rat16_swa, attention_swa.
      lengths: prompt and new tokens together.
      new: tokens generated.
      most: the largest batch to try.
      tiny: two layers of width 64, T 32: for a CPU.
      json: writes the rows to this file.
    """

    models: tuple[str, ...] = (
        "rnn",
        "rat16",
        "attention",
        "rat16_swa",
        "attention_swa",
    )
    lengths: tuple[int, ...] = (4096, 8192, 16384)
    new: int = 1024
    most: int = 8192
    tiny: bool = False
    json: Path | None = None

    def __post_init__(self):
        unknown = set(self.models) - set(_patterns(width=64, length=64))
        if unknown:
            raise UserError(f"--models: there is no {', '.join(sorted(unknown))}")
        if not 1 <= self.new < min(self.lengths) or self.most < 1:
            raise UserError(
                "--new must be between 1 and the shortest of --lengths, --most be at "
                f"least 1, got {self.new}, {min(self.lengths)} and {self.most}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputRow:
    """One model at one length.

    Attributes:
      model: its name.
      prompt, new: tokens per row.
      batch: the largest that fits; 0: none does.
      cache_bytes: bytes of one row's cache.
      prefill_seconds, decode_seconds: seconds of prefill and decode of the full batch.
      tokens_per_second: new tokens of all rows over the decode's time.
      with_prefill: the same over both times.
    """

    model: str
    prompt: int
    new: int
    batch: int
    cache_bytes: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    with_prefill: float


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a line per row and writes the JSON after each."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="throughput.py")
    rows = []
    for row in measure(options):
        print(
            f"{row.model} T {row.prompt + row.new} batch {row.batch}: "
            f"{row.tokens_per_second:,.0f} tokens/s "
            f"({row.with_prefill:,.0f} with the prefill)",
            flush=True,
        )
        rows.append(row)
        if options.json is not None:
            record = {"device": device_name(), "rows": [asdict(row) for row in rows]}
            write_atomic(options.json, json_text(record, indent=2) + "\n")
    return 0


def measure(options: Options) -> Iterator[ThroughputRow]:
    """Measures every model at every length."""
    for length in options.lengths:
        for name in options.models:
            model = _model(name, length, tiny=options.tiny)
            yield _measure(name, model, length - options.new, options.new, options.most)


def _patterns(*, width: int, length: int) -> dict[str, tuple[MixerConfig, ...]]:
    size = {"width": width, "heads": 16 if width == 2048 else 4}
    rat, full = presets.rat(**size, chunk=16), presets.attention(**size)
    window = presets.attention(**size, window=min(1024, length // 4))
    return {
        "rnn": (presets.rnn(**size, length=length),),
        "rat16": (rat,),
        "attention": (full,),
        "rat16_swa": (rat, window),
        "attention_swa": (full, window),
    }


def _model(name: str, length: int, *, tiny: bool) -> Decoder:
    """Returns the model with bfloat16 weights: each step reads half the bytes."""
    width, layers, vocabulary = (64, 2, 257) if tiny else (2048, 24, 32000)
    pattern = _patterns(width=width, length=length)[name]
    stack = presets.stack(*pattern, layers=layers, width=width)
    config = ModelConfig(
        vocabulary=vocabulary, stack=stack, tied_head=True, dtype="bfloat16"
    )

    @jax.jit
    def make(key: Array) -> Decoder:
        model = Decoder(config, rngs=nnx.Rngs(key))
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)

    return make(jax.random.key(0))


def _measure(
    name: str, model: Decoder, prompt: int, new: int, most: int
) -> ThroughputRow:
    def fits(batch: int) -> bool:
        """Runs both programs once, short."""
        run = partial(_generate, model, batch, prompt, new, short=True)
        return unless_out_of_memory(run) is not None

    batch = largest_batch(fits, most=most)
    cache = jax.eval_shape(lambda: model.init_cache(1, prompt + new))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    prefill = decoding = 0.0
    if batch > 0:
        prefill, decoding = _generate(model, batch, prompt, new, short=False)
    return ThroughputRow(
        model=name,
        prompt=prompt,
        new=new,
        batch=batch,
        cache_bytes=size,
        prefill_seconds=prefill,
        decode_seconds=decoding,
        tokens_per_second=batch * new / decoding if batch else 0.0,
        with_prefill=batch * new / (prefill + decoding) if batch else 0.0,
    )


def _generate(
    model: Decoder, batch: int, prompt: int, new: int, *, short: bool
) -> tuple[float, float]:
    """Returns the seconds of prefill and of decode; `short`: a piece and a token."""
    longest = max(1, min(prompt, _PIECE_TOKENS // batch))
    piece = next(size for size in range(longest, 0, -1) if prompt % size == 0)
    ids = jax.random.randint(jax.random.key(1), (batch, prompt), 0, 256)
    cache = model.init_cache(batch, prompt + new)
    began = time.perf_counter()
    last = jax.block_until_ready(ids[:, -1])
    for start in range(0, piece if short else prompt, piece):
        tokens = ids[:, start : start + piece]
        last, cache = _read(model, tokens, cache)
    slots = _slots(model, last, rows=batch, length=prompt + new)
    limit = jnp.full(batch, 1 if short else new, jnp.int32)
    slots = slots._replace(cache=cache, params=slots.params._replace(limit=limit))
    del cache
    jax.block_until_ready(slots)
    prefilled = time.perf_counter()
    ended, until_free = jnp.zeros(batch, bool), jnp.zeros((), bool)
    _, outputs, _ = _decode(model, None, slots, ended, until_free, steps=new)
    jax.block_until_ready(outputs)
    return prefilled - began, time.perf_counter() - prefilled


@partial(jax.jit, static_argnames=("rows", "length"))
def _slots(model: Decoder, last: Array, *, rows: int, length: int) -> Slots:
    """Makes slots that have read their prompts and draw greedily; without a cache."""
    slots = empty_slots(model, strategy=SequenceWise(), rows=rows, length=length)
    greedy = jax.tree.map(jnp.asarray, sampling_rows([SamplingConfig(temperature=0.0)]))
    sampling = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows,)), greedy)
    return slots._replace(
        cache=None,
        newest=last,
        active=jnp.ones(rows, bool),
        params=slots.params._replace(sampling=sampling),
    )


_decode = jax.jit(
    partial(decode_slots, strategy=SequenceWise(), top=0),
    static_argnames="steps",
    donate_argnames="slots",
)


@partial(jax.jit, donate_argnames="cache")
def _read(model: Decoder, ids: Array, cache: Cache) -> tuple[Array, Cache]:
    """Reads a piece of the prompts; returns each row's likeliest next token."""
    x, cache = model.hidden(Tokens(ids), cache)
    return jnp.argmax(model.logits(x[:, -1]), axis=-1).astype(jnp.int32), cache


if __name__ == "__main__":
    run_script(main)
