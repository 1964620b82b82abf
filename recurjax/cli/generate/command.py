"""`recurjax generate`: continues prompts with the model of a run directory."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

from recurjax.cli.generate.json_lines import JsonLines
from recurjax.cli.options import parse, shows_usage
from recurjax.data.tokenizers import text_ends
from recurjax.errors import UserError
from recurjax.evaluation.exit_scores import read_exit_head
from recurjax.exits import exits_of, parse_rule
from recurjax.files.json_files import json_text, parse_json
from recurjax.inference.compute_dtype import in_compute_dtype
from recurjax.inference.exit_decoding import EarlyExit
from recurjax.inference.generate import Generation, generate
from recurjax.inference.many_prompts import continue_prompts
from recurjax.inference.sampling import SamplingConfig
from recurjax.inference.timing import Timing
from recurjax.machine.distributed import start_processes
from recurjax.model import Decoder
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
from recurjax.surgery.fewer_layers import truncated
from recurjax.training.run import load_run
from recurjax.types import Missing

USAGE = """usage: recurjax generate RUN --prompt TEXT [options]

  recurjax generate runs/quickstart --prompt "HAMLET:" --max-new-tokens 100
  recurjax generate RUN --prompts-file prompts.txt --json-lines texts.jsonl

Continues prompts with the model of a run directory.
recurjax generate --help lists the options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(RangeChecks):
    """Continues prompts with a trained model.

    Attributes:
      run: the run directory.
      prompt: a text to continue; may be given several times.
      prompts_file: further prompts, one a line; blank lines are skipped. In a .jsonl
        file each line is a JSON string, which may have line breaks inside.
      max_new_tokens: for each prompt.
      temperature: divides the logits; 0 is greedy: always the likeliest token.
      top_k: draw from this many of the likeliest tokens; None: from all.
      top_p: draw from the fewest likeliest tokens with this much probability together.
      min_p: draw from tokens with this share of the likeliest one's probability.
      repetition_penalty: above 1, makes tokens less likely that the prompt or the text
        contains.
      stop: ends a text before this string, backslash-n being a line break; may be given
        several times.
      bos: begin as at the start of a document, if the tokenizer has a token for that.
      prefill: "exact", or "sweeps:4": a model with a latent memory reads the prompts in
        so many parallel sweeps; what they leave open is printed.
      slots: prompts of a file that are continued at once.
      json_lines: write each prompt's text to this file as it ends; the same command
        goes on where an earlier one stopped.
      exit: let tokens leave a recursive model early, by confidence:0.7, cosine:0.98 or
        head:0.9: once the likeliest token leads by more than this, a loop changes the
        state by less, or the exit head of the run is surer. One prompt after another;
        prompts of a file side by side.
      missing: what becomes of the keys and values that such tokens lack: "propagate",
        "skip", or "share" for a model with loop_cache "first"; or "verify": greedy
        texts are the full model's, and early states only guess ahead. None: share where
        the model does, else propagate.
      loops: run only the first loops of a recursive model.
      seed: the same seed gives the same texts.
      stream: show a single prompt's text as it comes.
      json: print one JSON object with texts, tokens, finish reasons and timing.
      step: the checkpoint of this training step; None: the newest.
      mesh: devices that the model lies on; of several processes the first one writes.
    """

    run: Annotated[Path, tyro.conf.Positional]
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    prompts_file: Path | None = None
    max_new_tokens: PositiveInt = 200
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: PositiveFraction = 1.0
    min_p: Fraction = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    bos: bool = True
    prefill: str = "exact"
    slots: PositiveInt = 8
    json_lines: Path | None = None
    exit: str | None = None
    missing: Missing | Literal["verify"] | None = None
    loops: PositiveInt | None = None
    seed: Seed = 0
    stream: bool = True
    json: bool = False
    step: NonNegativeInt | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def run(argv: list[str]) -> int:
    """Runs `recurjax generate ARGV` and returns its exit code.

    Raises:
      UserError: something the user can put right, said in one sentence.
    """
    if shows_usage(argv, USAGE, help=False):
        return 0
    options = parse(GenerateOptions, argv, prog="recurjax generate")
    if options.json and options.json_lines is not None:
        raise UserError("--json-lines FILE has the texts already: leave out --json")
    prompts = _prompts(options)
    sampling = SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    rule = None if options.exit is None else parse_rule(options.exit)
    if options.missing == "verify" and options.temperature > 0:
        raise UserError("--missing verify is for greedy texts: add --temperature 0")
    if options.missing is not None and rule is None:
        raise UserError("--missing goes with --exit: say when tokens leave")
    # Pieces of several texts would come mixed: only a single one is shown as it grows.
    streams = options.stream and not options.json and len(prompts) == 1
    streams = streams and options.json_lines is None
    # Before the first use of a device: the processes find each other first.
    start_processes()
    mesh = reading_mesh(options.mesh)
    loaded = load_run(options.run, step=options.step, mesh=mesh, report=_tell)
    model = loaded.model
    if options.loops is not None:
        # Before the exits are made: a rule then leaves the loops of the shorter model.
        model = truncated(model, options.loops)
    head = None
    if rule is not None and rule.kind == "head":
        head = read_exit_head(options.run)
    exits = None
    if rule is not None and options.missing != "verify":
        # Keys and values that a token lacks are made up for as the model was trained.
        missing = options.missing or exits_of(model).missing
        exits = EarlyExit(rule=rule, missing=missing, head=head)
    unshown = prompts[:1]  # Comes with the first text: only then all options are right.

    def show(_: int, text: str) -> None:
        _show("".join(unshown) + text)
        unshown.clear()

    # Decoding is bound by reading weights: they are held as they are multiplied.
    model = in_compute_dtype(model)
    # A mesh of one device is no mesh: programs without it are simpler.
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
        "mesh": spread,
    }
    if _wants_engine(options, prompts):
        leaving = {"rule": rule, "missing": options.missing, "exit_head": head}
        made = _on_engine(
            model, prompts, options, loaded.step, shared, leaving if rule else {}
        )
    else:
        on_text = show if streams else None
        made = generate(model, prompts, on_text=on_text, exits=exits, **shared)
    if options.json_lines is not None:
        _tell(f"{len(made.texts)} texts in {options.json_lines}")
        _tell(_speed(made.timing))
        return 0
    if options.json:
        _show(_as_json(prompts, made, step=loaded.step))
    elif streams:
        show(0, "\n")
    else:
        _show(_as_blocks(prompts, made))
    _tell(_speed(made.timing))
    # What a way of reading prompts leaves open, in its own words.
    for name, value in made.aux.items():
        _tell(f"{name}: {value:.2g}")
    return 0


def _wants_engine(options: GenerateOptions, prompts: list[str]) -> bool:
    """Says whether slots serve better than one batch that runs to its end."""
    if options.json_lines is not None:
        if jax.process_count() > 1:
            raise UserError("--json-lines is for one process: leave it out")
        return True
    # One batch tells what sweeps leave open, and runs on several processes.
    plain = options.prefill == "exact" and jax.process_count() == 1
    if options.missing == "verify":  # only slots guess ahead
        return True
    return options.prompts_file is not None and len(prompts) > 1 and plain


def _on_engine(
    model: Decoder,
    prompts: list[str],
    options: GenerateOptions,
    step: int,
    shared: dict[str, Any],
    leaving: dict[str, Any],
) -> Generation:
    lines, timing = None, Timing()
    if options.json_lines is not None:
        # All that decides a text: an earlier call's lines count only if it was the
        # same.
        settings = dataclasses.asdict(shared["sampling"]) | {
            "step": step,
            "loops": options.loops,
            "run": str(options.run.resolve()),
            "tokenizer": shared["tokenizer"].hash,
            **{name: shared[name] for name in _DECIDE},
        }
        # Files of texts that run all loops, and end at EOS alone, stay what they were.
        if leaving:
            settings |= {"exit": options.exit, "missing": options.missing}
        if others := set(text_ends(shared["tokenizer"])) - {shared["tokenizer"].eos}:
            settings["ends"] = sorted(others)
        lines = JsonLines(options.json_lines, prompts, settings)
        if lines.done:
            _tell(f"{len(lines.done)} of {len(prompts)} texts were there already")
    done = {} if lines is None else lines.done
    for number, request in continue_prompts(
        model,
        prompts,
        slots=options.slots,
        skip=set(done),
        timing=timing,
        **leaving,
        **shared,
    ):
        line = {
            "prompt": prompts[number],
            "text": request.text,
            "tokens": request.tokens,
            "finish_reason": request.reason,
        }
        if leaving:
            line["loops"] = request.loops
        done[number] = line
        if lines is not None:
            lines.add(number, line)
    # Slots end in any order; the prompts' own is given back.
    ordered = [done[number] for number in range(len(prompts))]
    # The first token of each comes of the prompt, which all loops have read.
    later = [n for line in ordered if leaving for n in line["loops"][1:]]
    return Generation(
        texts=[line["text"] for line in ordered],
        tokens=[np.asarray(line["tokens"], np.int32) for line in ordered],
        finish_reasons=[line["finish_reason"] for line in ordered],
        timing=timing,
        aux={"mean loops a token": sum(later) / len(later)} if later else {},
        loops=[line["loops"] for line in ordered] if leaving else None,
    )


_DECIDE = ("max_new_tokens", "stop", "bos", "seed", "prefill")
"""Options that decide a text, beside sampling."""


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
        raise UserError(f"there is no prompt in {file}")
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


def _as_blocks(prompts: list[str], made: Generation) -> str:
    if len(prompts) == 1:
        return f"{prompts[0]}{made.texts[0]}\n"
    rows = zip(prompts, made.texts, made.finish_reasons, strict=True)
    return "".join(
        f"--- prompt {number} of {len(prompts)}, ended by {reason} ---\n"
        f"{prompt}{text}\n"
        for number, (prompt, text, reason) in enumerate(rows, start=1)
    )


def _as_json(prompts: list[str], made: Generation, *, step: int) -> str:
    rows = zip(prompts, made.texts, made.tokens, made.finish_reasons, strict=True)
    timing = dataclasses.asdict(made.timing) | {
        "prefill_tokens_per_second": made.timing.prefill_tokens_per_second,
        "decode_tokens_per_second": made.timing.decode_tokens_per_second,
    }
    generations: list[dict[str, Any]] = [
        {
            "prompt": prompt,
            "text": text,
            "tokens": ids.tolist(),
            "finish_reason": reason,
        }
        for prompt, text, ids, reason in rows
    ]
    for generation, loops in zip(generations, made.loops or (), strict=False):
        generation["loops"] = loops
    whole = {"step": step, "generations": generations, "timing": timing}
    return json_text(whole, ensure_ascii=False, indent=1) + "\n"


def _speed(timing: Timing) -> str:
    if not timing.prefill_seconds:  # an engine, which reads and decodes in turns
        seconds = timing.decode_seconds
        speed = timing.new_tokens / seconds if seconds else 0.0
        return (
            f"{timing.rows} prompts of {timing.prompt_tokens:,} tokens, "
            f"{timing.new_tokens:,} new ones at {speed:,.0f} a second; "
            f"compiled in {timing.compile_seconds:.1f} s"
        )
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
    sys.stdout.write(text)
    # Python would hold short pieces back until a line is full.
    sys.stdout.flush()


def _tell(text: str) -> None:
    if jax.process_index() > 0:
        return
    print(text, file=sys.stderr)
