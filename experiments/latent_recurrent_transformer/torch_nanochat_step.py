"""nanochat's model and training step, from a checkout; `torch_nanochat.py` calls it.

Reads the sizes as JSON from standard input, and prints milliseconds by pass and the
number of parameters as the last line. The checkout is on the module path.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable

import torch  # pyright: ignore[reportMissingImports]

with contextlib.redirect_stdout(sys.stderr):  # It greets whoever imports it.
    from nanochat.gpt import (  # pyright: ignore[reportMissingImports]
        GPT,
        GPTConfig,
    )


def main() -> None:
    """Answers one question."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(
            GPTConfig(
                sequence_len=asked["length"],
                vocab_size=asked["vocabulary"],
                n_layer=asked["layers"],
                n_head=asked["heads"],
                n_kv_head=asked["heads"],
                n_embd=asked["width"],
            )
        )
        model.init_weights()
        optimizer = model.setup_optimizer()
    compiled = model if asked["eager"] else torch.compile(model, dynamic=False)
    shape = (asked["batch"], asked["length"] + 1)
    ids = torch.randint(asked["vocabulary"], shape)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward_backward() -> None:
        compiled(inputs, targets).backward()
        model.zero_grad(set_to_none=True)

    def train_step() -> None:
        compiled(inputs, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    answer = {
        "forward_backward": fastest(forward_backward, asked["repeats"]),
        "train_step": fastest(train_step, asked["repeats"]),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    print(json.dumps(answer))


def fastest(call: Callable[[], object], repeats: int, warmup: int = 2) -> float:
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
