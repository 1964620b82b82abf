"""The paper's norm ablation at 150M: the persistent pair from z instead of norm(z).

k_i = qknorm(W_k z_i), v_i = W_v z_i, at batch 512; all else as in
`c4_150m_recurrent_12`, whose loss is 3.046. Expect a clearly higher one. The rate is
the paper's best for it, 1e-3: higher ones destabilise it. Source: appendix "RMSNorm
Ablation", which does not say how many layers; 12 is this file's choice.
"""

import dataclasses

from c4 import experiment, recurrent

from recurjax.experiment import Experiment


def config() -> Experiment:
    """Returns the experiment."""
    stack = dataclasses.replace(
        recurrent(layers=12, width=1024), normed_persistent=False
    )
    return experiment("rt_c4_150m_unnormed", stack, steps=12_500, rate=1e-3)
