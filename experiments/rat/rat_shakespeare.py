"""RAT and its relatives at equal tokens on the embedded text, for two CPU cores.

Reproduces no table: the paper's comparison (its Fig. 4, RNN to attention with RAT
between them) in miniature. Five stacks of the same width and depth read the same
0.8 million bytes; nothing was tuned. Expect about 5 minutes on two idle cores, and a
table of validation bits per byte. A stopped set goes on with the same command.

    python experiments/rat/rat_shakespeare.py --runs runs/rat_shakespeare
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from recurjax import host
from recurjax.cli.options import parse
from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.layers.initialization import InitConfig
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.optimizer import AdamW
from recurjax.training.schedule import Cosine
from recurjax.training.sweep import sweep_and_print
from recurjax.variants.rat import MixerConfig, RatConfig, presets

LENGTH = 256
STEPS = 400
SIZE = {"width": 64, "heads": 4}
SWA = presets.attention(**SIZE, window=LENGTH // 4)  # 1024 of 4096 in the paper

MODELS: dict[str, tuple[MixerConfig, ...]] = {
    "rnn": (presets.rnn(**SIZE, length=LENGTH),),
    "rat64": (presets.rat(**SIZE, chunk=64),),
    "rat16": (presets.rat(**SIZE, chunk=16),),
    "attention": (presets.attention(**SIZE),),
    "rat16_swa": (presets.rat(**SIZE, chunk=16), SWA),
}
"""The mixers of layers 0, 1, ..., repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Trains the small set and prints its table.

    Attributes:
      runs: one run directory each, results.json and results.md.
      steps: of each run.
    """

    runs: Path = Path("runs/rat_shakespeare")
    steps: int = STEPS


def stack(*pattern: MixerConfig) -> RatConfig:
    """Returns four layers of width 64 with weights that suit so small a model."""
    config = presets.stack(*pattern, layers=4, width=SIZE["width"])
    init = InitConfig(std=None, embedding_std=0.1, output="same")
    return replace(config, init=init)


def experiment(name: str, config: RatConfig, *, steps: int = STEPS) -> Experiment:
    """Returns a run: 2,048 bytes a step, the same for every stack."""
    return Experiment(
        name=name,
        model=ModelConfig(vocabulary=256, tied_head=True, stack=config),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        optimizer=AdamW(learning_rate=3e-3, b2=0.99),
        schedule=Cosine(warmup_steps=steps // 10, end=0.01),
        training=TrainingConfig(
            steps=steps, batch=8, length=LENGTH, log_every=10, checkpoint_every=100
        ),
        evaluation=EvaluationConfig(batch=16),
    )


def config() -> Experiment:
    """Returns RAT(16)'s run, for `recurjax train`."""
    return experiment("rat16", stack(*MODELS["rat16"]))


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="rat_shakespeare.py")
    runs = [
        experiment(name, stack(*pattern), steps=options.steps)
        for name, pattern in MODELS.items()
    ]
    return sweep_and_print(runs, options.runs)


if __name__ == "__main__":
    host.prepare()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"rat_shakespeare.py: {error}")
