"""Times a PyTorch module: what `torch_peer.ask` runs in torch's interpreter.

    python torch_side.py SCRIPT QUESTION

That interpreter has torch and numpy and nothing of recurjax, so this file imports none
of it. SCRIPT has `peer(arrays, heads)`, which returns a module, its input, our output,
the loss of a backward pass (None: it is not timed), and by name what else is (a step of
decoding).
"""

import json
import runpy
import sys
import time
from collections.abc import Callable

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

FEWEST_STEPS = 20
"""How often a single step is timed at least: it is over too soon for fewer."""


def main() -> None:
    """Reads a question as JSON and answers it on the last line of standard output."""
    script, question = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(question["threads"])
    arrays = {
        name: torch.from_numpy(array)
        for name, array in np.load(question["arrays"]).items()
    }
    peer = runpy.run_path(script)["peer"]
    module, x, ours, loss, steps = peer(arrays, question["heads"])
    repeats = question["repeats"]

    def forward_backward() -> None:
        module.zero_grad()
        x.grad = None
        loss(module(x)).backward()

    with torch.no_grad():
        answer = {"difference": (module(x) - ours).abs().max().item()}
        answer["forward"] = fastest(lambda: module(x), repeats)
        for name, step in steps.items():
            answer[name] = fastest(step, max(repeats, FEWEST_STEPS))
    if loss is not None:
        x.requires_grad_()
        answer["forward_backward"] = fastest(forward_backward, repeats)
    print(json.dumps(answer))


def fastest(call: Callable[[], object], repeats: int, warmup: int = 5) -> float:
    """Returns the milliseconds of the fastest call."""
    times = []
    for number in range(warmup + repeats):
        began = time.perf_counter()
        call()
        if number >= warmup:
            times.append(time.perf_counter() - began)
    return 1e3 * min(times)


if __name__ == "__main__":
    main()
