"""Mamba, a selective state space model: its projections, convolution and scan."""

import torch
import torch.nn.functional as F
from layers import Config, State, Tokens, wide
from selective_scan import SKIPPED, selective_scan
from torch import Tensor, nn


class Mamba(nn.Module):
    """u, z = x W_u, x W_z; u = silu(conv(u)); out = (scan(u) silu(z)) W_back."""

    def __init__(self, config: Config, width: int):
        super().__init__()
        channels = config["expand"] * width
        self.rank, self.size = config["dt_rank"], config["state"]
        self.u = nn.Linear(width, channels, bias=False)
        self.z = nn.Linear(width, channels, bias=False)
        # Depthwise: each channel has taps of its own, the oldest first, and a bias.
        self.conv = nn.Linear(config["conv"], channels)
        self.x = nn.Linear(channels, self.rank + 2 * self.size, bias=False)
        self.dt = nn.Linear(self.rank, channels)
        self.a_log = nn.Parameter(torch.zeros(channels * self.size))
        self.skip = nn.Parameter(torch.ones(channels))
        self.back = nn.Linear(channels, width, bias=False)

    def forward(self, x: Tensor, tokens: Tokens, state: State) -> Tensor:
        u, dtype = F.silu(self.convolved(self.u(x), tokens, state)), wide(x.dtype)
        dt, b, c = self.x(u).split([self.rank, self.size, self.size], dim=-1)
        dt = tokens.only_real(self.dt(dt).to(dtype), SKIPPED)
        # A is stored as the logarithm of its negative, so that it stays negative.
        a = -self.a_log.to(dtype).exp().reshape(-1, self.size)
        h = state.get("h", dt.new_zeros(len(x), *a.shape))
        y, state["h"] = selective_scan(u, dt, a, b, c, self.skip, self.z(x), h)
        return self.back(y)

    def convolved(self, u: Tensor, tokens: Tokens, state: State) -> Tensor:
        """Adds up bias and taps of the last inputs by channel; zeros before the row."""
        taps, T = self.conv.weight.T, u.shape[1]
        n = len(taps)
        # The last n inputs of each channel, zeros before the first.
        past = state.get("conv", u.new_zeros(u.shape[0], n, u.shape[2]))
        row = torch.cat([past, u], dim=1)
        y = self.conv.bias
        for number, tap in enumerate(taps):
            y = y + tap * row[:, number + 1 : number + 1 + T]
        # The n inputs that end with each row's last token.
        count = (tokens.end - tokens.start)[:, None, None]
        last = (count + torch.arange(n, device=u.device)[:, None]).expand_as(past)
        state["conv"] = row.gather(1, last)
        return y
