"""Figures 5 and 8 and Table 5: what single heads of a pretrained model look at.

Reads the first tokens of many texts, cut from one file, and draws three heads' mean
attention, of the highest, the median and the lowest RA-I (figure 8). For one head it
draws the norm of each value, the attention weights and their products, over the first
32 tokens (figure 5). It prints table 5's row: the contributions of the first token and
of others, their mean over all heads and the interval of 1.96 standard deviations.

    python experiments/recurformer/head_figures.py runs/llama2_7b --text wikipedia.txt \
        --layer 24 --head 18

Layers and heads count from 0. The paper measures 1,024 texts, 512 of 256 tokens for its
table; its alpha and window are those of `recurjax convert to-recurformer`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

from recurjax.cli.convert.surgery import BATCH, cut_text
from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.files.atomic import write_figure
from recurjax.machine import host
from recurjax.surgery.recency import HeadRecency, mean_attention, measure_recency
from recurjax.training.run import load_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Measures heads, prints table 5 and draws the figures.

    Attributes:
      run: a Transformer, such as an imported directory.
      text: UTF-8; texts are cut from its beginning.
      samples: texts.
      length: tokens of a text, for RA-I and figure 8.
      layer, head: layer and head that figure 5 shows.
      out: gets figure5.png and figure8.png.
    """

    run: Annotated[Path, tyro.conf.Positional]
    text: Path
    samples: int = 512
    length: int = 256
    layer: int = 0
    head: int = 0
    out: Path = Path(".")


FIRST = 32
"""Tokens of figure 5."""


def interval(values: np.ndarray) -> str:
    """Returns a mean and the interval of 1.96 standard deviations around it."""
    mean, spread = values.mean(), 1.96 * values.std()
    return f"{mean:.4f} [{mean - spread:.4f}, {mean + spread:.4f}]"


def table_5(recency: HeadRecency) -> str:
    """Returns the Markdown table; contributions are means over texts and pairs."""
    lines = ["| token | L1 | L2 |", "|---|---|---|"]
    for key, name in enumerate(("first", "others")):
        cells = (interval(recency.contributions[..., norm, key]) for norm in (0, 1))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_recency(recency: HeadRecency) -> list[tuple[int, int]]:
    """Returns (layer, head) of the highest, the median and the lowest RA-I."""
    order = np.lexsort((-recency.ratio.ravel(), -recency.count.ravel()))
    H = recency.count.shape[1]
    places = (0, len(order) // 2, len(order) - 1)
    return [(int(order[n]) // H, int(order[n]) % H) for n in places]


def figure_5(weights: np.ndarray, norms: np.ndarray, file: Path) -> None:
    """Draws one head's value norms, weights, and their products."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    first.bar(range(len(norms)), norms)
    first.set(xlabel="token", title="L2 norm of the value")
    for axes, image, title in (
        (second, weights, "attention weight"),
        (third, weights * norms, "contribution"),
    ):
        figure.colorbar(axes.imshow(image, cmap="viridis"))
        axes.set(xlabel="key", ylabel="query", title=title)
    write_figure(figure, file)


def figure_8(maps: dict[str, np.ndarray], file: Path) -> None:
    """Draws mean attention of some heads, next to each other."""
    figure = Figure(figsize=(3.6 * len(maps), 3.4), layout="constrained")
    for axes, (title, weights) in zip(
        np.atleast_1d(figure.subplots(1, len(maps))), maps.items(), strict=True
    ):
        # Weights fall off by orders of magnitude: their square roots are drawn.
        axes.imshow(np.sqrt(weights), cmap="viridis")
        axes.set(xlabel="key", ylabel="query", title=title)
    write_figure(figure, file)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints and draws."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="head_figures.py")
    loaded = load_run(options.run, report=lambda _: None)
    rows = cut_text(options.text, options.samples, options.length, loaded)
    batches = [rows[n : n + BATCH] for n in range(0, len(rows), BATCH)]
    window = max(1, options.length // 10)
    recency = measure_recency(loaded.model, batches, window=window)
    print(table_5(recency), end="")
    L, H = recency.count.shape
    if not (0 <= options.layer < L and 0 <= options.head < H):
        raise UserError(
            f"--layer {options.layer} --head {options.head}: the model has layers 0 to "
            f"{L - 1} and heads 0 to {H - 1}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    heads = by_recency(recency)
    maps = mean_attention(loaded.model, batches, heads)
    titles = [f"layer {l}, head {h}: RA-I {recency.count[l, h]}" for l, h in heads]
    figure_8(
        {title: maps[each][0] for title, each in zip(titles, heads, strict=True)},
        options.out / "figure8.png",
    )
    layer_head = options.layer, options.head
    first = [batch[:, :FIRST] for batch in batches]
    weights, norms = mean_attention(loaded.model, first, [layer_head])[layer_head]
    figure_5(weights, norms, options.out / "figure5.png")
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
