"""`recurjax generate`: continues prompts with the model of a run directory."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from recurjax.cli.options import parse, read_adapters, shows_usage
from recurjax.convert.hub import imported_run
from recurjax.data.tokenizers import text_ends
from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import read_exit_head
from recurjax.exits import EarlyExit, parse_rule
from recurjax.files.json_files import json_text, parse_json
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.engine import Request
from recurjax.inference.generate import (
    Generation,
    Timing,
    as_generation,
    continue_prompts,
)
from recurjax.inference.sampling import requested_sampling
from recurjax.machine import terminal
from recurjax.machine.distributed import start_processes
from recurjax.model import WeightDtype
from recurjax.ranges import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    RangeChecks,
    Seed,
)
from recurjax.sharding import MeshConfig, reading_mesh
from recurjax.surgery.fewer_layers import with_loops
from recurjax.training.run import load_adapters, load_run
from recurjax.types import Missing

USAGE = """usage: recurjax generate RUN --prompt TEXT [options]

  recurjax generate runs/quickstart --prompt "HAMLET:" --max-new-tokens 100
  recurjax generate RUN --prompts-file prompts.txt --json-lines texts.jsonl

Continues prompts with the model of a run directory.
recurjax generate --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(RangeChecks):
    """Continues prompts with a trained model.

    Sampling options default to the model's generation_config.json, if it has one.

    Attributes:
      run: the run directory, or hf:OWNER/NAME[@REVISION] of the Hugging Face Hub.
      adapter: NAME=RUN, a run of adapters of the model; with several, each prompt is
        continued with each of them.
      prompt: a text to continue; may be given several times.
      prompts_file: further prompts, one per line; blank lines are skipped. In a .jsonl
        file each line is a JSON string, which may contain line breaks.
      max_new_tokens: most new tokens per prompt.
      temperature: divides the logits; 0 is greedy (always the likeliest token).
      top_k: sample from this many of the likeliest tokens.
      top_p: sample from the fewest likeliest tokens whose probabilities sum to this.
      min_p: sample from tokens with at least this share of the likeliest one's
        probability.
      repetition_penalty: above 1, makes tokens of the prompt and the text less likely.
      stop: end a text before this string, in which backslash-n is a line break; may be
        given several times.
      bos: put the tokenizer's BOS, if it has one, before each prompt.
      prefill: how to read prompts: "exact", or for a model with a latent memory
        "sweeps:4", in 4 parallel sweeps, which prints the remaining error.
      slots: prompts of a file that run at once.
      json_lines: write each text to this file when it ends; the same command resumes a
        killed one.
      exit: let tokens leave a recursive model early, by confidence:0.7 (the likeliest
        token leads by more than this), cosine:0.98 (a loop changes the state by less)
        or head:0.9 (the run's exit head is surer).
      missing: how to fill the keys and values that early exits lack: "propagate",
        "skip", or "share" for a model with loop_cache "first"; "verify" checks each
        early guess, so that greedy texts are the full model's. None: share if the model
        does, else propagate.
      speculate: draw up to this many tokens per step of a recursive model: its first
        loop drafts them and the full model verifies all at once, which leaves the
        distribution of texts as it is.
      loops: run a recursive model's block this many times; None: as in training.
      seed: the same seed gives the same texts.
      stream: print a single prompt's text while it is generated.
      json: print one JSON object with texts, tokens, finish reasons and timing.
      step: training step of the checkpoint; None: the newest.
      weights: dtype of the weights in memory: int8 or int4 (64 inputs share a scale;
        tables in int8), q8_0, q4_0 or q4_1 (GGUF's groups of 32; tables in q8_0), with
        -layers tables unchanged; None: as stored.
      mesh: devices that hold the model; the first of several processes writes.
    """

    run: Annotated[Path, tyro.conf.Positional]
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompts_file: Path | None = None
    max_new_tokens: PositiveInt = 200
    temperature: NonNegativeFloat | None = None
    top_k: PositiveInt | None = None
    top_p: PositiveFraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: PositiveFloat | None = None
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    bos: bool = True
    prefill: str = "exact"
    slots: PositiveInt = 8
    json_lines: Path | None = None
    exit: str | None = None
    missing: Missing | Literal["verify"] | None = None
    speculate: PositiveInt | None = None
    loops: PositiveInt | None = None
    seed: Seed = 0
    stream: bool = True
    json: bool = False
    step: NonNegativeInt | None = None
    weights: WeightDtype | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def run(argv: list[str]) -> int:
    """Runs `recurjax generate ARGV` and returns its exit code.

    Raises:
      UserError: a mistake that the user can correct.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(GenerateOptions, argv, prog="recurjax generate")
    if options.json and options.json_lines is not None:
        raise UserError(
            "--json and --json-lines exclude each other, because the file has "
            "the texts already: leave out --json"
        )
    prompts, adapters = _prompts(options), read_adapters(options.adapter)
    # One text for each prompt and adapter.
    texts = [(prompt, name) for prompt in prompts for name in adapters or ("",)]
    rule = None if options.exit is None else parse_rule(options.exit)
    if options.missing == "verify" and options.temperature != 0:
        raise UserError("--missing verify decodes greedily only: add --temperature 0")
    if options.missing is not None and rule is None:
        raise UserError(
            "--missing applies to early exits only: add --exit, such as "
            "--exit confidence:0.7"
        )
    # Pieces of several texts would come mixed: only a single one is shown as it grows.
    streams = options.stream and not options.json and len(texts) == 1
    streams = streams and options.json_lines is None
    # Before the first use of a device: the processes find each other first.
    start_processes()
    options = dataclasses.replace(options, run=imported_run(options.run, report=_tell))
    mesh = reading_mesh(options.mesh)
    loaded = load_run(
        options.run,
        step=options.step,
        mesh=mesh,
        weights=options.weights or "stored",
        report=_tell,
    )
    model = loaded.model
    if adapters:
        model = load_adapters(loaded, adapters, mesh=mesh, report=_tell)
    defaults = loaded.tokenizer.settings.sampling
    sampling, taken = requested_sampling(options, defaults)
    if taken:
        _tell(f"sampling of the model's own: {', '.join(taken)}")
    if options.loops is not None:
        # Before the exits are made: a rule then leaves the loops of the shorter model.
        model = with_loops(model, options.loops)
    head = None
    if rule is not None and rule.kind == "head":
        head = read_exit_head(options.run)
    exits = None
    if rule is not None:
        exits = EarlyExit(rule=rule, missing=options.missing, head=head)
    unshown = prompts[:1]  # printed with the first text
    compiling = ExitStack()

    def show(_: int, text: str) -> None:
        compiling.close()
        _show("".join(unshown) + text)
        unshown.clear()

    # Decoding is bound by reading weights: they are held as they are multiplied.
    model = in_compute_dtype(model)
    # A mesh of one device is not a mesh: programs without it are simpler.
    spread = mesh if mesh.size > 1 else None
    # A shell passes a backslash and an n, where a line break is meant.
    stop = [text.replace("\\n", "\n") for text in options.stop]
    shared = {
        "tokenizer": loaded.tokenizer,
        "max_new_tokens": options.max_new_tokens,
        "sampling": sampling,
        "stop": stop,
        "bos": options.bos,
        "seed": options.seed,
        "prefill": options.prefill,
    }
    done: dict[int, Any] = {}
    lines = None
    if options.json_lines is not None:
        lines = _open_lines(texts, options, loaded.step, shared)
        done = lines.done
    timing = Timing()
    # The prompts of a file wait for a slot; those of the command line run at once.
    slots = len(texts) if options.prompts_file is None else options.slots
    finished: dict[int, Request] = {}
    with compiling:
        if jax.process_index() == 0:
            compiling.enter_context(terminal.shown_elapsed("compiling"))
        for number, request in continue_prompts(
            model,
            prompts,
            **shared,
            skip=frozenset(done),
            adapters=range(1, len(adapters) + 1) or (0,),
            slots=min(slots, max(len(texts) - len(done), 1)),
            mesh=spread,
            exits=exits,
            speculate=options.speculate,
            on_text=show if streams else None,
            timing=timing,
        ):
            compiling.close()
            finished[number] = request
            if lines is not None:
                lines.add(number, _line(*texts[number], request))
    if options.json_lines is not None:
        _tell(f"{len(done)} texts in {options.json_lines}")
        _tell(_speed(timing))
        return 0
    result = as_generation([finished[n] for n in range(len(texts))], timing)
    if options.json:
        _show(_as_json(texts, result, step=loaded.step))
    elif streams:
        show(0, "\n")
    else:
        _show(_as_blocks(texts, result))
    _tell(_speed(result.timing))
    # What a way of reading prompts leaves open, in its own words.
    for name, value in result.aux.items():
        _tell(f"{name}: {value:.2g}")
    return 0


def _open_lines(
    texts: list[tuple[str, str]],
    options: GenerateOptions,
    step: int,
    shared: dict[str, Any],
) -> "_TextLines":
    assert options.json_lines is not None
    if jax.process_count() > 1:
        raise UserError("--json-lines works in one process only: leave it out")
    # All that decides a text: an earlier call's lines count only if it was the same.
    settings = dataclasses.asdict(shared["sampling"]) | {
        "step": step,
        "loops": options.loops,
        "run": str(options.run.resolve()),
        "tokenizer": shared["tokenizer"].hash,
        **{name: shared[name] for name in _DECIDE},
    }
    # Files of texts that run all loops, and end at EOS alone, stay what they were.
    if options.exit is not None:
        settings |= {"exit": options.exit, "missing": options.missing}
    if options.speculate is not None:
        settings["speculate"] = options.speculate
    if options.adapter:
        settings["adapters"] = options.adapter
    if others := set(text_ends(shared["tokenizer"])) - {shared["tokenizer"].eos}:
        settings["ends"] = sorted(others)
    lines = _TextLines(options.json_lines, [prompt for prompt, _ in texts], settings)
    if lines.done:
        _tell(f"{len(lines.done)} of {len(texts)} texts were there already")
    return lines


def _line(prompt: str, adapter: str, request: Request) -> dict[str, Any]:
    line = {
        "prompt": prompt,
        "text": request.text,
        "tokens": request.tokens,
        "finish_reason": request.reason,
    }
    line |= {"adapter": adapter} if adapter else {}
    return line | ({"loops": request.loops} if request.loops else {})


_DECIDE = ("max_new_tokens", "stop", "bos", "seed", "prefill")
"""Options, apart from sampling, that determine a text."""


def _prompts(options: GenerateOptions) -> list[str]:
    prompts = list(options.prompt)
    if options.prompts_file is not None:
        prompts += _read_prompts(options.prompts_file)
    if not prompts:
        raise UserError("there is no prompt: give --prompt TEXT or --prompts-file FILE")
    return prompts


def _read_prompts(file: Path) -> list[str]:
    try:
        # Not splitlines, to which a form feed or U+2028 within a prompt ends a line.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read prompts from {file}: {error}") from error
    # Blank lines separate prompts for the eye.
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts-file: {file} has no prompt")
    if file.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        prompt = parse_json(line, f"line {number} of {file}")
        if not isinstance(prompt, str):
            raise UserError(
                f"{file}, line {number}: must be a JSON string, got {prompt!r}"
            )
        prompts.append(prompt)
    return prompts


def _as_blocks(texts: list[tuple[str, str]], result: Generation) -> str:
    if len(texts) == 1:
        return f"{texts[0][0]}{result.texts[0]}\n"
    rows = zip(texts, result.texts, result.finish_reasons, strict=True)
    return "".join(
        f"--- {'text' if adapter else 'prompt'} {number} of {len(texts)}"
        f"{f', adapter {adapter}' if adapter else ''}, ended by {reason} ---\n"
        f"{prompt}{text}\n"
        for number, ((prompt, adapter), text, reason) in enumerate(rows, start=1)
    )


def _as_json(texts: list[tuple[str, str]], result: Generation, *, step: int) -> str:
    rows = zip(texts, result.texts, result.tokens, result.finish_reasons, strict=True)
    timing = dataclasses.asdict(result.timing) | {
        "prefill_tokens_per_second": result.timing.prefill_tokens_per_second,
        "decode_tokens_per_second": result.timing.decode_tokens_per_second,
    }
    generations: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "text": text,
            "tokens": ids.tolist(),
            "finish_reason": reason,
        }
        | ({"adapter": adapter} if adapter else {})
        for (prompt, adapter), text, ids, reason in rows
    ]
    for generation, loops in zip(generations, result.loops or (), strict=False):
        generation["loops"] = loops
    document = {"step": step, "generations": generations, "timing": timing}
    return json_text(document, ensure_ascii=False, indent=1) + "\n"


def _speed(timing: Timing) -> str:
    return (
        f"prefill: {timing.prompt_tokens:,} tokens at "
        f"{timing.prefill_tokens_per_second:,.0f} a second; "
        f"decode: {timing.new_tokens - timing.rows:,} tokens at "
        f"{timing.decode_tokens_per_second:,.0f} a second; "
        f"compiled in {timing.compile_seconds:.1f} s"
    )


def _show(text: str) -> None:
    if jax.process_index() > 0:
        return
    terminal.write(text)


def _tell(text: str) -> None:
    if jax.process_index() > 0:
        return
    print(text, file=sys.stderr)


_LINE_FIELDS = {"number": int, "prompt": str, "text": str, "tokens": list}
_LINE_FIELDS |= {"finish_reason": str, "settings": str}


class _TextLines:
    """Texts in a file of JSON lines, one per prompt, in the order in which they end.

    A run that was killed continues where it stopped.

    Attributes:
      done: lines by the number of their prompt, from 0.
    """

    def __init__(self, file: Path, prompts: Sequence[str], settings: Mapping[str, Any]):
        """Reads what an earlier run has left; a last line that a kill cut off goes.

        Args:
          settings: whatever determines a text, apart from its prompt.

        Raises:
          UserError: the file holds something else, or texts of other settings.
        """
        self._file = file
        # Every line has the digest, so that texts of two settings never mix.
        text = json.dumps(settings, sort_keys=True).encode()
        self._settings = hashlib.sha256(text).hexdigest()[:16]
        self.done: dict[int, dict[str, Any]] = {}
        try:
            data = file.read_bytes() if file.exists() else b""
            # A kill cut off a line without its end: generate its text again.
            complete = data[: data.rfind(b"\n") + 1]
            for row, line in enumerate(complete.splitlines(), start=1):
                self._remember(line, f"line {row} of {file}", prompts)
            if data != complete:
                with file.open("r+b") as opened:
                    opened.truncate(len(complete))
            file.open("ab").close()  # Check that it can be written before any work.
        except OSError as error:
            raise UserError(f"--json-lines: cannot write to {file}: {error}") from error

    def add(self, number: int, line: Mapping[str, Any]) -> None:
        """Writes a prompt's line."""
        line = {"number": number, **line, "settings": self._settings}
        self.done[number] = line
        # Opened and closed for each line, so that a kill finds it with the system.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json_text(line, ensure_ascii=False) + "\n")

    def _remember(self, data: bytes, where: str, prompts: Sequence[str]) -> None:
        line = parse_json(data, where)
        kinds = line if isinstance(line, dict) else {}
        if any(
            type(kinds.get(name)) is not kind for name, kind in _LINE_FIELDS.items()
        ):
            raise UserError(
                f"--json-lines: {where} is not from an earlier call: name another file"
            )
        number = line["number"]
        if line["settings"] != self._settings:
            raise UserError(
                f"--json-lines: {where} is from other settings or another "
                "checkpoint: name another file, or repeat those settings"
            )
        if not 0 <= number < len(prompts) or prompts[number] != line["prompt"]:
            raise UserError(
                f"--json-lines: {where} continues another prompt than number "
                f"{number + 1}: name another file, or give the same prompts again"
            )
        self.done[number] = line
