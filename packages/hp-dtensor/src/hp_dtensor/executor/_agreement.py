"""Whether all ranks of a transfer mean the same one, found out before anything of it is sent."""

import struct
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import torch

from .._errors import RanksDisagree
from ..collectives._interface import Axis
from ..collectives._torch import TorchCollectives
from ..layouts._layout import Layout
from ..layouts._links import replicated
from ..plans._plan import Plan

# Says whether a gradient is to come back, and what is wrong on this rank alone, if anything is.
Agreement: TypeAlias = Callable[[bool, str], None]


class _Claim(NamedTuple):
    """What a rank means: in words, and as a digest that tells any two meanings apart."""

    rank: int
    digest: bytes
    words: bytes


# The claim of the lowest rank heard of, and of the lowest that makes another.
_Known: TypeAlias = tuple[_Claim, _Claim]

_LONGEST = 984
_CLAIM = struct.Struct(f"<q32s{_LONGEST}s")
_NONE = _Claim(-1, bytes(32), b"")


def agreement(plan: Plan, dtype: torch.dtype, find: Callable[[], Axis], device: str) -> Agreement:
    """Return what finds out whether all ranks of both meshes mean this plan.

    ``find`` gives the axis of the world. Each call takes ``ceil(log2 n)`` rounds, in which a rank
    sends 2 KiB to one other and receives as much from another, and so hears of twice as many ranks
    (dissemination; Hensgen, Finkel and Manber, Int. J. of Parallel Programming 17, 1988). Compared
    are both layouts with their ranks, shape, dtype, steps, and whether a gradient is to come back.

    It raises `RanksDisagree`, on all of these ranks with the same text; where they do not even mean
    the same ranks, some wait for what is never sent, and raise it when the group times out.
    """
    # An axis of one rank means nothing, however it is spelled.
    source, target = replicated(plan.source), replicated(plan.target)
    ranks = tuple(sorted({*_ranks(source), *_ranks(target)}))
    steps = [str(step) for step in plan.steps]
    exact = repr((source, target, tuple(plan.shape), str(dtype), steps))
    # Layouts of many ranks are long: each call hashes the rest only.
    base = sha256(exact.encode()).hexdigest()
    kinds = " and ".join(step.kind for step in plan.steps)
    words = (
        f"{dtype} of shape {list(plan.shape)} from {_lies(source)} to {_lies(target)} by {kinds}"
    )

    def agree(graded: bool, fault: str) -> None:
        axis = find()
        gradient = "with a gradient to come back" if graded else "without a gradient"
        digest = sha256(f"{base} {graded} {fault}".encode()).digest()
        said = fault or f"{words}, {gradient}"
        mine = _Claim(axis.index, digest, said.encode()[:_LONGEST])
        first, other = _disseminated(mine, ranks, axis, device)
        if other != _NONE:
            raise RanksDisagree(
                f"the ranks of both meshes do not mean the same transfer: {_told(first)}; "
                f"{_told(other)}; call on all of them with the same tensor, or an Absent that says "
                "the same of it, and the same target, cost and max_bytes"
            )

    return agree


def _disseminated(mine: _Claim, ranks: Sequence[int], axis: Axis, device: str) -> _Known:
    known, distance = (mine, _NONE), 1
    place = ranks.index(mine.rank)
    while distance < len(ranks):
        to, source = (ranks[(place + step) % len(ranks)] for step in (distance, -distance))
        heard, error = _heard(known, to, source, axis, device)
        known = _merged(known, heard)
        if error is not None and known[1] == _NONE:
            raise RanksDisagree(
                f"rank {to} or {source} has not said in time what it means by the transfer that "
                f"rank {mine.rank} means as {mine.words.decode(errors='replace')}; it did not make "
                f"the call, or with meshes that have other ranks than {list(ranks)}"
            ) from error
        if error is not None:
            break
        distance *= 2
    return known


def _heard(
    known: _Known, to: int, source: int, axis: Axis, device: str
) -> tuple[_Known, RuntimeError | None]:
    """Tell one rank what is known here; return what another one knows, and what failed."""
    message = b"".join(_CLAIM.pack(*claim) for claim in known)
    sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    # A group that moves nothing, as for dry runs, leaves what is here, which agrees.
    space = bytearray(message)
    here = torch.frombuffer(space, dtype=torch.uint8)
    arriving = here.to(device)
    failed = None
    try:
        TorchCollectives().exchange(axis, {to: sent}, {source: arriving}).wait()
    except RuntimeError as error:
        failed = error
    if arriving is not here:
        here.copy_(arriving)
    first, other = (_read(_CLAIM.unpack_from(space, place)) for place in (0, _CLAIM.size))
    return (first, other), failed


def _merged(mine: _Known, heard: _Known) -> _Known:
    first = min(mine[0], heard[0])
    others = [claim for claim in (*mine, *heard) if claim.digest not in (first.digest, bytes(32))]
    return first, min(others, default=_NONE)


def _read(fields: tuple[Any, ...]) -> _Claim:
    rank, digest, words = fields
    return _Claim(rank, digest, words.rstrip(b"\0"))


def _told(claim: _Claim) -> str:
    return f"rank {claim.rank} means {claim.words.decode(errors='replace')}"


def _lies(layout: Layout) -> str:
    ranks = _ranks(layout)
    short = isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2
    listed = f"{ranks[0]} to {ranks[-1]}" if short else list(ranks)
    return f"{layout} on ranks {listed} as a mesh of shape {list(layout.mesh_shape)}"


def _ranks(layout: Layout) -> Sequence[int]:
    return layout.ranks or range(layout.size)
