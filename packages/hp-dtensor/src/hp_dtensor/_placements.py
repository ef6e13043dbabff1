"""Placements: how one mesh axis replicates, splits or reduces a tensor."""

import sys
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, cast, get_args

from ._errors import LayoutError

PartialOp = Literal["sum", "avg", "max", "min", "prod"]
_PRODUCT: Any = "product"


# Each placement is equal to torch's placement with the same meaning and has the same hash (torch
# 2.11 to 2.13). The comparison does not import torch: if torch's module of placements is not
# loaded, the other object cannot be a torch placement.
def _as_torch(other: object, name: str) -> Any:
    """Return ``other`` if its class is torch's placement class ``name``, else None.

    The result is also None for a subclass.
    """
    module = sys.modules.get("torch.distributed.tensor.placement_types")
    return other if module is not None and type(other) is getattr(module, name, None) else None


class Placement:
    """Base class of all placements.

    A placement states how the ranks of one mesh axis replicate, split or reduce a tensor.
    """

    __slots__ = ()

    @property
    def split(self) -> tuple[int, int] | None:
        """Pair ``(tensor dim, split factor)`` of a `Shard` or `StridedShard`, otherwise None.

        The split factor is the number of blocks that the dim is first divided into. Each rank holds
        one chunk of every block. A `Shard` has the split factor 1.
        """
        return None

    @property
    def split_dims(self) -> tuple[int, ...]:
        """Tensor dims that the placement splits.

        One dim for a `Shard` or `StridedShard`, the flattened dims for a `RaggedShard`, and empty
        for other placements.
        """
        split = self.split
        return () if split is None else split[:1]


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Placement):
    """Placement: all ranks of the axis hold the same values.

    Attributes:
        split: None, because no tensor dim is split.
        split_dims: Empty tuple.

    Examples:
        >>> Layout((2,), (Replicate(),)).boxes((6,), rank=1)
        (((0, 6),),)
    """

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Replicate or _as_torch(other, "Replicate") is not None

    def __hash__(self) -> int:
        return -1

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Placement):
    """Placement: the ranks of the axis hold consecutive chunks of one tensor dim.

    Chunks have the lengths that ``torch.chunk`` gives: ``ceil(length / number of ranks)``. The last
    chunks can be shorter or empty.

    Args:
        dim: Tensor dim, counted from 0.

    Raises:
        LayoutError: ``dim`` is not an integer.

    Examples:
        >>> Layout((4,), (Shard(0),)).boxes((10,), rank=3)
        (((9, 10),),)
    """

    dim: int

    def __post_init__(self) -> None:
        check_dim(self.dim)

    @property
    def split(self) -> tuple[int, int]:
        """Pair ``(tensor dim, 1)``: a `Shard` has the split factor 1."""
        return self.dim, 1

    def __eq__(self, other: object) -> bool:
        if other.__class__ is Shard:
            return self.dim == other.dim
        return (theirs := _as_torch(other, "Shard")) is not None and bool(self.dim == theirs.dim)

    def __hash__(self) -> int:
        return hash(self.dim)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, eq=False)
class StridedShard(Placement):
    """Placement: a dim is split into blocks, and each rank holds one chunk of every block.

    Blocks and chunks have the lengths that ``torch.chunk`` gives.

    In torch, FSDP combined with tensor parallelism (TP) uses this placement on the FSDP axis. The
    TP axis splits the dim first, although it is later in the mesh. ``split_factor`` is then the
    number of TP ranks. If several later axes split the dim first, ``split_factor`` is the product
    of their numbers of ranks.

    `Layout` recognizes such a factor if no ``shard_order`` is given for the dim. It then stores a
    `Shard`, and a ``shard_order`` that lists the TP axis before the FSDP axis.

    Args:
        dim: Tensor dim, counted from 0.
        split_factor: Number of blocks.

    Raises:
        LayoutError: ``dim`` is not an integer, or ``split_factor`` is not an integer of at least 1.

    Examples:
        >>> Layout((2,), (StridedShard(0, 2),)).boxes((8,), rank=0)
        (((0, 2),), ((4, 6),))
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        check_dim(self.dim)
        factor: object = self.split_factor
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise LayoutError(
                f"StridedShard splits a dim into split_factor blocks, a number of 1 or more, got "
                f"{factor!r}"
            )

    @property
    def split(self) -> tuple[int, int]:
        """Pair ``(tensor dim, split factor)``."""
        return self.dim, self.split_factor

    def __eq__(self, other: object) -> bool:
        found = other if other.__class__ is StridedShard else _as_torch(other, "_StridedShard")
        if found is None:
            return False
        mine = self.dim, self.split_factor
        return mine == (cast(StridedShard, found).dim, cast(StridedShard, found).split_factor)

    def __hash__(self) -> int:
        return hash((self.dim, self.split_factor))

    def __str__(self) -> str:
        return f"S({self.dim}, {self.split_factor} blocks)"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """Placement: leading dims are flattened, and each rank holds a slice of any length.

    The leading dims are flattened in row-major order to one dim. The rank with coordinate ``i`` on
    the axis holds ``sizes[i]`` indices of this dim, from index ``sum(sizes[:i])`` on. Later dims
    keep their lengths, so the local tensor has the shape ``[sizes[i], ...]``. For example,
    ``RaggedShard((0,), (1, 5))`` gives rank 0 the first row of a matrix, and rank 1 the next 5
    rows.

    Other mesh axes may shard the leading dims too, if they split the dims evenly. The `RaggedShard`
    then splits each of their shards by the same ``sizes``.

    Args:
        dims: Leading tensor dims to flatten: ``(0,)``, ``(0, 1)`` and so on.
        sizes: Length of the slice for each coordinate of the axis; 0 is legal.

    Raises:
        LayoutError: ``dims`` is not ``(0,)``, ``(0, 1)`` and so on, or a size is not an integer of
            at least 0.

    Examples:
        >>> Layout((2,), (RaggedShard((0,), (1, 5)),)).boxes((6,), rank=1)
        (((1, 6),),)
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("dims", "sizes"):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, _as_tuple(given))
            except TypeError:
                raise LayoutError(
                    f"RaggedShard takes {name} as a sequence of numbers, got {given!r}"
                ) from None
        if not self.dims or self.dims != tuple(range(len(self.dims))):
            raise LayoutError(
                f"RaggedShard flattens leading dims, got dims={self.dims}; use (0,), (0, 1) and so "
                "on, without gaps"
            )
        sizes: tuple[object, ...] = self.sizes
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes):
            raise LayoutError(
                f"RaggedShard sizes are element counts of 0 or more, got {_short(self.sizes)}"
            )
        object.__setattr__(self, "starts", (0, *accumulate(self.sizes)))

    @property
    def split_dims(self) -> tuple[int, ...]:
        """Tensor dims that the placement flattens and splits."""
        return self.dims

    def __hash__(self) -> int:
        # Layouts are cache keys. Hashing thousands of sizes would slow every lookup down.
        return hash((self.dims, self.sizes[:4], self.starts[-1], len(self.sizes)))

    def __str__(self) -> str:
        return f"Ragged({', '.join(map(str, self.dims))}: {_short(self.sizes)})"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Placement):
    """Placement: the local tensors of the axis must be reduced to get the global values.

    The global tensor is the elementwise reduction of the local tensors over the ranks of the axis.

    Args:
        op: Reduction: ``"sum"``, ``"avg"``, ``"max"``, ``"min"`` or ``"prod"``. torch's name
            ``"product"`` is accepted too.

    Raises:
        LayoutError: ``op`` is not a known reduction.

    Examples:
        >>> plan = explain(Layout((2,), (Partial("max"),)), (Shard(0),), shape=(6,))
        >>> [step.kind for step in plan.steps]
        ['reduce_scatter']
    """

    op: PartialOp = "sum"

    def __post_init__(self) -> None:
        if self.op == _PRODUCT:
            object.__setattr__(self, "op", "prod")
        if self.op not in get_args(PartialOp):
            raise LayoutError(
                f"Partial({self.op!r}) is no reduction; use one of {', '.join(get_args(PartialOp))}"
            )

    def __eq__(self, other: object) -> bool:
        if other.__class__ is Partial:
            return self.op == other.op
        theirs = _as_torch(other, "Partial")
        return theirs is not None and bool(theirs.reduce_op in (self.op, torch_op(self.op)))

    def __hash__(self) -> int:
        return 1 + hash(torch_op(self.op))

    def __str__(self) -> str:
        return f"P({self.op})"


def torch_op(op: str) -> str:
    """Return torch's name of a reduction: ``"product"`` for ``"prod"``, else the same name."""
    return _PRODUCT if op == "prod" else op


def in_tuple(placements: object, axes: int = 0) -> tuple[Any, ...]:
    """Return a sequence of placements as a tuple.

    ``axes`` is the number of mesh axes. If ``placements`` is None and ``axes`` is not 0, return
    `Replicate` for each axis. Raises `LayoutError` if ``placements`` is not a sequence, such as a
    single placement or a set.
    """
    if placements is None and axes:
        return (Replicate(),) * axes
    try:
        return _as_tuple(placements)
    except TypeError:
        raise LayoutError(
            f"placements are a sequence with one for each mesh axis, got {placements!r} alone; "
            "on a mesh of one axis write (Shard(0),)"
        ) from None


def check_dim(dim: object) -> None:
    """Raise `LayoutError` if ``dim`` is not an integer."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise LayoutError(f"Shard takes the number of a tensor dim, got {dim!r}")


def _as_tuple(values: object) -> tuple[Any, ...]:
    # Iterating over a set, a dict or a string works too, but would not give the intended order.
    if isinstance(values, set | frozenset | dict | str):
        raise TypeError
    return tuple(cast(Any, values))


def _short(sizes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, sizes[:8]))
    return f"[{shown}]" if len(sizes) <= 8 else f"[{shown}, ... {len(sizes)} sizes]"
