"""How the op lies on a mesh: rows and channels are cut.

b and c are shared by the channels, a, skip and dt_bias by the rows: devices that share
an array each make a part of its gradient, and the frame sums the parts.
"""

from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut
from pallas_kernels.dispatch import Specs
from pallas_kernels.mesh_cut import Cut


def find_cut(u, *others) -> Cut | None:
    """Returns how the call is cut on the mesh that is set; None: it is not."""
    del others
    B, _, I = u.shape
    return mesh_cut.find_cut(B, lambda devices: I % devices == 0)


def specs(cut: Cut, u, dt, a, b, c, skip, z, dt_bias, initial, starts) -> Specs:
    """Returns how arrays and results lie on the mesh."""
    del u, dt, a, b, c, initial
    rows, channels = cut.by_row, cut.columns
    wide, by_row, by_channel = P(rows, None, channels), P(rows), P(channels)
    state = P(rows, channels)
    return Specs(
        arrays=(
            *(wide, wide, by_channel, by_row, by_row),
            None if skip is None else by_channel,
            None if z is None else wide,
            None if dt_bias is None else by_channel,
            state,
            None if starts is None else by_row,
        ),
        # Kept states lie as the loops read them: [B, chunks, N, I].
        results=(wide, state, P(rows, None, None, channels)),
    )
