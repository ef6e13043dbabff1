"""Random values: the same on replicas, others on every part."""

import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch

from ..collectives._torch import TorchCollectives
from ..executor._groups import axes_over
from ..layouts._placements import Replicate
from ._spec import RaggedSpec


def fill(
    local: torch.Tensor, spec: RaggedSpec, op: Any, args: Any, named: Mapping[str, Any]
) -> None:
    """Fill this rank's part with what a random operator draws for it.

    Every part has a generator of its own, whose seed follows from a number that the given or the
    default generator draws, and from the part's place on the axes that divide the tensor.
    Communicates that number over the axes that replicate it, so that replicas draw alike.
    """
    named = dict(named)
    if local.device.type != "meta":
        named["generator"] = _generator(spec, named.get("generator"), local.device)
    op(local, *args, **named)


def _generator(
    spec: RaggedSpec, given: torch.Generator | None, device: torch.device
) -> torch.Generator:
    where = "cpu" if given is None else given.device
    number = torch.randint(2**62, (1,), generator=given, device=where).to(device)
    place = spec.coordinate
    copies = [axis for axis, p in enumerate(spec.layout.placements) if isinstance(p, Replicate)]
    for axis in copies:
        for over in axes_over(spec.mesh, (axis,)):
            # The largest, whatever order a mesh has its ranks in.
            TorchCollectives().all_reduce(over, [number], "max").wait()
    parts = [i for axis, i in enumerate(place) if axis not in copies]
    seed = sha256(struct.pack(f"<{1 + len(parts)}q", int(number), *parts)).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(seed[:7], "little"))
