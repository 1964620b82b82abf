"""Rates of exported models in transformers: prompt, decode with and without cache.

The small models of `torch_export_parity.py`, untrained, since a rate does not depend
on what was learned. Each is exported and loaded by AutoModel in PYTHON, which has torch
and transformers. Times are the process' own on one thread, so that other work on the
machine does not count. Expect more from the cache the longer the text is, and most from
our side for the prompts that are read position by position: those of the Recurrent and
the Latent Recurrent Transformer.

    python -m experiments.torch_export_rates --torch-python PYTHON
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.torch_export_parity import FOLDER, MODELS, STACKS
from recurjax.bench.torch_peer import answer_of
from recurjax.convert.imported_run import new_experiment
from recurjax.convert.torch import to_torch
from recurjax.data.tokenizers import ByteTokenizer
from recurjax.machine import host
from recurjax.model import Decoder, count_parameters
from recurjax.run_table import load_experiment
from recurjax.training.run import LoadedRun
from recurjax.types import Tokens
from recurjax.variants.transformer import TransformerConfig


def untrained(name: str, out: Path) -> LoadedRun:
    """Returns a small model with the weights that training would start from."""
    config = load_experiment(FOLDER / MODELS[name]).model
    if (make := STACKS.get(name)) is not None:
        assert isinstance(config.stack, TransformerConfig)
        config = dataclasses.replace(config, stack=make(config.stack))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokenizer = ByteTokenizer(bos=config.vocabulary > 256)
    return LoadedRun(new_experiment(out, config, length=1024), model, tokenizer, 0)


def prompt_seconds(model: Decoder, length: int) -> float:
    """Returns what this process takes for a prompt, the least of three times."""
    run = jax.jit(lambda model, ids: model(Tokens(ids), model.init_cache(1, 0))[0])
    ids, times = jnp.zeros((1, length), jnp.int32), []
    jax.block_until_ready(run(model, ids))
    for _ in range(3):
        began = time.process_time()
        jax.block_until_ready(run(model, ids))
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    """Exports, measures, prints a table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read")
    parser.add_argument("--start", type=int, default=64, help="tokens to go on from")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    script = Path(__file__).with_name("torch_export_rates_torch.py")
    print(
        f"| model | parameters | {options.prompt} tokens, here, ms | exported | ratio "
        "| with the cache, tokens/s | without | ratio |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / name
            run = untrained(name, out)
            to_torch(run, out, check=False)
            question = {"directory": str(out), **vars(options)}
            environment = {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
            rates = answer_of(
                options.torch_python,
                script,
                stdin=json.dumps(question),
                environment=environment,
            )
        here, there = prompt_seconds(run.model, options.prompt), rates["prompt"]
        cached, plain = rates["cached"], rates["plain"]
        cells = [
            *(name, f"{count_parameters(run.model.config).total:,}"),
            *(f"{1e3 * here:.0f}", f"{1e3 * there:.0f}", f"{there / here:.2f}"),
            *(f"{cached:.1f}", f"{plain:.1f}", f"{cached / plain:.1f}"),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    host.prepare()
    main()
