"""The side of transformers that `pretrained_smollm2.py` calls."""

import json
import sys
import time
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def request():
    """Reads a question as JSON and the model of the file that it names."""
    question = json.loads(sys.stdin.read())
    path = Path(question["gguf"])
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return question, model.eval()


def main() -> None:
    """Answers a question as JSON on the last line of standard output."""
    question, model = request()
    paragraph = torch.tensor([question["paragraph"]])
    with torch.no_grad():
        nats = model(paragraph, labels=paragraph).loss.item()
        tokens = [
            greedy(model, torch.tensor([prompt]), question["new_tokens"])[0]
            for prompt in question["prompts"]
        ]
        rates = {}
        for dtype in (torch.float32, torch.bfloat16):
            model, name = model.to(dtype), str(dtype).removeprefix("torch.")
            for rows in question["rows"]:
                ids = paragraph[:, :32].repeat(rows, 1)
                greedy(model, ids, 4)
                rates[f"decode_{name}" + (f"_{rows}_rows" if rows > 1 else "")] = (
                    sorted(
                        rows * greedy(model, ids, question["decoded"] + 1)[1]
                        for _ in range(3)
                    )
                )
    answer = {"loss": nats, "tokens": tokens, **rates}
    answer["version"] = f"torch {torch.__version__}, {transformers.__version__}"
    print(json.dumps(answer))


def greedy(model, ids, count: int) -> tuple[list[int], float]:
    """Returns the new tokens, and tokens per second after the first."""
    cache, token, tokens, began = None, ids, [], 0.0
    for number in range(count):
        step = model(token, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        token = step.logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(token[0].item())
        if number == 0:
            began = time.monotonic()
    return tokens, (count - 1) / max(time.monotonic() - began, 1e-9)


if __name__ == "__main__":
    main()
