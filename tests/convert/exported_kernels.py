"""Compares an export's GPU kernels with its plain torch; run by torch's interpreter.

    TRITON_INTERPRET=1 PYTHONPATH=.compilers:. python exported_kernels.py DIRECTORY

Triton's interpreter runs the kernels on a CPU. Prints, by case and name, how far values
and gradients are apart as a share of the largest, and which kernels were launched.
"""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path

import torch

from tests.pallas_kernels.triton_interpreter import quicken


def load_module(directory):
    """Imports an export's module, whose kernels serve tensors of the CPU."""
    spec = importlib.util.spec_from_file_location(
        "exported", Path(directory) / "decoder_recurjax.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported"] = module
    spec.loader.exec_module(module)
    entered, launch, launched = quicken(), module.launch, []

    def clear_and_launch(kernel, *arguments, **options):
        entered.clear()
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    module.launch = clear_and_launch
    module.runs_kernels = lambda x, *rest: module.triton is not None and x.shape[1] > 1
    return module, launched


def runs(model, ids, mask):
    """Returns logits in two calls with a cache, a loss' gradients, padded logits."""
    with torch.no_grad():
        cache = model.new_cache(ids.shape[1])
        cut = [model(part, cache) for part in ids.split([ids.shape[1] - 5, 5], dim=1)]
        padded = model(ids, mask=mask)
    model.zero_grad()
    logits = model(ids)
    logits.square().mean().backward()
    gradients = {f"d {name}": p.grad for name, p in model.named_parameters()}
    return {"cut": torch.cat(cut, 1), "padded": padded, "logits": logits, **gradients}


def main(directory):
    """Prints the differences of all results, and the launches, as JSON."""
    module, launched = load_module(directory)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (2, 21), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, 9:12] = 0, 0
    triton, answer = module.triton, {}
    # With two scans in the file, each function has its op's name behind its own.
    finders = {n: f for n, f in vars(module).items() if n.startswith("find_sizes")}
    for case, dtype, sizes in (
        ("rows", torch.float32, {}),
        ("stretches", torch.float32, {"stretch": 8}),
        ("bfloat16", torch.bfloat16, {"stretch": 8}),
    ):
        model = module.load(directory).to(dtype)
        launched.clear()
        module.triton = triton
        for name, find_sizes in finders.items():
            setattr(module, name, partial(find_sizes, **sizes))
        got = runs(model, ids, mask)
        module.triton = None
        want = runs(model, ids, mask)
        apart = {
            name: float((got[name] - x).abs().max() / x.abs().max())
            for name, x in want.items()
        }
        answer[case] = {"apart": apart, "launched": sorted(set(launched))}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
