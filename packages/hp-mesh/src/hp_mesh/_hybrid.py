"""Replicas and shard degree of hybrid sharded data parallelism (HSDP), without torch."""

from dataclasses import dataclass
from math import prod
from os import environ

from ._degrees import as_degree
from ._errors import ParallelDimsError, Violation, divisors

LOCAL_RANKS = "LOCAL_WORLD_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShard:
    """How data-parallel ranks form replicas, each of which shards the parameters inside itself.

    Give ``replicas``, or ``shard_degree``, the ranks of one replica, or both. With neither there is
    one replica per node of ``ranks_per_node`` ranks, by default what the launcher has set as
    ``LOCAL_WORLD_SIZE``. A value that is not a positive integer raises `ParallelDimsError`.
    """

    replicas: int | None = None
    shard_degree: int | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "shard_degree", "ranks_per_node"):
            value = as_degree(name, getattr(self, name), inferable=False, optional=True)
            object.__setattr__(self, name, value)

    def split(self, dp_size: int, world_size: int) -> tuple[int, int]:
        """Return the number of replicas and the shard degree; their product is ``dp_size``.

        ``dp_size`` counts data-parallel ranks, ``world_size`` all ranks, on nodes of equal size.
        Raises `ParallelDimsError` where no such product exists, as with more nodes than
        data-parallel ranks.
        """
        sizes = {"dp_size": dp_size, "world_size": world_size}
        degrees = {"replicas": self.replicas, "shard_degree": self.shard_degree}
        given = {name: degree for name, degree in degrees.items() if degree is not None}
        source = ""
        if not given:
            per_node = self._ranks_per_node(world_size)
            given = {"replicas": world_size // per_node}
            source = f"(one per node: world_size={world_size} / ranks_per_node={per_node}) "
            sizes["ranks_per_node"] = per_node
        product = prod(given.values())
        if dp_size % product or (len(given) == 2 and dp_size != product):
            raise ParallelDimsError([_misfit(given, sizes, source)])
        replicas = given.get("replicas", dp_size // product)
        return replicas, dp_size // replicas

    def _ranks_per_node(self, world_size: int) -> int:
        text, name = environ.get(LOCAL_RANKS), "ranks_per_node"
        ranks = self.ranks_per_node
        if ranks is None and text is not None:
            ranks, name = as_degree(LOCAL_RANKS, text, inferable=False, optional=False), LOCAL_RANKS
        if ranks is None:
            reason = f"one replica per node asked for, but {name}=None and {LOCAL_RANKS} is not "
            reason += "set; give replicas, shard_degree or ranks_per_node"
            raise ParallelDimsError([Violation(rule="nodes", values={name: None}, reason=reason)])
        if world_size % ranks:
            raise ParallelDimsError(
                [
                    Violation(
                        rule="nodes",
                        values={name: ranks, "world_size": world_size},
                        legal={name: divisors(world_size)},
                        reason=f"{name}={ranks} does not divide world_size={world_size} into nodes",
                    )
                ]
            )
        return ranks


def _misfit(given: dict[str, int], sizes: dict[str, int], source: str) -> Violation:
    dp_size = sizes["dp_size"]
    legal = {}
    for name in given:
        rest = prod(degree for other, degree in given.items() if other != name)
        exact = (dp_size // rest,) if dp_size % rest == 0 else ()
        legal[name] = exact if len(given) == 2 else divisors(dp_size)
    factors = " * ".join(f"{name}={degree}" for name, degree in given.items())
    fails = f"= {prod(given.values())} is not" if len(given) == 2 else f"{source}does not divide"
    reason = f"{factors} {fails} dp_size={dp_size}, the data-parallel ranks"
    reason += f" of world_size={sizes['world_size']}"
    return Violation(rule="hybrid", values=given | sizes, legal=legal, reason=reason)
