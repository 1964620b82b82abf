"""nanochat's model and training step, from a checkout; `torch_nanochat.py` calls it.

Reads the sizes as JSON from standard input, and prints milliseconds by pass and the
number of parameters as the last line. The checkout is on the module path; "timing" is
the file that has `fastest`, `recurjax/bench/torch_side.py`.
"""

import contextlib
import json
import runpy
import sys

import torch  # pyright: ignore[reportMissingImports]

with contextlib.redirect_stdout(sys.stderr):  # It greets whoever imports it.
    from nanochat.gpt import (  # pyright: ignore[reportMissingImports]
        GPT,
        GPTConfig,
    )


def main() -> None:
    """Answers one question."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    fastest = runpy.run_path(request["timing"])["fastest"]
    repeats, warmup = request["repeats"], 2
    with contextlib.redirect_stdout(sys.stderr):
        model = GPT(
            GPTConfig(
                sequence_len=request["length"],
                vocab_size=request["vocabulary"],
                n_layer=request["layers"],
                n_head=request["heads"],
                n_kv_head=request["heads"],
                n_embd=request["width"],
            )
        )
        model.init_weights()
        optimizer = model.setup_optimizer()
    compiled = model if request["eager"] else torch.compile(model, dynamic=False)
    shape = (request["batch"], request["length"] + 1)
    ids = torch.randint(request["vocabulary"], shape)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward_backward() -> None:
        compiled(inputs, targets).backward()
        model.zero_grad(set_to_none=True)

    def train_step() -> None:
        compiled(inputs, targets).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    answer = {
        "forward_backward": fastest(forward_backward, repeats, warmup),
        "train_step": fastest(train_step, repeats, warmup),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
