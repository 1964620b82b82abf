"""How far a recursive model's matrices lie from those it was made of, and a picture."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from recurjax.model import Decoder
from recurjax.surgery.named_parameters import named_leaves, on_host
from recurjax.surgery.recursive_parts import MAPS, flat
from recurjax.surgery.relaxed_recursive import recursive_config
from recurjax.variants.relaxed_recursive_transformer.block import depths_of
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
    ours, theirs, P = named_leaves(recursive), named_leaves(model), len(base.windows)
    found = []
    for b, row in enumerate(depths_of(base.layers, stack.loops, stack.sharing)):
        for k, depth in enumerate(row.tolist()):
            repeat, place = divmod(k, P)
            for name, weight in MAPS.items():
                block = f"stack.blocks.{place}.{weight}"
                if block not in theirs:
                    continue
                # One matrix after another, gathered from its devices. In float64:
                # differences of nearly equal matrices are what is measured.
                residual = flat(weight, on_host(theirs[block][depth // P]))
                residual -= flat(weight, on_host(ours[block][repeat]))
                before = float(np.sum(residual**2))
                if stack.rank:
                    reduce, expand = (
                        on_host(
                            ours[f"stack.adapters.{place}.{name}.w_{side}"][b, repeat]
                        )
                        for side in ("reduce", "expand")
                    )
                    residual -= reduce.astype(np.float64) @ expand.astype(np.float64)
                left = float(np.sum(residual**2))
                # A layer that is the shared one leaves nothing to make up for.
                kept = 1.0 - left / before if before else 1.0
                found.append(Energy(depth, name, before**0.5, kept))
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
