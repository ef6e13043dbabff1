"""How a tensor lies along one mesh axis."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from ._errors import PlacementTypeError, ShardDimError

PartialOp = Literal["sum", "avg", "max", "min", "prod"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The coordinates of the axis hold consecutive chunks of tensor dim ``dim``.

    Lengths are those of ``torch.chunk``: all ``ceil(length / degree)`` except the last ones, which
    may be shorter or empty.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ShardDimError(f"Shard takes the number of a tensor dim, got {self.dim!r}")

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction with ``op`` of what the coordinates of the axis hold."""

    op: PartialOp = "sum"

    def __post_init__(self) -> None:
        if self.op not in get_args(PartialOp):
            raise PlacementTypeError(
                f"Partial({self.op!r}) is no reduction; use one of {', '.join(get_args(PartialOp))}"
            )

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial


def in_tuple(placements: object) -> tuple[Any, ...]:
    """Return a sequence of placements as a tuple; raises `PlacementTypeError` for what is none."""
    try:
        return tuple(cast(Any, placements))
    except TypeError:
        raise PlacementTypeError(
            f"placements are a sequence with one for each mesh axis, got {placements!r} alone; "
            "on a mesh of one axis write (Shard(0),)"
        ) from None
