"""How the op lies on a mesh: rows and heads are cut.

Where fewer groups of queries than heads are given, head h reads group h mod N: heads
are cut into parts of whole rounds of the groups, and each device holds all groups.
"""

from jax.sharding import PartitionSpec as P

from pallas_kernels import mesh_cut
from pallas_kernels.chunk_attention.arrays import ChunkEnds
from pallas_kernels.dispatch import Specs
from pallas_kernels.mesh_cut import Cut


def find_cut(q, own_logits, own_values, ends, first, documents) -> Cut | None:
    """Returns how the call is cut on the mesh that is set; None: it is not."""
    del own_values, ends, first, documents
    groups, heads = q.shape[2], own_logits.shape[2]

    def divide(devices: int) -> bool:
        part, rest = divmod(heads, devices)
        return rest == 0 and (groups == heads or part % groups == 0)

    return mesh_cut.find_cut(q.shape[0], divide)


def specs(cut: Cut, q, own_logits, own_values, ends, first, documents) -> Specs:
    """Returns how arrays and results lie on the mesh."""
    del own_values
    by_row, heads = P(cut.by_row), P(cut.by_row, None, cut.columns)
    # Keys, values and the log-sum-exp have heads before positions.
    heads_first = P(cut.by_row, cut.columns)
    known = None if ends.documents is None else by_row
    return Specs(
        arrays=(
            heads if q.shape[2] == own_logits.shape[2] else by_row,
            heads,
            heads,
            ChunkEnds(heads_first, heads_first, known),  # pyright: ignore[reportArgumentType]
            None if first is None else by_row,
            None if documents is None else by_row,
        ),
        results=(heads, heads_first),
    )
