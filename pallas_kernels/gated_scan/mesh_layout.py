"""How the op lies on a mesh: rows and channels are cut.

A stream narrower than the gate is tiled over the channels: where channels are cut, each
device holds it whole.
"""

from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut
from pallas_kernels.dispatch import Specs
from pallas_kernels.gated_scan.inputs import GateLogits
from pallas_kernels.gated_scan.queries import head_of
from pallas_kernels.mesh_cut import Cut


def find_cut(gate, values, initial, starts, lengths, queries) -> Cut | None:
    """Returns how the call is cut on the mesh that is set; None: it is not."""
    del initial, starts, lengths
    B, _, D = gate.shape
    widths = [v.shape[2] for v in values]
    head = head_of(queries) or 1

    def divide(devices: int) -> bool:
        part, rest = divmod(D, devices)
        whole = rest == 0 and part % head == 0
        return whole and all(W == D or part % W == 0 for W in widths)

    return mesh_cut.find_cut(B, divide)


def specs(cut: Cut, gate, values, initial, starts, lengths, queries) -> Specs:
    """Returns how arrays and results lie on the mesh."""
    del initial
    wide, by_row = P(cut.by_row, None, cut.columns), P(cut.by_row)
    streams, state = len(values), P(cut.by_row, cut.columns)
    of_gate = wide
    if isinstance(gate, GateLogits):
        of_bias = None if gate.bias is None else P(cut.columns)
        of_gate = GateLogits(wide, of_bias)  # pyright: ignore[reportArgumentType]
    of_values = [wide if v.shape[2] == gate.shape[2] else by_row for v in values]
    read = queries is not None
    return Specs(
        arrays=(
            of_gate,
            tuple(of_values),
            (state,) * streams,
            None if starts is None else by_row,
            None if lengths is None else by_row,
            of_values[-1] if read else None,  # Queries have the last stream's groups.
        ),
        results=(
            (wide,) * streams,
            (state,) * streams,
            wide if read else None,
            (wide,) * streams,
        ),
    )
