"""The longest prompt that a base reads at once on an H100, by replaced heads.

The column l_m of table 2, of a card of 80 GB: Llama2-7B 71,680 tokens and 91,800 with
90 % of the heads replaced, Qwen2-7B 122,880 and 132,000, Qwen2-0.5B 133,120 and 137,216
with 50 %. Here the compiler reports the memory of one row's prefill, with weights and
cache in bfloat16 (`recurjax plan --program prefill --rows 1`). Memory is almost linear
in the length, so two lengths give a third to try, in steps of 1,024. Needs `make
compilers` and some minutes per model.

    python experiments/recurformer/longest_prompt.py
    python experiments/recurformer/longest_prompt.py --models qwen2_7b --betas 00 90
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from recurjax.cli.options import parse, run_script
from recurjax.errors import UserError
from recurjax.experiment import Experiment
from recurjax.machine import host
from recurjax.plan.planning import Plan, make_plan
from recurjax.plan.topology import parse_topology
from recurjax.run_table import load_experiment

TABLE = Path(__file__).with_name("runs.py")
STEP = 1024
TRIED = (32 * STEP, 64 * STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Prints the longest prompt that fits, for each share of replaced heads.

    Attributes:
      models: models of the table's rows.
      betas: shares of heads, in percent, as the table's rows are named.
      topology: one device.
    """

    models: tuple[str, ...] = ("llama2_7b", "qwen2_7b", "qwen2_0_5b")
    betas: tuple[str, ...] = ("00", "25", "50", "75", "90", "100")
    topology: str = "h100"


def longest(experiment: Experiment, topology: str) -> Plan:
    """Returns the plan of the longest prompt that fits, in steps of `STEP`.

    Raises:
      UserError: not even the shortest one tried fits.
    """
    device = parse_topology(topology)

    def plan(length: int) -> Plan:
        return make_plan(experiment, device, "prefill", rows=1, length=length)

    short, long = (plan(length) for length in TRIED)
    capacity = device.hardware.memory
    if not short.fits or short.needed is None or long.needed is None:
        raise UserError(
            f"{experiment.name}: {TRIED[0]} tokens do not fit: {short.reason}"
        )
    assert capacity is not None
    each = (long.needed - short.needed) / (TRIED[1] - TRIED[0])
    length = int(TRIED[0] + (capacity - short.needed) / each) // STEP * STEP
    answer = plan(length)
    # Memory is only nearly linear in the length: step to the last length that fits.
    while answer.fits and (more := plan(length + STEP)).fits:
        answer, length = more, length + STEP
    while not answer.fits:
        length -= STEP
        answer = plan(length)
    return answer


def main(argv: list[str] | None = None) -> int:
    """Plans and prints the table."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(Options, argv, prog="longest_prompt.py")
    print("| model | beta | tokens | GiB | of them cache | activations |")
    print("|---|---|---|---|---|---|")
    for model, beta in product(options.models, options.betas):
        name = f"{TABLE}:{model}_hash_hop_beta_{beta}"
        plan = longest(load_experiment(name), options.topology)
        memory = plan.answer["memory"]
        parts = (plan.needed, memory["caches"], memory["temporaries"])
        cells = " | ".join(f"{(part or 0) / 2**30:.1f}" for part in parts)
        share, tokens = int(beta) / 100, plan.answer["tokens"]
        print(f"| {model} | {share:g} | {tokens:,} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    host.prepare()
    run_script(main)
