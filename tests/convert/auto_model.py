"""Loads exports by transformers' AutoModel and measures them; run by its interpreter.

python auto_model.py OUT DIRECTORY...

OUT/NAME.npz has the tokens of `generate`; OUT/answers.json one entry a directory. Each
model that `save_pretrained` wrote is OUT/NAME.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTHS = (3, 9, 1, 12, 7, 5, 11, 2)
WIDTH = 14
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def load(directory, **options):
    return AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, **options
    ).eval()


def share(one, other):
    return float((one - other).abs().max() / other.abs().max())


def prompts():
    draw = np.random.default_rng(1).integers
    return [torch.from_numpy(draw(256, size=(1, length))) for length in LENGTHS]


def padded(rows, side):
    """Returns ids [8, WIDTH] with pads at a side or among the tokens, and the mask."""
    ids, mask = torch.full((2, len(rows), WIDTH), 3).unbind()
    mask = torch.zeros_like(ids)
    rng = np.random.default_rng(2)
    for number, row in enumerate(rows):
        size = row.shape[1]
        places = {
            "left": np.arange(WIDTH - size, WIDTH),
            "right": np.arange(size),
            "middle": np.sort(rng.permutation(WIDTH)[:size]),
        }[side]
        ids[number, places], mask[number, places] = row[0], 1
    return ids, mask


@torch.no_grad()
def ragged(model, side):
    """Returns how far padded rows are from single ones, also in two calls."""
    rows = prompts()
    ids, mask = padded(rows, side)
    whole = model(ids, attention_mask=mask).logits
    first = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
    second = model(
        ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values
    )
    cut = torch.cat([first.logits, second.logits], dim=1)
    differences = []
    for row, at, *batches in zip(rows, mask.bool(), whole, cut, strict=True):
        alone = model(row).logits[0]
        differences += [share(batch[at], alone) for batch in batches]
    return max(differences)


@torch.no_grad()
def ragged_generation(model, side):
    """Whether a padded batch is continued as its rows are."""
    rows = prompts()
    ids, mask = padded(rows, side)
    options = {"max_new_tokens": 8, **GREEDY}
    batch = model.generate(ids, attention_mask=mask, **options)[:, WIDTH:]
    alone = [
        model.generate(row, attention_mask=torch.ones_like(row), **options)
        for row in rows
    ]
    return all(
        torch.equal(one, row[0, -8:]) for one, row in zip(batch, alone, strict=True)
    )


@torch.no_grad()
def further(model):
    """Whether generation goes on alike from one call, chunks, and a used cache."""
    ids = prompts()[3]
    options = {"max_new_tokens": 8, "attention_mask": torch.ones_like(ids), **GREEDY}
    want = model.generate(ids, **options)
    chunks = model.generate(ids, prefill_chunk_size=5, **options)
    cache = model(ids[:, :7], use_cache=True).past_key_values
    warm = [
        model.generate(ids, past_key_values=copy.deepcopy(cache), **options)
        for _ in range(2)
    ]
    plain = model.generate(ids, use_cache=False, **options)
    return [torch.equal(made, want) for made in (chunks, *warm, plain)]


@torch.no_grad()
def beams(model):
    """Whether beams with the cache are those without."""
    ids, mask = padded(prompts()[:2], "left")
    options = {"max_new_tokens": 6, "num_beams": 3, "attention_mask": mask, **GREEDY}
    return torch.equal(
        model.generate(ids, **options),
        model.generate(ids, use_cache=False, **options),
    )


def loss(model):
    """Returns how far the loss of labels is from the cross-entropy of next tokens."""
    ids, mask = padded(prompts(), "right")
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        output = model(ids, attention_mask=mask, labels=labels)
        logits = model(ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
    want = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    return abs(float(output.loss - want))


def gradients(model):
    """Returns how far gradients with checkpointing are from those without."""
    ids, mask = padded(prompts(), "left")
    labels = ids.masked_fill(mask == 0, -100)
    model.train()
    norms = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        output = model(ids, attention_mask=mask, labels=labels)
        assert output.past_key_values is None
        output.loss.backward()
        grads = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack(grads))
        model.zero_grad()
    model.gradient_checkpointing_disable()
    model.eval()
    return share(norms[1], norms[0])


def saved(model, out):
    """Whether what `save_pretrained` writes loads bit for bit."""
    model.save_pretrained(out)
    again = load(out).state_dict()
    return all(torch.equal(again[name], w) for name, w in model.state_dict().items())


def half(directory):
    """Returns the dtypes of a bfloat16 model's weights, logits and tokens."""
    model = load(directory, dtype=torch.bfloat16)
    ids, mask = padded(prompts(), "left")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, **GREEDY)
    finite = bool(logits.isfinite().all())
    return str(model.dtype), str(logits.dtype), finite, list(tokens.shape)


@torch.no_grad()
def compiled(model):
    """Returns the graphs of a decode step without breaks, and how far it is off."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend=count)
    ids = prompts()[3]
    cache, differences = model.new_cache(capacity=32), []
    model(ids[:, :4], past_key_values=cache)
    want = model(ids).logits
    for t in range(4, ids.shape[1]):
        logits = step(ids[:, t : t + 1], past_key_values=cache).logits
        differences.append(share(logits, want[:, t : t + 1]))
    return len(graphs), max(differences)


def refusals(model):
    """Returns the sentences with which unsupported requests are refused."""
    ids = prompts()[0]
    x = model.get_input_embeddings()(ids)
    cache = model(ids, use_cache=True).past_key_values
    other = transformers.DynamicCache()
    calls = {
        "inputs_embeds": lambda: model(inputs_embeds=x),
        "generate_embeds": lambda: model.generate(inputs_embeds=x, max_new_tokens=1),
        "position_ids": lambda: model(ids, position_ids=torch.zeros_like(ids)),
        "mask": lambda: model(ids, attention_mask=torch.ones(1, 1, 3, 3)),
        "cache": lambda: model(ids, past_key_values=other),
        "static": lambda: model.generate(
            ids, cache_implementation="static", max_new_tokens=1
        ),
        "assistant": lambda: model.generate(
            ids, assistant_model=model, max_new_tokens=2, **GREEDY
        ),
        "crop": lambda: cache.crop(1),
        "resize": lambda: model.resize_token_embeddings(300),
    }
    sentences = {}
    for name, call in calls.items():
        try:
            call()
            sentences[name] = ""
        except (ValueError, NotImplementedError) as error:
            sentences[name] = str(error)
    return sentences


def lora(directory):
    """Returns the losses around a step of LoRA on all linear maps; None: no peft."""
    try:
        import peft
    except ImportError:
        return None
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    model = peft.get_peft_model(load(directory), config)
    ids, mask = padded(prompts(), "left")
    batch = {"input_ids": ids, "attention_mask": mask}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss))
    return losses


def text(directory):
    """Returns what the tokenizer of the directory makes of a batch of texts."""
    read = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    batch = [read(line) for line in ("héllo\n", "a  b")]
    return [dict(line) for line in batch], read.decode(batch[0]["input_ids"])


def main():
    torch.set_num_threads(1)
    out, answers = Path(sys.argv[1]), {"version": transformers.__version__}
    for directory in map(Path, sys.argv[2:]):
        model = load(directory)
        ids = torch.from_numpy(np.load(directory / "ids.npy")).long()
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, **GREEDY
        )
        np.savez(out / f"{directory.name}.npz", tokens=tokens[:, ids.shape[1] :])
        sides = ("left", "right", "middle")
        answers[directory.name] = {
            "ragged": {side: ragged(model, side) for side in sides},
            "generation": {side: ragged_generation(model, side) for side in sides},
            "further": further(model),
            "beams": beams(model),
            "loss": loss(model),
            "gradients": gradients(model),
            "saved": saved(model, out / directory.name),
            "half": half(directory),
            "compiled": compiled(model),
            "refusals": refusals(model),
            "lora": lora(directory),
            "text": text(directory),
        }
        print(directory.name, json.dumps(answers[directory.name]), flush=True)
    (out / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
