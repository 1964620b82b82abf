"""Times `generate` of one export; `torch_export_rates.py` calls it."""

import json
import sys
import time
from collections.abc import Callable

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Answers a question as JSON on the last line of standard output."""
    question = json.loads(sys.stdin.read())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        question["directory"], trust_remote_code=True
    ).eval()
    ids = torch.randint(0, 256, (1, question["start"]))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)

    def generate(count: int, cached: bool) -> None:
        model.generate(ids, max_new_tokens=count, use_cache=cached, **options)

    count = question["new_tokens"]
    prompt = torch.randint(0, 256, (1, question["prompt"]))
    with torch.no_grad():
        answer = {
            "prompt": seconds(lambda: model(prompt, use_cache=False), 3),
            "cached": count / seconds(lambda: generate(count, True), 3),
            "plain": count / seconds(lambda: generate(count, False), 1),
        }
    print(json.dumps(answer))


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the least that a call takes of this process, after a first one."""
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
