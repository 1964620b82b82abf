"""Are the JAX and the PyTorch side the same model? Logits, layers, greedy tokens.

The PyTorch side runs in a child process, by default of this interpreter: the package
itself never imports torch.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from recurjax.data.tokenizers import JsonTokenizer
from recurjax.errors import UserError
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.model import Decoder
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.types import Tokens

TOLERANCE = 2e-5
"""Largest difference, as a share of the largest value: the table's for float32."""
NEW_TOKENS = 64
TEXTS = ("Hello, world!", " two  spaces\n\nand lines ", "né 漢字 🌍", "it's 1,234.5")
"""What both tokenizers encode."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """The difference of two models on the same token ids, in float32.

    Attributes:
      against: what was compared with, and its version.
      shape: rows and tokens of the ids.
      max_abs_difference: largest absolute difference of the logits; `relative` is its
        share of the largest logit.
      kl: KL(PyTorch || JAX) of the next token, mean in nats.
      top1_agreement: share of positions with the same likeliest token.
      first_differing_layer: 0 is the embedding, L + 1 the logits; None: no layer is
        further off than the tolerance.
      layer_differences: the largest difference after each layer, relative to the
        largest value there.
      greedy_tokens, greedy_agreement: how many tokens each row was continued by, and
        how many of the first agree in every row.
      tolerance: what `within_tolerance` means for logits.
      texts, texts_agreement: how many texts both tokenizers encoded, with what begins
        and ends them, and how many of them alike.
    """

    against: str
    shape: tuple[int, int]
    max_abs_difference: float
    relative_difference: float
    kl: float
    top1_agreement: float
    first_differing_layer: int | None
    layer_differences: tuple[float, ...]
    greedy_tokens: int
    greedy_agreement: int
    tolerance: float
    texts: int = 0
    texts_agreement: int = 0

    @property
    def within_tolerance(self) -> bool:
        """Whether the logits agree, all greedy tokens and the tokens of all texts."""
        close = self.relative_difference <= self.tolerance
        greedy = self.greedy_agreement == self.greedy_tokens
        return close and greedy and self.texts_agreement == self.texts

    def to_json(self) -> dict[str, Any]:
        """Returns what parity.json holds."""
        return {
            "measured": True,
            "within_tolerance": self.within_tolerance,
            **dataclasses.asdict(self),
        }

    def sentence(self) -> str:
        """Returns one line that describes it."""
        where = (
            ""
            if self.first_differing_layer is None
            else f", layer {self.first_differing_layer} differs first"
        )
        return (
            f"parity with {self.against}: logits within {self.max_abs_difference:.2e} "
            f"({self.relative_difference:.1e} of the largest), KL {self.kl:.1e}, top-1 "
            f"{100 * self.top1_agreement:.1f} %, {self.greedy_agreement} of "
            f"{self.greedy_tokens} greedy tokens{where}"
            + (f", {self.texts_agreement} of {self.texts} texts" if self.texts else "")
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NotMeasured:
    """The reason why nothing was compared."""

    reason: str
    within_tolerance: bool = True

    def to_json(self) -> dict[str, Any]:
        """Returns what parity.json holds."""
        return {"measured": False, "reason": self.reason}

    def sentence(self) -> str:
        """Returns one line that describes it."""
        return f"parity: not measured: {self.reason}"


def default_ids(model: Decoder) -> Int[np.ndarray, "2 T"]:
    """Draws two rows of 32 tokens, fewer where the model has few positions."""
    longest = model.config.max_length
    length = 32 if longest is None else max(1, min(32, longest // 2))
    draw = np.random.default_rng(0).integers
    return draw(model.config.vocabulary, size=(2, length)).astype(np.int32)


def compare(
    model: Decoder,
    command: Sequence[str],
    *,
    python: str | None = None,
    ids: Int[np.ndarray, "B T"] | None = None,
    tolerance: float = TOLERANCE,
    against: str = "PyTorch",
    tokenizer: JsonTokenizer | None = None,
) -> Parity | NotMeasured:
    """Runs both sides.

    Args:
      model: the JAX side; it is run with float32 activations.
      command: a script and its arguments, to which --ids, --out and --new-tokens are
        added; it writes logits, states, greedy and version.
      python: the interpreter that has torch; None: this one, if it has.
      ids: what to run on; None: `default_ids`.
      tolerance: see `Parity`.
      against: what to call the PyTorch side.
      tokenizer: encodes `TEXTS` here, as the script does there with --texts; None: no
        texts are compared.

    Raises:
      UserError: the PyTorch side fails, or `python` has no torch.
    """
    ids = default_ids(model) if ids is None else np.asarray(ids, np.int32)
    longest = model.config.max_length
    # The last new token is not read again, so it needs no position.
    room = NEW_TOKENS if longest is None else longest - ids.shape[1] + 1
    new_tokens = max(min(NEW_TOKENS, room), 1)
    if tokenizer is not None:
        command = [*command, "--texts", json.dumps(TEXTS)]
    theirs = _run(command, ids, new_tokens, python)
    if isinstance(theirs, NotMeasured):
        return theirs
    # bfloat16 activations would hide a wrong layer behind rounding.
    model = _in_float32(model)
    logits = _logits(model, ids)
    generation = generate_tokens(
        model,
        list(ids),
        max_new_tokens=new_tokens,
        sampling=SamplingConfig(temperature=0.0),
    )
    # Relative to the largest value: logits have no scale of their own.
    difference = np.abs(logits - theirs["logits"])
    layers = _shares(layer_states(model, ids), theirs["states"])
    relative = float(difference.max() / np.abs(theirs["logits"]).max())
    off = [share > tolerance for share in (*layers, relative)]
    # Position by position: the agreement ends where any row differs.
    same = (np.stack(generation.tokens) == theirs["greedy"]).all(axis=0)
    top = logits.argmax(-1) == theirs["logits"].argmax(-1)
    return Parity(
        against=f"{against} {theirs['version']}",
        shape=(ids.shape[0], ids.shape[1]),
        max_abs_difference=float(difference.max()),
        relative_difference=relative,
        kl=_kl(theirs["logits"], logits),
        top1_agreement=float(top.mean()),
        first_differing_layer=off.index(True) if any(off) else None,
        layer_differences=tuple(layers),
        greedy_tokens=new_tokens,
        # False after the last, for the case that all agree.
        greedy_agreement=int(np.argmin([*same, False])),
        tolerance=tolerance,
        texts=0 if tokenizer is None else len(TEXTS),
        texts_agreement=0
        if tokenizer is None
        else sum(
            _text_ids(tokenizer, text) == theirs[f"text_{n}"].tolist()
            for n, text in enumerate(TEXTS)
        ),
    )


def _text_ids(tokenizer: JsonTokenizer, text: str) -> list[int]:
    """Encodes a text with what begins and ends it."""
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    end = [tokenizer.eos] if tokenizer.adds_eos and tokenizer.eos is not None else []
    return [*begin, *tokenizer.encode(text).tolist(), *end]


def layer_states(
    model: Decoder, ids: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "M B T D"]:
    """Runs a model layer by layer.

    Returns:
      M = L + 1 states, counted as Hugging Face does: the first is the embedding, the
      last is after the final norm.
    """
    tokens = Tokens(jnp.asarray(ids, jnp.int32))
    states = list(model.stack.layer_states(model.embed(tokens.ids), tokens))
    # Hugging Face counts the final norm's output as the last layer's.
    states[-1] = model.final_norm(states[-1])
    return np.stack([np.asarray(state) for state in states])


def _in_float32(model: Decoder) -> Decoder:
    """Returns the same model with float32 activations."""
    config = dataclasses.replace(model.config, dtype="float32")
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return from_nested_dict(like, to_nested_dict(model))


@jax.jit
def _forward(model: Decoder, ids: jax.Array) -> jax.Array:
    return model(Tokens(ids), model.init_cache(ids.shape[0], 0))[0]


def _logits(model: Decoder, ids: np.ndarray) -> Float[np.ndarray, "B T V"]:
    return np.asarray(_forward(model, jnp.asarray(ids)))


def _run(
    command: Sequence[str], ids: np.ndarray, new_tokens: int, python: str | None
) -> dict[str, Any] | NotMeasured:
    with tempfile.TemporaryDirectory() as folder:
        inputs, out = Path(folder) / "ids.npy", Path(folder) / "result.npz"
        # Through files: the other interpreter may have another numpy.
        np.save(inputs, ids)
        words = [python or sys.executable, *command, "--ids", inputs, "--out", out]
        words += ["--new-tokens", new_tokens]
        try:
            done = subprocess.run(
                [str(word) for word in words], capture_output=True, text=True
            )
        except OSError as error:
            raise UserError(
                f"--torch-python: {words[0]} cannot be run: {error.strerror}"
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            # This interpreter without torch is not a failure: there is nothing to
            # compare with.
            missing = last.startswith("ModuleNotFoundError: ")
            if missing and python is None:
                return NotMeasured(reason=last.removeprefix("ModuleNotFoundError: "))
            raise UserError(f"the PyTorch comparison failed in {words[0]}: {last}")
        with np.load(out) as file:
            return {name: file[name] for name in file.files}


def _shares(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    return [
        float(np.abs(mine - other).max() / max(np.abs(other).max(), 1e-30))
        for mine, other in zip(ours, theirs, strict=True)
    ]


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(x), axis=-1) for x in (p, q))
    # Rounding can leave a difference of zero a little below it.
    return max(0.0, float(jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))))
