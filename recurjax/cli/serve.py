"""`recurjax serve`: models behind HTTP, in OpenAI's words."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from jax.sharding import Mesh

from recurjax.cli.options import parse, read_adapters, shows_usage
from recurjax.convert.hub import imported_run
from recurjax.data.chat import load_template
from recurjax.data.tokenizers import Tokenizer, text_ends
from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import read_exit_head
from recurjax.exits import ExitHead, parse_rule
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Engine, EngineConfig
from recurjax.inference.engine.config import MOST_STOPS
from recurjax.inference.engine.memory import slots_that_fit, state_sizes
from recurjax.inference.engine.strategy import choose_strategy
from recurjax.model import Decoder, WeightDtype
from recurjax.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    RangeChecks,
)
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.training.run import LoadedRun, load_adapters, load_run
from recurjax.types import Missing

if TYPE_CHECKING:
    from recurjax.serving.app import Served


USAGE = """usage: recurjax serve RUN [RUN ...] [options]

  recurjax serve runs/quickstart --port 8000

Answers OpenAI's clients with trained models over HTTP.
recurjax serve --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(RangeChecks):
    """Serves trained models over OpenAI's API.

    Attributes:
      runs: run directories, or hf:OWNER/NAME[@REVISION] of the Hugging Face Hub; each
        is served under its folder's or repository's name.
      adapter: NAME=RUN, a run of adapters of the model, which requests name as
        MODEL:NAME; may be given several times.
      host: address to listen on; by default only this machine can connect.
      port: port to listen on; 0: any free one.
      slots: requests that run at once; "auto": as many as fit into memory.
      length: tokens per slot, prompt and answer; None: the length that the run trained
        at, at least 256; for an imported model 4096, or its learned positions.
      queue: requests that may wait for a slot; the server refuses further ones.
      prefill_tokens: most prompt tokens read between two decode calls.
      steps: tokens per slot in one decode call, after which new requests can enter.
      states_gib: GiB of memory for states of conversations, so that a turn reads only
        new tokens.
      prefill: how to read prompts: "exact", or for a model with a latent memory
        "sweeps:4", in 4 parallel sweeps, which is approximate.
      exit: let tokens leave a recursive model early, as in `generate`.
      missing: how to fill the keys and values that early exits lack, as in `generate`;
        "verify" keeps greedy texts exact.
      speculate: draw up to this many tokens per step of a recursive model, as in
        `generate`.
      top_logprobs: most log-probabilities per token that a request may ask for.
      echo_logprobs: also return probabilities of prompts, for completions with echo and
        logprobs; takes the memory of one more slot.
      api_key_file: a file with the key that requests must send.
      template: a chat template for runs without one.
      cors: origins of web pages that may connect, such as http://localhost:3000.
      allowed_host: further host names by which clients may call this machine; with
        --host 0.0.0.0 any IP address is allowed.
      grace: seconds that open requests have to finish when the server stops.
      weights: dtype of the weights in memory: int8 or int4 (64 inputs share a scale;
        tables in int8), q8_0, q4_0 or q4_1 (GGUF's groups of 32; tables in q8_0), with
        -layers tables unchanged; None: as stored.
      mesh: devices that hold each model.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    slots: PositiveInt | Literal["auto"] = 8
    length: PositiveInt | None = None
    queue: NonNegativeInt = 64
    prefill_tokens: PositiveInt = 512
    steps: PositiveInt = 4
    states_gib: NonNegativeFloat = 0.5
    prefill: str = "exact"
    exit: str | None = None
    missing: Missing | Literal["verify"] | None = None
    speculate: PositiveInt | None = None
    top_logprobs: NonNegativeInt = 5
    echo_logprobs: bool = True
    api_key_file: Path | None = None
    template: Path | None = None
    cors: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    grace: NonNegativeFloat = 30.0
    weights: WeightDtype | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def run(argv: list[str]) -> int:
    """Runs `recurjax serve ARGV` until it is stopped, and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(ServeOptions, argv, prog="recurjax serve")
    try:
        # Imported here: needs the packages of the extra `serve`.
        from recurjax.serving.app import LOOPBACK, App
        from recurjax.serving.server import bind, serve
    except ImportError as error:
        raise UserError(
            f"recurjax serve needs {error.name}: pip install 'recurjax[serve]'"
        ) from error
    if not options.runs:
        raise UserError("RUN is missing: recurjax serve RUN [RUN ...]")
    runs = tuple(imported_run(path, report=_tell) for path in options.runs)
    # Clients name the model that they ask by the folder of its run.
    names = [path.resolve().name for path in runs]
    if len(set(names)) < len(names):
        raise UserError(
            "the runs must have different folder names, by which clients name "
            f"them, got {', '.join(names)}"
        )
    if options.adapter and len(runs) > 1:
        raise UserError(
            f"--adapter needs exactly one run, their base, got {len(runs)}: serve the "
            "others separately"
        )
    key = None
    # From a file: every process of a machine can read another's command line.
    if options.api_key_file is not None:
        key = _read_key(options.api_key_file)
    # Before reading the models: report a port that is in use at once.
    bound = bind(options.host, options.port)
    served = [
        model
        for name, path in zip(names, runs, strict=True)
        for model in _served(name, path, options)
    ]
    host, port = bound.getsockname()[:2]
    _tell(f"listening on http://{host}:{port} (health: 503 until compiled)")
    if key is None and options.host not in LOOPBACK:
        _tell(
            f"--host {options.host} without --api-key-file: whoever reaches this port "
            "may use the models"
        )
    app = App(
        {model.name: model for model in served},
        api_key=key,
        cors=options.cors,
        hosts=(*LOOPBACK, options.host, *options.allowed_host),
        addresses=options.host in ("0.0.0.0", "::"),
    )
    workers = [model.worker for model in served if model.base is None]
    serve(app, workers, bound, grace=options.grace)
    if any(worker.compiles for worker in workers):
        # Nothing interrupts XLA's compiler, and Python's exit would wait for it.
        sys.stderr.flush()
        os._exit(0)
    return 0


def _served(name: str, path: Path, options: ServeOptions) -> "list[Served]":
    """Returns a run's model, and its adapters on the same engine."""
    from recurjax.serving.app import Served
    from recurjax.serving.prompt_scores import PromptScorer
    from recurjax.serving.worker import Worker

    mesh = reading_mesh(options.mesh)
    loaded = load_run(
        path, mesh=mesh, weights=options.weights or "stored", report=_tell
    )
    adapters = read_adapters(options.adapter)
    if adapters:
        model = load_adapters(loaded, adapters, mesh=mesh, report=_tell)
        loaded = loaded._replace(model=model)
    template = load_template(
        path / "tokenizer", file=options.template, tokenizer=loaded.tokenizer
    )
    if loaded.tokenizer.eos is None:
        _tell(f"{name}: its tokenizer has no EOS: only a limit or a stop ends a text")
    ends = text_ends(loaded.tokenizer)
    if len(ends) > MOST_STOPS:
        raise UserError(
            f"{path}: eos_token_id in tokenizer/generation_config.json names "
            f"{len(ends)} tokens and an engine takes {MOST_STOPS}: remove some"
        )
    if template is None:
        _tell(f"{name}: no chat template: completions only, or give --template FILE")
    length = options.length or _default_length(loaded)
    config = EngineConfig(
        slots=options.slots,
        length=length,
        prefill_tokens=min(options.prefill_tokens, length),
        steps=options.steps,
        states_gib=options.states_gib if options.prefill == "exact" else 0.0,
        prefill=options.prefill,
        top_logprobs=options.top_logprobs,
        exit=None if options.exit is None else parse_rule(options.exit),
        missing=options.missing,
        speculate=options.speculate,
    )
    head = None
    if config.exit is not None and config.exit.kind == "head":
        head = read_exit_head(path)
    # Check whatever a user can correct before compiling.
    strategy = choose_strategy(loaded.model, config, head)
    # Raise now, not when the server runs and cannot build its engine.
    slots_that_fit(loaded.model, config, strategy, mesh=mesh)
    # Decoding is bound by reading weights: they are held as they are multiplied, and
    # made so in the engine's thread, once.
    model = cache(lambda: in_compute_dtype(loaded.model))
    spread = mesh if mesh.size > 1 else None

    def build_scorer() -> PromptScorer | None:
        if not options.echo_logprobs or spread is not None:
            return None
        return PromptScorer(model(), length=length, top=options.top_logprobs)

    base = Served(
        name=name,
        worker=Worker(
            partial(_build, name, model, loaded.tokenizer, config, spread, head),
            most_waiting=options.queue,
            build_scorer=build_scorer,
        ),
        tokenizer=loaded.tokenizer,
        template=template,
        ends=ends,
        sizes=state_sizes(loaded.model, length),
        exits=strategy.loops(loaded.model),
        sampling=loaded.tokenizer.settings.sampling,
    )
    return [base] + [
        replace(
            base,
            name=f"{name}:{adapter}",
            base=name,
            adapter=number,
            # Training may have brought a template that the base lacks.
            template=load_template(
                run / "tokenizer", file=options.template, tokenizer=loaded.tokenizer
            )
            or template,
        )
        for number, (adapter, run) in enumerate(adapters.items(), start=1)
    ]


def _default_length(loaded: LoadedRun) -> int:
    # What was imported, or is trained by adapters, knows longer texts than its run.
    trained_here = loaded.step > 0 and loaded.base is None
    length = max(loaded.experiment.training.length, 256) if trained_here else 4096
    return min(length, loaded.model.config.max_length or length)


def _build(
    name: str,
    model: Callable[[], Decoder],
    tokenizer: Tokenizer,
    config: EngineConfig,
    mesh: Mesh | None,
    head: ExitHead | None,
) -> Engine:
    try:
        engine = Engine(model(), config, tokenizer=tokenizer, mesh=mesh, exit_head=head)
        engine.compile()
    except UserError as error:
        _tell(f"{name}: {error}")
        raise
    _tell(
        f"{name}: {engine.slots} slots of {config.length} tokens, "
        f"{engine.row_bytes / 2**20:,.2f} MiB each: ready, compiled in "
        f"{engine.compile_seconds:.1f} s"
    )
    return engine


def _read_key(file: Path) -> str:
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file: cannot read {file}: {error}") from error
    if not key:
        raise UserError(f"--api-key-file: {file} is empty: write the API key into it")
    if not all("!" <= sign <= "~" for sign in key):
        raise UserError(
            f"--api-key-file: the key in {file} must be ASCII without spaces, "
            "which HTTP requires"
        )
    return key


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
