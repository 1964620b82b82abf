"""Runs a Hugging Face model as transformers does; recurjax compares itself with it.

python hf_reference.py --directory DIR --ids ids.npy --out result.npz
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    """Writes logits, hidden states and greedy tokens for ids [B, T] of a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--directory", required=True, help="a folder or a .gguf file")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--texts", default="[]", help="a JSON list to tokenize")
    options = parser.parse_args()
    path, special = Path(options.directory), {}  # type: Path, Dict[str, str]
    # transformers opens a GGUF file as a file of its folder.
    if path.suffix == ".gguf":
        path, special = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        # "eager" is the plain formula: a fused attention would differ by rounding.
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        **special,
    ).eval()
    ids = torch.from_numpy(np.load(options.ids)).long()
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
        logits = output.logits
        # The first step reads the full prompt, each later one its newest token.
        cache, tokens, token = None, [], ids
        for _ in range(options.new_tokens):
            step = model(token, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            token = step.logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens.append(token)
    texts, encoded = json.loads(options.texts), {}
    if texts:
        read = transformers.AutoTokenizer.from_pretrained(path, **special)
        encoded = {
            f"text_{n}": np.array(read(text)["input_ids"], np.int64)
            for n, text in enumerate(texts)
        }
    np.savez(
        options.out,
        **encoded,
        logits=logits.numpy(),
        states=torch.stack(output.hidden_states).numpy(),
        greedy=torch.cat(tokens, dim=1).numpy(),
        version=f"{torch.__version__}, transformers {transformers.__version__}",
    )


if __name__ == "__main__":
    main()
