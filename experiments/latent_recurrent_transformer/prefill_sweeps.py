"""The error of parallel sweeps against the exact prefill, on a trained model.

Reads rows of the validation split into a cache by 0, 1, 2, 4 and 8 sweeps after the
first pass, and exactly, and compares the next-token distributions. A run of the small
set serves, or any other with a latent memory. Expect errors to fall with each sweep;
T sweeps are exact.

    python experiments/latent_recurrent_transformer/latent_shakespeare.py
    python experiments/latent_recurrent_transformer/prefill_sweeps.py
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from recurjax.cli.options import parse, run_script
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import bits_per_byte, text_sums
from recurjax.losses.cross_entropy import token_losses
from recurjax.model import Decoder, as_latent_memory
from recurjax.sharding import MeshConfig, make_mesh, placed
from recurjax.training.run import load_run
from recurjax.types import Array, Batch, Tokens
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerStack,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Compares sweeps with the exact prefill and prints a table.

    Attributes:
      run: a run directory of a model with a latent memory.
      sweeps: after the first pass, which has no memory.
      rows: rows of the validation split, each of the training length.
      length: tokens per row; None: as in training.
    """

    run: Path = Path("runs/lrt_shakespeare/shared")
    sweeps: tuple[int, ...] = (0, 1, 2, 4, 8)
    rows: int = 64
    length: int | None = None

    def __post_init__(self):
        if self.rows < 1 or not self.sweeps or min(self.sweeps) < 0:
            raise UserError("--rows must be at least 1 and --sweeps at least 0")


class Swept(NamedTuple):
    """The error left after a number of sweeps; None: the exact prefill.

    Attributes:
      sweeps: after the first pass.
      residual: largest change of a state in the last one.
      largest: error of a logit.
      divergence: mean KL(exact || swept) a token, in nats.
      agreed: share of the tokens with the same likeliest next token.
      bits_per_byte: bits per byte of the rows.
    """

    sweeps: int | None
    residual: float
    largest: float
    divergence: float
    agreed: float
    bits_per_byte: float


def compare(
    model: Decoder, batch: Batch, token_bytes: np.ndarray, sweeps: tuple[int, ...]
) -> list[Swept]:
    """Returns what each number of sweeps leaves open, and the exact prefill last."""
    sizes = jnp.asarray(token_bytes, jnp.int32)
    exact = _exact(model, batch)
    rows = []
    for count in (*sweeps, None):
        x, residual = (exact, 0.0) if count is None else _swept(model, batch, count)
        nats, size, largest, divergence, agreed = map(
            float, _errors(model, batch, sizes, x, exact)
        )
        rows.append(
            Swept(
                sweeps=count,
                residual=float(residual),
                largest=largest,
                divergence=divergence,
                agreed=agreed,
                bits_per_byte=bits_per_byte(nats, size),
            )
        )
    return rows


def markdown(rows: list[Swept]) -> str:
    """Returns the table."""
    lines = [
        "| sweeps | largest change of a state | largest error of a logit | "
        "KL from exact (nats per token) | same likeliest token | bits per byte |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {'exact' if row.sweeps is None else row.sweeps} | {row.residual:.2g} | "
        f"{row.largest:.2g} | {row.divergence:.2g} | {100 * row.agreed:.2f} % | "
        f"{row.bits_per_byte:.4f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


@jax.jit
def _exact(model: Decoder, batch: Batch) -> Float[Array, "B T D"]:
    B, T = batch.ids.shape
    return model.hidden(Tokens(batch.ids), model.init_cache(B, T))[0]


@partial(jax.jit, static_argnums=2)
def _swept(
    model: Decoder, batch: Batch, sweeps: int
) -> tuple[Float[Array, "B T D"], Float[Array, ""]]:
    B, T = batch.ids.shape
    cache = model.init_cache(B, T)
    stack, x = model.stack, model.embed(batch.ids)
    assert isinstance(stack, LatentRecurrentTransformerStack)
    x, _, residual = stack.sweep(x, cache, Tokens(batch.ids), sweeps=sweeps)
    return model.final_norm(x), residual


@jax.jit
def _errors(
    model: Decoder, batch: Batch, sizes: Array, x: Array, exact: Array
) -> tuple[Array, ...]:
    """Returns nats and bytes of the text, largest error, KL, agreement."""
    nats = token_losses(model, x, batch.targets, chunks=1).nats
    got, want = model.logits(x), model.logits(exact)
    p, q = jax.nn.log_softmax(want), jax.nn.log_softmax(got)
    divergence = jnp.mean(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
    agreed = jnp.mean(got.argmax(-1) == want.argmax(-1))
    largest = jnp.abs(got - want).max()
    return *text_sums(nats, batch.targets, sizes), largest, divergence, agreed


def main(argv: list[str] | None = None) -> int:
    """Compares and prints."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="prefill_sweeps.py")
    loaded = load_run(options.run)
    if as_latent_memory(loaded.model.stack) is None:
        raise UserError(f"{options.run} has no latent memory: name a run that does")
    length = options.length or loaded.experiment.training.length
    dataset = open_dataset(loaded.experiment.data, tokenizer=loaded.tokenizer)
    loader = dataset.loader(
        "validation", length=length, batch=options.rows, in_order=True
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    batch = next(placed(iter(loader), mesh, batch=options.rows))
    rows = compare(loaded.model, batch, loaded.tokenizer.token_bytes, options.sweeps)
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    run_script(main)
