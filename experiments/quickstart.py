"""Quickstart: a small byte-level Recurrent Transformer on Shakespeare, on a CPU.

Reproduces no table. Expect validation bits per byte at least 0.3 below those of an
interpolated order-2 byte model on the same tenth of the text, after about a minute of
training on two cores. The layers run position by position, so rows are short and many:
that keeps the products of matrices large. `make quickstart` runs this file, which also
shows what came of it; `recurjax train experiments/quickstart.py` trains only.
"""

import sys
import time
from pathlib import Path

from rich.console import Console

from recurjax.data.config import Bytes, DataConfig, EmbeddedText
from recurjax.data.dataset import open_dataset
from recurjax.errors import UserError
from recurjax.evaluation.byte_ngram import ngram_bits_per_byte
from recurjax.experiment import Experiment
from recurjax.layers.initialization import InitConfig
from recurjax.layers.mlp import MlpConfig
from recurjax.machine import host
from recurjax.model import ModelConfig
from recurjax.training.config import EvaluationConfig, TrainingConfig
from recurjax.training.loop import train
from recurjax.training.optimizers import AdamW, Cosine
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig


def config() -> Experiment:
    """Returns the experiment."""
    return Experiment(
        name="quickstart",
        model=ModelConfig(
            vocabulary=256,
            tied_head=True,
            stack=RecurrentTransformerConfig(
                layers=2,
                width=96,
                heads=4,
                key_heads=4,
                head_width=24,
                mlp=MlpConfig(kind="gelu", width=384),
                # Wider than GPT-2's 0.02: a model this small learns faster so.
                init=InitConfig(std=None, embedding_std=0.1),
            ),
        ),
        data=DataConfig(corpus=EmbeddedText(), tokenizer=Bytes(bos=False)),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=40, end=0.05),
        training=TrainingConfig(
            steps=450, batch=32, length=64, log_every=10, checkpoint_every=225
        ),
        evaluation=EvaluationConfig(
            every=225, batch=64, sample_prompts=("HAMLET\n",), sample_tokens=240
        ),
    )


FILES = {
    "config.json": "all settings; enough to rebuild the model",
    "metrics.jsonl": "one row every ten steps and for each evaluation",
    "tensorboard/": "the same for `tensorboard --logdir runs`",
    "checkpoints/": "the last three and the best, with checksums",
    "loss.png": "the losses as a picture",
    "samples.txt": "continuations drawn while training",
    "tokenizer/": "what maps text to tokens",
    "log": "what was printed, with times",
}

NEXT = """\
.venv/bin/recurjax generate runs/quickstart --prompt "HAMLET" --temperature 0.7
.venv/bin/recurjax evaluate runs/quickstart --text README.md
.venv/bin/recurjax train experiments/quickstart.py --name wider --model.stack.width 192
.venv/bin/recurjax train experiments/quickstart.py --help      every setting
notebooks/first_tour.ipynb                                     the same, in Python"""


def main() -> int:
    """Trains, then shows a continuation, the figures, the files, what to try next."""
    console = Console(highlight=False)
    experiment = config()
    root = Path("runs") / experiment.name
    began = time.monotonic()
    result = train(experiment, root, console=console)
    total = time.monotonic() - began
    if result.outcome != "finished":
        console.print(f"stopped at step {result.step}: `make quickstart` goes on there")
        return 130 if result.outcome == "interrupted" else 0
    if result.score is None or result.sample is None:
        console.print(f"{root} is finished; remove the directory to train it again")
        console.print(NEXT, markup=False, soft_wrap=True)
        return 0
    console.rule("a continuation")
    console.print(result.sample, markup=False, soft_wrap=True)
    console.rule("validation: the last tenth of the text")
    yardstick, ours = _order_2_bits(experiment), result.score.bits_per_byte
    console.print(f"interpolated order-2 byte model   {yardstick:.3f} bits per byte")
    console.print(f"this model                        {ours:.3f} bits per byte")
    console.print(f"lower by                          {yardstick - ours:.3f}")
    console.rule(str(root))
    for file, meaning in FILES.items():
        console.print(f"{file:<16}{meaning}")
    console.print(
        f"compile {result.compile_seconds:.0f} s, train {result.train_seconds:.0f} s, "
        f"with evaluations and samples {total:.0f} s in all"
    )
    console.rule("what to try next")
    console.print(NEXT, markup=False, soft_wrap=True)
    return 0


def _order_2_bits(experiment: Experiment) -> float:
    assert isinstance(experiment.data, DataConfig)
    dataset = open_dataset(experiment.data)
    train_text, validation_text = (
        dataset.tokenizer.decode(dataset.tokens(split)).encode()
        for split in ("train", "validation")
    )
    return ngram_bits_per_byte(train_text, validation_text, order=2)


if __name__ == "__main__":
    host.prepare()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"quickstart: {error}")
