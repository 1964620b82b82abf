"""Surgery on every family that `from_hf` reads.

`python -m tests.surgery.test_every_family [MODEL ...]` prints the table of
docs/design/conversion.md; MODEL is a pretrained one, read with its tokenizer.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recurjax.convert.hugging_face import from_hf
from recurjax.data.corpora import embedded_text
from recurjax.errors import UserError
from recurjax.model import Decoder, count_parameters
from recurjax.surgery.recurformer import MambaConfig, to_recurformer
from recurjax.surgery.relaxed_recursive import recursive_stack, to_recursive
from recurjax.types import Tokens
from tests.convert.hf_directories import CASES, arrays
from tests.marks import slow_except

MAMBA = MambaConfig(dt_rank=2, state=3)
FULL = 999
"""A rank that no matrix exceeds."""
RANK, REAL_RANK = 4, 64
"""Few ranks, of a tiny model and of a pretrained one."""
REAL_TOKENS = 512
"""Of the embedded text's end, which a pretrained model is measured on."""


@jax.jit
def loss_of(model: Decoder, ids: jax.Array) -> jax.Array:
    logits, _ = model(Tokens(ids), model.init_cache(len(ids), 0))
    logs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(logs, ids[:, 1:, None], -1).mean()


def recursive(model: Decoder, rank: int, *, tie_norms: bool) -> Decoder:
    # The fewest loops whose block has full repeats of the layers' pattern.
    stack = recursive_stack(model, loops=2, rank=rank, tie_norms=tie_norms)
    return to_recursive(model, stack, init="average")


def recurrent(model: Decoder, count: int) -> Decoder:
    """Replaces the last heads of each layer that reads all tokens."""
    config = model.config.stack
    heads = tuple(range(config.attention.heads - count, config.attention.heads))
    windows = config.windows
    replaced = tuple(
        heads if windows[layer % len(windows)] is None else ()
        for layer in range(config.layers)
    )
    return to_recurformer(model, replaced, mamba=MAMBA)


def row(name: str, model: Decoder, ids: jax.Array, rank: int) -> list[str]:
    """Returns the table's cells: parameters and losses, or why a surgery is refused."""

    def cell(build) -> str:
        try:
            changed = build()
        except UserError as error:
            return str(error)
        count = count_parameters(changed.config).total
        return f"{count:,}; {loss_of(changed, ids):.4f}"

    return [
        name,
        cell(lambda: model),
        cell(lambda: recursive(model, FULL, tie_norms=False)),
        cell(lambda: recursive(model, rank, tie_norms=True)),
        cell(lambda: recurrent(model, 1)),
    ]


QUICK = ("hf/llama", "hf/gemma2", "hf/gpt_neox")
"""One family of each kind of layer."""
SLOW = ("hf/gemma3",)
"""Of the others those with the most of their own."""


@pytest.fixture(scope="module", params=slow_except(QUICK, CASES, slow=SLOW))
def base(request):
    model = from_hf(request.param).model
    ids = jnp.asarray(arrays(request.param)["input_ids"])
    return model, ids, float(loss_of(model, ids))


def test_the_family_becomes_recursive(base):
    model, ids, before = base
    try:
        full = recursive(model, FULL, tie_norms=False)
    except UserError as refusal:
        # Named: what of the family a block of loops cannot have.
        assert "windows" in str(refusal) and "\n" not in str(refusal)
        return
    # With all ranks and own norms it is the model.
    np.testing.assert_allclose(float(loss_of(full, ids)), before, rtol=1e-5)
    shared = recursive(model, 0, tie_norms=True)
    after = float(loss_of(shared, ids))
    assert np.isfinite(after) and after != before
    counts = [count_parameters(m.config).total for m in (shared, model)]
    assert counts[0] < counts[1]


def test_the_family_becomes_a_recurformer(base):
    model, ids, before = base
    same = recurrent(model, 0)
    np.testing.assert_allclose(float(loss_of(same, ids)), before, rtol=1e-5)
    try:
        changed = recurrent(model, 1)
    except UserError as refusal:
        assert "qk_norm" in str(refusal) and "\n" not in str(refusal)
        return
    assert np.isfinite(float(loss_of(changed, ids)))


def print_rows(names: list[str]) -> None:
    print_head(RANK)
    for case in CASES:
        folder = case.values[0]
        ids = jnp.asarray(arrays(folder)["input_ids"])
        cells = row(folder.name, from_hf(folder).model, ids, RANK)
        print("| " + " | ".join(cells) + " |", flush=True)
    if names:
        print_head(REAL_RANK)
    for name in names:
        model, tokenizer, *_ = from_hf(name)
        assert tokenizer is not None
        ids = tokenizer.encode(embedded_text()[-4000:])[:REAL_TOKENS]
        cells = row(Path(name).stem, model, jnp.asarray([ids]), REAL_RANK)
        print("| " + " | ".join(cells) + " |", flush=True)


def print_head(rank: int) -> None:
    forms = ("recursive, full rank", f"recursive, rank {rank}")
    columns = ("family", "model", *forms, "one head of each layer replaced")
    print("\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))


if __name__ == "__main__":
    print_rows(sys.argv[1:])
