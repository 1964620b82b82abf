"""How far a recursive model's matrices lie from those it was made of, and a picture."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recurjax.model import Decoder
from recurjax.surgery.relaxed_recursive import (
    MAPS,
    layer_of,
    parameters,
    recursive_config,
    use_of,
)
from recurjax.variants.relaxed_recursive_transformer.sharing import depths_of
from recurjax.variants.transformer import TransformerConfig


class Energy(NamedTuple):
    """How far one depth's matrix lies from the shared one, and what is made up for.

    Attributes:
      depth: of the layer, from 0.
      name: q, k, v, out, up, gate or down.
      residual: Frobenius norm of W_l - W'.
      kept: share of its square that the addition has; 1 where there is no residual.
    """

    depth: int
    name: str
    residual: float
    kept: float


def kept_energy(model: Decoder, recursive: Decoder) -> list[Energy]:
    """Compares a recursive model with the Transformer that it was made of.

    What is left over is ||W_l - W' - A B||^2, so kept = 1 - left / ||W_l - W'||^2; an
    addition of low rank by singular values can only keep, one not trained for it may
    also lose.
    """
    stack, base = recursive_config(recursive), model.config.stack
    assert isinstance(base, TransformerConfig)
    ours, theirs = parameters(recursive), parameters(model)
    # The shared block without its additions, to measure what they make up for.
    bare = {n: leaf for n, leaf in ours.items() if not n.startswith("stack.adapters.")}
    plain = dataclasses.replace(stack, rank=0)
    found = []
    for b, row in enumerate(depths_of(base.layers, stack.loops, stack.sharing)):
        for k, depth in enumerate(row):
            wanted = layer_of(theirs, base, int(depth))
            shared, joined = use_of(bare, plain, b, k), use_of(ours, stack, b, k)
            for name, weight in MAPS.items():
                if weight not in wanted:
                    continue
                # In float64: differences of nearly equal matrices are what is measured.
                whole = wanted[weight].astype(np.float64)
                before = float(np.sum((whole - shared[weight]) ** 2))
                left = float(np.sum((whole - joined[weight]) ** 2))
                # A layer that is the shared one leaves nothing to make up for.
                kept = 1.0 - left / before if before else 1.0
                found.append(Energy(int(depth), name, before**0.5, kept))
    return sorted(found, key=lambda energy: energy.depth)


def plot_energy(energies: list[Energy], file: Path) -> None:
    """Draws the kept share of each matrix' residual, depths down, matrices across."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(energy.name for energy in energies))
    depths = 1 + max(energy.depth for energy in energies)
    shares = np.full((depths, len(names)), np.nan)
    for energy in energies:
        shares[energy.depth, names.index(energy.name)] = energy.kept
    figure = Figure(figsize=(1.8 + 0.6 * len(names), 1.2 + 0.26 * depths))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="depth", title="kept share of the residual")
    figure.colorbar(image)
    figure.savefig(file, dpi=120)
