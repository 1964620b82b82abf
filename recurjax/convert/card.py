"""The model card of a run: what a reader of its repository on the Hub must know.

Everything on it is read from the run: its experiment, its metrics, its evaluations and
the comparison with PyTorch. What no file says, such as the licence, is an argument.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurjax.convert.torch.export import MODULE
from recurjax.data.config import DataConfig, Mixture
from recurjax.data.corpus_options import name_of
from recurjax.data.tasks import TaskData
from recurjax.errors import UserError
from recurjax.evaluation.rows import FILE as EVALUATIONS
from recurjax.evaluation.rows import Row, markdown, newest, read_rows
from recurjax.model import count_parameters
from recurjax.training.run import LoadedRun, RunDirectory
from recurjax.variants.latent_recurrent_transformer import (
    LatentRecurrentTransformerConfig,
)
from recurjax.variants.rat import RatConfig
from recurjax.variants.recurformer import RecurFormerConfig
from recurjax.variants.recurrent_transformer import RecurrentTransformerConfig
from recurjax.variants.relaxed_recursive_transformer import (
    RelaxedRecursiveTransformerConfig,
)
from recurjax.version import REPOSITORY

CARD = "README.md"
LOSS_PICTURE = "loss.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A paper, with the fields of CITATION.cff.

    Attributes:
      key: key of its BibTeX entry.
      authors: as BibTeX writes them.
      arxiv: its number there, where it is known.
    """

    key: str
    title: str
    authors: str
    year: int
    arxiv: str | None = None

    def bibtex(self) -> str:
        """Returns its entry."""
        fields = {"title": self.title, "author": self.authors, "year": str(self.year)}
        if self.arxiv is not None:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv"}
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
        return f"@misc{{{self.key},\n" + ",\n".join(lines) + "\n}"


PAPERS: dict[type, Paper] = {
    RecurrentTransformerConfig: Paper(
        key="recurrent_transformer",
        title="The Recurrent Transformer: Greater Effective Depth and Efficient "
        "Decoding",
        authors="{The authors of arXiv:2604.21215}",
        year=2026,
        arxiv="2604.21215",
    ),
    LatentRecurrentTransformerConfig: Paper(
        key="latent_recurrent_transformer",
        title="Latent Recurrent Transformer: Architecture Exploration, Training "
        "Strategies, and Scaling Behavior",
        authors="Huang, Zeyi and He, Xuehai and Ren, LiLiang and Wang, Yiping and "
        "Peng, Baolin and Cheng, Hao and Wang, Shuohang and He, Pengcheng and "
        "Gao, Jianfeng and Lee, Yong Jae and Shen, Yelong",
        year=2026,
        arxiv="2605.26797",
    ),
    RatConfig: Paper(
        key="rat",
        title="RAT: Bridging RNN Efficiency and Attention Accuracy in Language "
        "Modeling",
        authors="Wei, Xiuying and Yadav, Anunay and Pascanu, Razvan and "
        "Gulcehre, Caglar",
        year=2025,
    ),
    RelaxedRecursiveTransformerConfig: Paper(
        key="relaxed_recursive_transformers",
        title="Relaxed Recursive Transformers: Effective Parameter Sharing with "
        "Layer-wise LoRA",
        authors="Bae, Sangmin and Fisch, Adam and Harutyunyan, Hrayr and Ji, Ziwei "
        "and Kim, Seungyeon and Schuster, Tal",
        year=2024,
    ),
    RecurFormerConfig: Paper(
        key="recurformer",
        title="RecurFormer: Not All Transformer Heads Need Self-Attention",
        authors="Yan, Ruiqing and Zheng, Linghan and Du, Xingbo and Zou, Han and "
        "Guo, Yufeng and Yang, Jianfei",
        year=2024,
    ),
}
"""Of each variant; the baseline Transformer has none of its own."""


def check_license(license: str) -> None:
    """Refuses a text that cannot be a license's identifier on the Hub.

    Raises:
      UserError: it is not such an identifier.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license) is None:
        raise UserError(
            "--license must be a name of the Hub's list, such as apache-2.0, "
            f"mit, cc-by-4.0 or other, got {license!r}"
        )


def model_card(
    run: LoadedRun,
    root: Path,
    *,
    license: str,
    repository: str,
    parity: Mapping[str, Any],
) -> str:
    """Returns a card in Markdown, with the metadata that the Hub reads above it.

    Args:
      run: what was loaded from the run directory.
      root: the run directory, for metrics and evaluations.
      license: its identifier on the Hub, as the user names it.
      repository: OWNER/NAME, in the examples.
      parity: what parity.json of the export holds.

    Raises:
      UserError: evaluations.jsonl is damaged, or the licence is not an identifier.
    """
    check_license(license)
    directory = RunDirectory(root)
    rows = read_rows(root) if (root / EVALUATIONS).is_file() else []
    rows = [row for row in newest(rows) if row.step == run.step]
    loss = directory.validation_loss(run.step)
    if loss is not None:
        rows.insert(0, _validation_row(run, loss))
    sections = [
        _introduction(run, repository),
        _use(repository),
        _training(run, directory),
        _evaluation(rows),
        _parity(parity),
        _limits(run),
        f"## Licence\n\n{license}, as stated by who published the model.",
        _citation(run),
    ]
    metadata = _metadata(run, rows, license, repository)
    return f"---\n{metadata}---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(
    run: LoadedRun, rows: Sequence[Row], license: str, repository: str
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"[^A-Za-z0-9_.-]+", "_", row.task).strip("_"),
            dataset_name=row.task,
            metric_type=row.metric,
            metric_name=_metric_name(row),
            metric_value=row.value,
        )
        for row in rows
        if math.isfinite(row.value)
    ]
    data = ModelCardData(
        license=license,
        library_name="recurjax",
        pipeline_tag="text-generation",
        tags=["recurjax", _variant(run)],
        datasets=_hub_datasets(run.experiment.data) or None,
        model_name=repository.rpartition("/")[2],
        eval_results=results or None,
    )
    return data.to_yaml(line_break="\n") + "\n"


def _metric_name(row: Row) -> str:
    settings = {**row.settings, **({"limit": row.limit} if row.limit else {})}
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{row.metric} ({words})" if words else row.metric


def _introduction(run: LoadedRun, repository: str) -> str:
    config = run.model.config
    count = count_parameters(config).total
    paper = PAPERS.get(type(config.stack))
    about = "a decoder-only Transformer"
    if paper is not None:
        title = f"*{paper.title}* ({paper.year})"
        if paper.arxiv is not None:
            title = f"[{title}](https://arxiv.org/abs/{paper.arxiv})"
        about = f"a {_variant(run).replace('_', ' ')} of {title}"
    return (
        f"# {repository.rpartition('/')[2]}\n\n"
        f"A language model with {count:,} parameters, {about}. It was made with "
        f"recurjax; the weights are those of step {run.step:,}."
    )


def _use(repository: str) -> str:
    parts = [
        "## Use",
        "JAX:",
        _code(f"""
from recurjax import generate
from recurjax.convert import from_hub

run = from_hub("{repository}")
print(generate(run.model, ["The"], tokenizer=run.tokenizer).texts[0])
"""),
        "On the command line: `recurjax generate hf:" + repository + ' --prompt "The"`.'
        " PyTorch, with torch, safetensors and numpy, by a module that comes along:",
        _code(f"""
import sys

import torch
from huggingface_hub import snapshot_download

folder = snapshot_download("{repository}")
sys.path.insert(0, folder)
from {MODULE.removesuffix(".py")} import load

model = load(folder)
print(model.generate(torch.tensor([[1, 2, 3]]), 16))
"""),
        "transformers, which runs the module of the repository:",
        _code(f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{repository}"
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(name)
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
"""),
    ]
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def _training(run: LoadedRun, directory: RunDirectory) -> str:
    experiment, vocabulary = run.experiment, run.model.config.vocabulary
    tokenizer = f"{type(run.tokenizer).__name__}, {vocabulary:,} tokens"
    if directory.imported.exists():
        return (
            "## Training\n\nThe weights were imported or made of another model; no "
            f"training is recorded with them. Tokenizer: {tokenizer}."
        )
    training = experiment.training
    tokens = run.step * training.tokens_per_step
    facts = {
        "data": _data(experiment.data),
        "tokenizer": tokenizer,
        "steps": f"{run.step:,} of {training.steps:,}",
        "tokens": f"{tokens:,}: {training.batch:,} rows of {training.length:,} a step",
        "objective": type(experiment.objective).__name__,
        "optimizer": f"`{experiment.optimizer}`",
        "schedule": f"`{experiment.schedule}`",
        "gradient clip": training.gradient_clip,
        "seed": training.seed,
        "activations": run.model.config.dtype,
    }
    if training.start_from is not None:
        facts["started from"] = f"{Path(training.start_from).name}"
    lines = ["## Training", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    if directory.loss_plot.is_file():
        lines += ["", f"![The losses by step]({LOSS_PICTURE})"]
    return "\n".join(lines)


def _data(data: DataConfig | TaskData) -> str:
    # By name: paths of the machine that trained say nothing to a reader.
    datasets = _hub_datasets(data)
    return _data_name(data) + (f" ({', '.join(datasets)})" if datasets else "")


def _data_name(data: DataConfig | TaskData) -> str:
    if isinstance(data, TaskData):
        return f"task {type(data.task).__name__}"
    return name_of(data.corpus)


def _hub_datasets(data: DataConfig | TaskData) -> list[str]:
    """Returns the data sets of the Hub that a corpus reads."""
    if isinstance(data, TaskData):
        return []
    corpus = data.corpus
    corpora = (
        [part.corpus for part in corpus.parts]
        if isinstance(corpus, Mixture)
        else [corpus]
    )
    patterns = (p for each in corpora for p in getattr(each, "patterns", ()))
    matches = (re.match(r"hf://datasets/([^/]+/[^/@]+)", p) for p in patterns)
    return sorted({match[1] for match in matches if match})


def _validation_row(run: LoadedRun, loss: float) -> Row:
    return Row(
        step=run.step,
        task=f"{_data_name(run.experiment.data)} (validation)",
        metric="loss",
        value=loss,
        n=0,
    )


def _evaluation(rows: Sequence[Row]) -> str:
    if not rows:
        return "## Evaluation\n\nNo evaluation of this checkpoint is recorded."
    return f"## Evaluation\n\n{markdown(rows).rstrip()}"


def _parity(parity: Mapping[str, Any]) -> str:
    title = "## JAX and PyTorch\n\n"
    if not parity.get("measured"):
        reason = parity.get("reason", "nothing was compared")
        return f"{title}The PyTorch module was not compared with JAX: {reason}."
    rows, length = parity["shape"]
    return (
        f"{title}Compared with {parity['against']} in float32 on {rows} rows of "
        f"{length} tokens: logits differ by {parity['max_abs_difference']:.2g} at most "
        f"({parity['relative_difference']:.2g} of the largest), the likeliest token "
        f"agrees at {parity['top1_agreement']:.2%} of positions, and "
        f"{parity['greedy_agreement']} of {parity['greedy_tokens']} greedy tokens are "
        "the same in every row."
    )


def _limits(run: LoadedRun) -> str:
    config, length = run.model.config, run.experiment.training.length
    most = (
        "It has no largest length, but"
        if config.max_length is None
        else f"It reads {config.max_length:,} tokens at most, and"
    )
    return (
        "## Limits\n\n"
        f"{most} it was trained or imported for rows of {length:,} tokens: beyond them "
        "nothing is known of its quality. What it writes may be wrong, biased or "
        "harmful; no filter and no test of safety comes with it."
    )


def _citation(run: LoadedRun) -> str:
    where = f",\n  url = {{{REPOSITORY}}}" if REPOSITORY else ""
    software = (
        "@software{recurjax,\n  title = {recurjax: recurrent transformers in JAX},\n"
        f"  author = {{{{The recurjax authors}}}}{where}\n}}"
    )
    paper = PAPERS.get(type(run.model.config.stack))
    entries = [software] if paper is None else [paper.bibtex(), software]
    return "## Citation\n\n```bibtex\n" + "\n\n".join(entries) + "\n```"


def _variant(run: LoadedRun) -> str:
    name = type(run.model.config.stack).__module__.split(".")
    return name[name.index("variants") + 1]
