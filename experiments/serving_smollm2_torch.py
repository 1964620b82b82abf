"""Batches of SmolLM2 by transformers' `generate`; `serving_smollm2.py` calls it."""

import json
import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from pretrained_smollm2_torch import request


def main() -> None:
    """Answers a question as JSON on the last line of standard output."""
    question, model = request()
    prompts, rows = question["prompts"], question["rows"]
    batches = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
    padded = [left_padded(batch) for batch in batches]
    seconds = []
    for number in range(question["repeats"] + 1):
        began = time.perf_counter()
        for ids, mask in padded:
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=question["new_tokens"],
                min_new_tokens=question["new_tokens"],
                pad_token_id=0,
            )
        if number:  # the first warms up
            seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "version": transformers.__version__}))


def left_padded(batch: list[list[int]]):
    """Returns ids and mask [B, T] of rows that end together."""
    width = max(len(row) for row in batch)
    ids = [[0] * (width - len(row)) + row for row in batch]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in batch]
    return torch.tensor(ids), torch.tensor(mask)


if __name__ == "__main__":
    main()
