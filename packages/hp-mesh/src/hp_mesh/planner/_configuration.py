"""The degrees of one configuration, and the groups that they make in rank order."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from .._degrees import DEFAULT_ORDER
from .._dims import ParallelDims

Digits: TypeAlias = tuple[tuple[int, int], ...]


class Group(NamedTuple):
    """The ranks of an axis, all that matters of it on the links.

    ``digits`` are pairs of a count of ranks and how far apart they are, the nearest first; a rank's
    group has all combinations. ``size`` is the product of the counts. Where no digits describe the
    groups, all of them are ``listed``.
    """

    size: int
    digits: Digits
    listed: tuple[tuple[int, ...], ...] = ()


class Degrees(NamedTuple):
    """Resolved degrees; where experts have ranks of their own, ``dp_shard`` has those too."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses_degree: int = 1

    @property
    def ring(self) -> int:
        """Return over how many ranks keys and values go round: those of cp that keep heads."""
        return self.cp // self.ulysses_degree

    @property
    def dp(self) -> int:
        """Return how many ranks see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return over how many ranks dense parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Return over how many ranks the parameters of experts are sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def dims(self, order: Sequence[str] = DEFAULT_ORDER) -> ParallelDims:
        """Return the degrees as they are built: folded and without Ulysses."""
        degrees = {name: n for name, n in self._asdict().items() if name != "ulysses_degree"}
        return ParallelDims(**degrees, order=tuple(order), world_size=self.world)


def degrees_of(dims: ParallelDims) -> Degrees:
    """Return the degrees of a resolved configuration.

    Experts on ranks of their own are data-parallel ranks to the dense layers: the sizes of all
    groups are those of folding ``ep`` into more ``dp_shard``. Where the ranks of a group are is not
    the same then; `groups_of` tells the two apart.
    """
    layout = dims.layout()
    own = dims.ep if dims.ep_mode == "peer" else 1
    return Degrees(
        pp=dims.pp,
        dp_replicate=dims.dp_replicate,
        dp_shard=layout.size("dp_shard") * own,
        cp=dims.cp,
        tp=dims.tp,
        ep=dims.ep,
        etp=dims.etp,
        ulysses_degree=dims.ulysses_degree or 1,
    )


def groups_of(degrees: Degrees, order: Sequence[str], *, peer: bool = False) -> dict[str, Group]:
    """Return the group of every axis that communicates, for an order of axes, outermost first.

    ``fsdp`` and ``efsdp`` fold axes. Folded experts are the inner part of the ranks that they fold;
    with ``peer`` they have their own place in the order. ``ulysses`` is the inner part of ``cp``,
    ``ring`` the outer.
    """
    base = [name for name in order if name != "ep" or peer]
    sizes = degrees._asdict()
    if peer:
        sizes["dp_shard"] //= degrees.ep
    strides = {name: prod(sizes[n] for n in base[i + 1 :]) for i, name in enumerate(base)}

    def fold(*axes: str) -> Digits:
        return _merge((sizes[name], strides[name]) for name in reversed(base) if name in axes)

    # Whole experts may be on any rank of a tensor-parallel group, parts of them on their own.
    block = ("dp_shard", "cp", "tp") if degrees.etp == 1 else ("dp_shard", "cp")
    ulysses, ring = _cut(fold("cp"), degrees.ulysses_degree) or ((), ())
    cut = (fold("ep"), fold(*block)) if peer else _cut(fold(*block), degrees.ep)
    ep, efsdp = cut or ((), ())
    digits: Mapping[str, Digits] = {
        "tp": fold("tp"),
        "cp": fold("cp"),
        "ring": ring,
        "ulysses": ulysses,
        "fsdp": fold("dp_shard", "cp", *(("ep",) if peer else ())),
        "dp_replicate": fold("dp_replicate"),
        "pp": fold("pp"),
        "ep": ep,
        "efsdp": efsdp,
    }
    groups = {name: Group(prod(size for size, _ in found), found) for name, found in digits.items()}
    if cut is None:  # parts of a fold whose ranks are not evenly apart
        layout = degrees.dims(order).layout()
        groups |= {
            name: Group(layout.size(name), (), tuple(layout.groups(name)))
            for name in ("ep", "efsdp")
        }
    return groups


def _merge(digits: Iterable[tuple[int, int]]) -> Digits:
    """Return digits, nearest first, with those that follow on each other made one."""
    merged: list[tuple[int, int]] = []
    for size, stride in digits:
        if size == 1:
            continue
        if merged and prod(merged[-1]) == stride:
            size, stride = size * merged[-1][0], merged.pop()[1]
        merged.append((size, stride))
    return tuple(merged)


def _cut(digits: Digits, count: int) -> tuple[Digits, Digits] | None:
    """Return the inner ``count`` ranks of a fold, and the others; None where digits cannot."""
    inner, outer = [], []
    for size, stride in digits:
        part = min(count, size)
        if count % part or size % part:
            return None
        count //= part
        inner.append((part, stride))
        outer.append((size // part, stride * part))
    return _merge(inner), _merge(outer)
