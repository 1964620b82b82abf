"""The cost of serving: HTTP on top of the engine, cached states, slots in memory.

    python experiments/serving_times.py              (small models, weights drawn here)
    python experiments/serving_times.py --width 768 --layers 12 --talk 4096

Three tables of attention, RAT(16) and the RNN at one width and depth:
  * tokens per second of one queue of requests on the engine, and of the same queue over
    HTTP by clients in a process of their own, on the same engine, in turns;
  * time to the first token of a chat's next turn, with and without its cached state;
  * the slots that fit in a given memory at two lengths, by the caches' shapes.
Weights do not matter for any of them, so none is trained.
"""

import http.client
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from recurjax.cli.options import parse, run_script
from recurjax.data.tokenizers import ByteTokenizer, Tokenizer
from recurjax.errors import UserError
from recurjax.inference.engine import Engine, EngineConfig, RequestSettings
from recurjax.inference.engine.memory import row_bytes
from recurjax.inference.engine.slots import SequenceWise
from recurjax.machine import host
from recurjax.model import Decoder, ModelConfig
from recurjax.variants.rat import RatConfig, presets

VOCABULARY = 257


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Times an engine by itself and behind HTTP.

    Attributes:
      width, layers, heads: width, layers and heads of the models.
      requests: in the queue; of prompts of 32 to 256 tokens.
      new_tokens: new tokens of each request.
      slots: requests at once.
      talk: tokens of the talk whose next turn is timed.
      repeats: repeats of each measurement; the script prints the median.
      memory_gib: GiB of memory for which slots are counted.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    requests: int = 24
    new_tokens: int = 64
    slots: int = 8
    talk: int = 1024
    repeats: int = 3
    memory_gib: float = 4.0

    def __post_init__(self):
        sizes = (self.width, self.layers, self.heads, self.requests, self.new_tokens)
        if min(*sizes, self.slots, self.talk, self.repeats) < 1:
            raise UserError("all numbers must be at least 1")
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(
                f"--heads must divide --width into even parts, got {self.heads} "
                f"and {self.width}"
            )


def stacks(options: Options) -> dict[str, RatConfig]:
    """Returns the three stacks, of one width and depth."""
    size = {"width": options.width, "heads": options.heads}
    mixers = {
        "attention": presets.attention(**size),
        "RAT(16)": presets.rat(**size, chunk=16),
        "RNN": presets.rnn(**size, length=4096),
    }
    shape = {"layers": options.layers, "width": options.width}
    return {name: presets.stack(mixer, **shape) for name, mixer in mixers.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The requests of an engine.

    Attributes:
      prompts: token ids, one list a request.
      new_tokens: new tokens of each request; no EOS ends one.
    """

    prompts: list[list[int]]
    new_tokens: int

    @property
    def settings(self) -> RequestSettings:
        """Each request's."""
        return RequestSettings(max_new_tokens=self.new_tokens, ignore_eos=True)


def drawn_load(options: Options) -> Load:
    """Draws prompts of 32 to 256 tokens."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(32, 257, options.requests)
    prompts = [draw.integers(0, 256, length).tolist() for length in lengths]
    return Load(prompts=prompts, new_tokens=options.new_tokens)


def engine_seconds(engine: Engine, load: Load) -> float:
    """Runs a queue on the engine alone."""
    began = time.perf_counter()
    for prompt in load.prompts:
        engine.submit(prompt, load.settings)
    while engine.busy:
        engine.step()
    return time.perf_counter() - began


def client_seconds(port: int, load: Load) -> float:
    """Sends a queue as streams, all at once: the server has the engine's own queue."""

    def ask(prompt: list[int]) -> None:
        body = {"max_tokens": load.new_tokens, "ignore_eos": True, "stream": True}
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        link.request(
            "POST",
            "/v1/completions",
            json.dumps({"prompt": prompt, **body}),
            {"Content-Type": "application/json"},
        )
        answer = link.getresponse()
        text = answer.read()
        if answer.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(text[:300])
        link.close()

    began = time.perf_counter()
    with ThreadPoolExecutor(len(load.prompts)) as pool:
        list(pool.map(ask, load.prompts))
    return time.perf_counter() - began


def http_seconds(
    engine: Engine, load: Load, *, tokenizer: Tokenizer, repeats: int
) -> list[float]:
    """Serves an engine on loopback and times clients in a process of their own."""
    try:
        from recurjax.serving import server
        from recurjax.serving.app import App, Served
        from recurjax.serving.worker import Worker
    except ImportError as error:
        raise UserError(f"needs {error.name}: pip install 'recurjax[serve]'") from error
    worker = Worker(lambda: engine, most_waiting=len(load.prompts))
    app = App(
        {"m": Served(name="m", worker=worker, tokenizer=tokenizer, template=None)}
    )
    bound, ended = server.bind("127.0.0.1", 0), threading.Event()

    def run() -> None:
        server.serve(app, [worker], bound, grace=5.0, ends=ended)

    thread = threading.Thread(target=run)
    thread.start()
    port = bound.getsockname()[1]
    # A process of its own: clients must not take the server's time in the interpreter.
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawn) as clients:

            def once() -> float:
                return clients.submit(client_seconds, port, load).result()

            once()  # imports, and the first connection
            return [once() for _ in range(repeats)]
    finally:
        ended.set()
        thread.join()


def second_turn_seconds(engine: Engine, options: Options, *, cached: bool) -> float:
    """Times the first token of a turn after a talk that is kept, or unknown."""
    draw = np.random.default_rng(time.perf_counter_ns())
    settings = RequestSettings(max_new_tokens=1, ignore_eos=True)
    turn = draw.integers(0, 256, 16).tolist()

    def finished(prompt: list[int]) -> tuple[float, int, list[int]]:
        request = engine.submit(prompt, settings)
        while not request.done:
            engine.step()
        assert request.started is not None
        return request.started - request.submitted, request.reused, request.tokens

    talk = draw.integers(0, 256, options.talk).tolist()
    _, _, answer = finished(talk)
    if not cached:
        # Another talk of this length: nothing of it was read before.
        talk = draw.integers(0, 256, options.talk).tolist()
    seconds, reused, _ = finished([*talk, *answer, *turn])
    assert bool(reused) == cached, f"{reused} tokens reused"
    return seconds


def median(measure: Callable[[], float], repeats: int) -> float:
    """Returns the median of some measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def fitting(config: ModelConfig, length: int, options: Options) -> int:
    """Counts the slots that fit, from the shapes of their caches."""
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    row = row_bytes(model, length, SequenceWise())
    return int(options.memory_gib * 2**30) // row


def main(argv: list[str] | None = None) -> int:
    """Measures, and prints a table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="serving_times.py")
    load, tokenizer = drawn_load(options), ByteTokenizer()
    tokens = options.requests * options.new_tokens
    longest = max(options.talk + 20, 257 + options.new_tokens)
    print(
        f"width {options.width}, {options.layers} layers, {options.slots} slots of "
        f"{longest} tokens, {options.requests} requests of {options.new_tokens} new "
        f"tokens, on {jax.devices()[0].device_kind}\n"
    )
    print(
        "| | engine, tokens/s | over HTTP | next turn, kept | not kept "
        f"| slots in {options.memory_gib:g} GiB at 4,096 | at 65,536 |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, stack in stacks(options).items():
        config = ModelConfig(vocabulary=VOCABULARY, stack=stack)
        model = jax.jit(lambda c=config: Decoder(c, rngs=nnx.Rngs(0)))()
        sizes = EngineConfig(
            slots=options.slots, length=longest, steps=4, states_gib=0.25
        )
        engine = Engine(model, sizes, tokenizer=tokenizer)
        engine.compile()
        alone = median(lambda e=engine: engine_seconds(e, load), options.repeats)
        turns = [
            median(
                lambda e=engine, k=cached: second_turn_seconds(e, options, cached=k),
                options.repeats,
            )
            for cached in (True, False)
        ]
        over = statistics.median(
            http_seconds(engine, load, tokenizer=tokenizer, repeats=options.repeats)
        )
        fits = [fitting(config, length, options) for length in (4096, 65536)]
        print(
            f"| {name} | {tokens / alone:,.0f} | {tokens / over:,.0f} "
            f"({alone / over - 1:+.1%}) | {turns[0] * 1e3:,.0f} ms "
            f"| {turns[1] * 1e3:,.0f} ms | {fits[0]:,} | {fits[1]:,} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    host.prepare(reading=True)
    run_script(main)
