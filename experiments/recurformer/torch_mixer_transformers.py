"""transformers' Mamba mixer with our weights; `torch_mixer.py` says what for."""

import torch  # pyright: ignore[reportMissingImports]
from transformers.models.mamba.configuration_mamba import (  # pyright: ignore[reportMissingImports]
    MambaConfig,
)
from transformers.models.mamba.modeling_mamba import (  # pyright: ignore[reportMissingImports]
    MambaMixer,
)

LONGEST_BACKWARD = 256
"""Positions: each one's gradient fills arrays of all, minutes a call at 2,048."""


def peer(arrays: dict, heads: int) -> tuple:
    """Returns what is timed, for `recurjax/bench/torch_side.py`; `heads` is unread."""
    x, y = arrays.pop("x"), arrays.pop("y")
    taps, channels = arrays["w_conv"].shape
    width = x.shape[-1]
    config = MambaConfig(
        hidden_size=width,
        state_size=arrays["a_log"].shape[1],
        conv_kernel=taps,
        expand=channels // width,
        time_step_rank=len(arrays["w_dt"]),
        use_conv_bias=True,
        use_bias=False,
    )
    mixer = MambaMixer(config, layer_idx=0)
    mixer.load_state_dict(
        {
            # PyTorch's Linear keeps [out, in]; the first half goes to the recurrence.
            "in_proj.weight": torch.cat([arrays["w_u"], arrays["w_z"]], dim=1).T,
            "conv1d.weight": arrays["w_conv"].T[:, None],
            "conv1d.bias": arrays["b_conv"],
            "x_proj.weight": arrays["w_x"].T,
            "dt_proj.weight": arrays["w_dt"].T,
            "dt_proj.bias": arrays["b_dt"],
            "A_log": arrays["a_log"],
            "D": arrays["skip"],
            "out_proj.weight": arrays["w_back"].T,
        }
    )
    loss = torch.sum if x.shape[1] <= LONGEST_BACKWARD else None
    return mixer, x, y, loss, {}
