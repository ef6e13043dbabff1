"""Names of mesh axes, and which axes each getter needs, as one table."""

from dataclasses import dataclass
from enum import StrEnum

from ._errors import LayoutError, join_words


class MeshAxisName(StrEnum):
    """Names under which world meshes and expert-parallel meshes have their axes.

    Members are strings, so they index meshes as the plain names do.
    """

    pp = "pp"
    dp = "dp"
    dp_replicate = "dp_replicate"
    dp_shard = "dp_shard"
    dp_ep = "dp_ep"
    dp_cp = "dp_cp"
    ep = "ep"
    ep_replicate = "ep_replicate"
    ep_shard = "ep_shard"
    tp = "tp"
    cp = "cp"


# Those of a world mesh, outermost first.
AXES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Row:
    """One way to answer a getter.

    Each of ``folds`` becomes one axis of the answer: its first name must be among the axes present,
    the others join it if they are. ``built`` names the same axes where every fold has its groups.
    """

    folds: tuple[tuple[str, ...], ...]
    built: tuple[str, ...]

    def parts(self, present: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Return the axes that each fold consists of, in the order in which they are present."""
        return tuple(tuple(name for name in present if name in fold) for fold in self.folds)

    def fits(self, present: tuple[str, ...]) -> bool:
        """Return whether every axis that the row needs is present."""
        return {fold[0] for fold in self.folds} <= set(present)


# Ranks of cp hold the same parameters and see parts of the same samples: they join the sharding of
# parameters, never the data. Ranks of ep see other samples: they join both.
_SHARD = ("dp_shard", "ep", "cp")
_EXPERTS = ("ep_replicate", "ep_shard")
ROWS = {
    "get_dp_model_mesh": (
        Row((("dp_replicate",), _SHARD), ("replicate", "fsdp")),
        Row((("dp", "ep", "cp"),), ("fsdp",)),
        Row((_SHARD,), ("fsdp",)),
        Row((_EXPERTS,), ("dp",)),
    ),
    "get_dp_mesh": (
        Row((("dp", "ep"),), ("dp",)),
        Row((("dp_replicate", "dp_shard", "ep"),), ("dp",)),
        Row((("dp_shard", "ep"),), ("dp",)),
        Row((_EXPERTS,), ("dp",)),
    ),
    "get_dp_shard_mesh": (Row((_SHARD,), ("fsdp",)),),
    "get_dp_replicate_mesh": (Row((("dp_replicate",),), ("replicate",)),),
    "get_ep_mesh": (Row((("ep",),), ("ep",)), Row((("ep_shard",),), ("ep",))),
    "get_tp_mesh": (Row((("tp",),), ("tp",)),),
    "get_cp_mesh": (Row((("cp",),), ("cp",)),),
    "get_pp_mesh": (Row((("pp",),), ("pp",)),),
    "get_pp_stage_mesh": (Row((("pp",),), ("pp",)),),  # of which it takes all other axes
}


def choose_row(getter: str, present: tuple[str, ...]) -> Row:
    """Return the first row of a getter whose axes are present; raise `LayoutError` without one."""
    for row in ROWS[getter]:
        if row.fits(present):
            return row
    needs = join_words(" and ".join(fold[0] for fold in row.folds) for row in ROWS[getter])
    raise LayoutError(f"{getter} needs {needs}; this mesh has {join_words(present, 'and')}")
