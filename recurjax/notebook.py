"""Helpers of the notebooks: short runs, logits in pieces, pictures of letters.

from recurjax import notebook
notebook.prepare()
run = notebook.quick_run(recurjax.load_experiment("quickstart"))
"""

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from rich.console import Console

from pallas_kernels.reductions import logsumexp
from recurjax.data.dataset import open_dataset
from recurjax.data.tokenizers import Tokenizer
from recurjax.errors import UserError
from recurjax.evaluation.perplexity import Score
from recurjax.experiment import Experiment
from recurjax.files.metric_rows import read_rows
from recurjax.machine import compiled_programs, host
from recurjax.model import Decoder
from recurjax.training.loop import train
from recurjax.training.run import load_run
from recurjax.types import Array, Tokens


def prepare() -> None:
    """Prepares this process for training and prints the devices that it has.

    Call it before anything is computed. Compiled programs stay in the user's cache, so
    that a notebook starts faster the second time. Products of matrices are computed in
    float32, which accelerators round to fewer bits by default.
    """
    host.prepare()
    compiled_programs.keep()
    jax.config.update("jax_default_matmul_precision", "float32")
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__} on {jax.device_count()} x {device}")


@cache
def scratch() -> Path:
    """Returns a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="recurjax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


class QuickRun(NamedTuple):
    """A finished run.

    Attributes:
      root: its run directory, in `scratch`.
      model: the trained parameters; of adapters, base and adapters in one.
      tokenizer: tokenizer of the run.
      losses: losses of the logged steps.
      score: on the validation split.
    """

    root: Path
    model: Decoder
    tokenizer: Tokenizer
    losses: list[float]
    score: Score


def quick_run(experiment: Experiment) -> QuickRun:
    """Trains without a progress bar and prints how far the loss fell.

    Raises:
      UserError: as `train` does; a run of this name exists already.
    """
    root = scratch() / experiment.name
    if root.exists():
        raise UserError(
            f"the notebook has a run {experiment.name} already: give this "
            "experiment another name, or restart the kernel"
        )
    result = train(experiment, root, console=Console(quiet=True))
    rows = read_rows(root / "metrics.jsonl").rows
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert result.score is not None
    run, bits = load_run(root), result.score.bits_per_byte
    print(
        f"{experiment.name}: loss fell from {losses[0]:.2f} to {losses[-1]:.2f} in "
        f"{result.step} steps; {bits:.2f} bits per byte on held-out text"
    )
    return QuickRun(root, run.model, run.tokenizer, losses, result.score)


def held_out_rows(experiment: Experiment, rows: int) -> Int[Array, "B T"]:
    """Returns the first rows of the validation split, of the length of training."""
    loader = open_dataset(experiment.data).loader(
        "validation", length=experiment.training.length, batch=rows
    )
    return jnp.asarray(next(iter(loader))["ids"])


_call = jax.jit(Decoder.__call__)


def logits_of(
    model: Decoder, ids: Int[Array, "B T"], cuts: Sequence[int] | None = None
) -> Float[np.ndarray, "B T V"]:
    """Returns the logits of all positions.

    Args:
      model: any variant.
      ids: the rows.
      cuts: where the next piece begins that goes through the cache; None: the rows are
        read at once without a cache, as in training.
    """
    B, T = ids.shape
    if cuts is None:
        return np.asarray(_call(model, Tokens(ids), model.init_cache(B, 0))[0])
    state, pieces = model.init_cache(B, T), []
    for piece in np.split(np.asarray(ids), list(cuts), axis=1):
        logits, state = _call(model, Tokens(jnp.asarray(piece)), state)
        pieces.append(np.asarray(logits))
    return np.concatenate(pieces, axis=1)


def loss_on(model: Decoder, ids: Int[Array, "B T"]) -> float:
    """Returns the mean loss of the next token in nats."""
    logits = jnp.asarray(logits_of(model, ids)[:, :-1])
    right = jnp.take_along_axis(logits, jnp.asarray(ids)[:, 1:, None], axis=2)
    return float(jnp.mean(logsumexp(logits) - right[..., 0]))


def largest_difference(a: Array | np.ndarray, b: Array | np.ndarray) -> float:
    """Returns max |a - b|."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def draw_letters(
    axes: Axes, letters: Sequence[str], colors: Sequence[str], *, columns: int = 32
) -> None:
    """Writes a text in lines of `columns` letters, each on a box of its color."""
    for place, (letter, color) in enumerate(zip(letters, colors, strict=True)):
        line, column = divmod(place, columns)
        visible = {"\n": "\u21b5", " ": "\u00b7"}.get(letter, letter)
        box = {"facecolor": color, "edgecolor": "lightgray", "pad": 3}
        style = {"family": "monospace", "fontsize": 14, "ha": "center", "va": "center"}
        axes.text(column, -line, visible, bbox=box, **style)
    lines = -(-len(letters) // columns)
    axes.set(xlim=(-1, columns), ylim=(0.3 - lines, 0.7))
    axes.axis("off")


def pretrained(name: str) -> Path:
    """Imports a model of the Hub; where it is not available, `random_checkpoint`.

    Args:
      name: OWNER/NAME.

    Returns:
      The run directory.
    """
    # Imported here: one notebook converts models, the others start faster without.
    from recurjax.convert import from_hf, new_experiment, write_run
    from recurjax.convert.hub import imported_run

    try:
        with warnings.catch_warnings():
            # Of the Hub's progress bars, where Jupyter has no ipywidgets.
            warnings.filterwarnings("ignore", message="IProgress not found")
            return imported_run(Path(f"hf:{name}"))
    except UserError as error:
        print(f"{error}\n{name} is not available: a random Llama takes its place.")
    checkpoint, root = scratch() / "random_llama", scratch() / "imported"
    random_checkpoint(checkpoint)
    imported = from_hf(checkpoint)
    assert imported.tokenizer is not None
    experiment = new_experiment(root, imported.model.config, length=imported.length)
    write_run(root, imported.model, experiment, imported.tokenizer)
    return root


def random_checkpoint(out: Path) -> None:
    """Writes a Hugging Face checkpoint of a random Llama of two layers on bytes.

    It takes the place of a model that cannot be downloaded: every step runs on it, and
    its figures mean nothing.
    """
    from flax import nnx

    from recurjax.convert import new_experiment, to_torch
    from recurjax.data.tokenizers import ByteTokenizer
    from recurjax.layers.attention import AttentionConfig
    from recurjax.layers.initialization import UNIT_VARIANCE
    from recurjax.layers.mlp import MlpConfig
    from recurjax.model import ModelConfig
    from recurjax.training.run import LoadedRun
    from recurjax.variants.transformer import TransformerConfig

    heads = AttentionConfig(heads=4, key_heads=2, head_width=16)
    mlp = MlpConfig(kind="swiglu", width=128)
    stack = TransformerConfig(
        layers=2, width=64, attention=heads, mlp=mlp, init=UNIT_VARIANCE
    )
    tokenizer = ByteTokenizer()
    config = ModelConfig(vocabulary=tokenizer.vocabulary, stack=stack)
    experiment = new_experiment(out, config, length=64)
    model = Decoder(config, rngs=nnx.Rngs(0))
    run = LoadedRun(experiment, model, tokenizer, step=0)
    to_torch(run, out, format="hf", check=False)
