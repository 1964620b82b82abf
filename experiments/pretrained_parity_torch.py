"""The side of transformers that `pretrained_parity.py` calls."""

import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Answers a question as JSON on the last line of standard output."""
    question = json.loads(sys.stdin.read())
    path = Path(question["path"])
    place, options = path, {}
    if path.is_file():
        place, options = path.parent, {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    tokenizer.save_pretrained(question["out"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    count, length = question["rows"], question["length"]
    ids = tokenizer(question["text"], add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: count * length]).reshape(count, length)
    size = sum(len(tokenizer.decode(row.tolist()).encode()) for row in rows)
    start = tokenizer.bos_token_id
    rows = torch.cat([torch.full((count, 1), 1 if start is None else start), rows], 1)
    nats = 0.0
    with torch.no_grad():
        for row in rows:
            logits = model(row[None]).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
            nats += loss.item()
    print(json.dumps({"nats": nats, "bytes": size, "rows": rows.tolist()}))


if __name__ == "__main__":
    main()
