"""A training step of our baseline beside nanochat's own, in one run.

The model of `recurjax bench latent_recurrent_transformer` without a memory, float32, on
CPU: forward and backward, and a step with MuonAdamW. nanochat's side is its own model
and optimizer from a checkout, eager and as torch.compile makes them. Sides take turns,
so that a ratio comes from one machine at one load; each figure is the fastest of all.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 3c3a3d7
    PYTHON -m pip install filelock
    python experiments/latent_recurrent_transformer/torch_nanochat.py \
        --nanochat nanochat --torch-python PYTHON

PYTHON is an interpreter that has torch and numpy.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from recurjax.bench import latent_recurrent_transformer as bench
from recurjax.bench.torch_peer import SIDE, answer_of
from recurjax.cli.options import parse
from recurjax.errors import UserError
from recurjax.machine import host
from recurjax.model import ModelConfig, count_parameters
from recurjax.training.objective import NextToken
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)

PASSES = ("forward_backward", "train_step")
_SIDE = Path(__file__).with_name("torch_nanochat_step.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times both sides in turns.

    Attributes:
      nanochat: a checkout.
      torch_python: an interpreter that has torch and numpy.
      batch: B.
      length: T.
      width: D.
      layers: L.
      vocabulary: V.
      turns: how often each side runs.
      repeats: timed calls of each program in a turn.
      threads: of torch.
    """

    nanochat: Path
    torch_python: str
    batch: int = bench.SMALL["B"]
    length: int = bench.SMALL["T"]
    width: int = bench.SMALL["D"]
    layers: int = bench.SMALL["L"]
    vocabulary: int = bench.SMALL["V"]
    turns: int = 3
    repeats: int = 5
    threads: int = 2

    def __post_init__(self):
        if min(*self.shape.values(), self.turns, self.repeats, self.threads) < 1:
            raise UserError("all sizes must be at least 1")
        if not (self.nanochat / "nanochat" / "gpt.py").is_file():
            raise UserError(
                f"--nanochat {self.nanochat} is no checkout of nanochat: it has no "
                "nanochat/gpt.py"
            )

    @property
    def shape(self) -> dict[str, int]:
        """The sizes by their letters, as the bench takes them."""
        return {
            "B": self.batch,
            "T": self.length,
            "D": self.width,
            "L": self.layers,
            "V": self.vocabulary,
        }


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="torch_nanochat.py")
    config = _ours(options)
    parameters = count_parameters(config).total
    best: dict[tuple[str, str], float] = {}

    def took(side: str, what: str, ms: float) -> None:
        best[side, what] = min(ms, best.get((side, what), ms))

    theirs = {"nanochat, eager": True, "nanochat, compiled": False}
    for _ in range(options.turns):
        for side, eager in theirs.items():
            answer = _ask(options, eager, heads=_stack(config).heads)
            if answer["parameters"] != parameters:
                raise UserError(
                    f"nanochat's model has {answer['parameters']:,} parameters, ours "
                    f"{parameters:,}: is the checkout at 3c3a3d7?"
                )
            for what in PASSES:
                took(side, what, answer[what])
        for row in bench.training_rows(
            *("nanochat", config, NextToken()),
            shape=options.shape,
            repeats=options.repeats,
        ):
            took("ours", row.name.rpartition("/")[2], row.min_ms)
    tokens = options.batch * options.length
    print("| ms (over ours) | " + " | ".join(PASSES) + " | tokens/s of a step |")
    print("|---|---|---|---|")
    for side in (*theirs, "ours"):
        columns = [
            f"{best[side, what]:.1f} ({best[side, what] / best['ours', what]:.2f})"
            for what in PASSES
        ]
        rate = 1e3 * tokens / best[side, "train_step"]
        print(f"| {side} | {' | '.join(columns)} | {rate:,.0f} |")
    return 0


def _ours(options: Options) -> ModelConfig:
    """Returns the bench's baseline, its value embeddings where nanochat has them."""
    config = bench.model_of("base", options.shape, "float32")
    stack = replace(_stack(config), value_embeddings="alternating")
    return replace(config, stack=stack)


def _stack(config: ModelConfig) -> LatentRecurrentTransformerConfig:
    return cast(LatentRecurrentTransformerConfig, config.stack)


def _ask(options: Options, eager: bool, heads: int) -> dict[str, float]:
    """Times nanochat's side in a process of its own."""
    question = {
        "batch": options.batch,
        "length": options.length,
        "width": options.width,
        "layers": options.layers,
        "vocabulary": options.vocabulary,
        "heads": heads,
        "threads": options.threads,
        "repeats": options.repeats,
        "eager": eager,
        "timing": str(SIDE),
    }
    environment = {"PYTHONPATH": str(options.nanochat.absolute())}
    if eager:  # Its optimizer is compiled too.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return answer_of(
        *(options.torch_python, _SIDE),
        given=json.dumps(question),
        environment=environment,
    )


if __name__ == "__main__":
    host.prepare()  # as the command line, whose figures these are compared with
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"torch_nanochat.py: {error}")
