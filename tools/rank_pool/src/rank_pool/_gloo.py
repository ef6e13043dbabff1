"""Around two defects of torch over gloo: one ends a process now and then, one eats processors."""

import datetime
import warnings
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import Library

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's

_replaced = Library("_c10d_functional", "IMPL")  # what it replaces stays so while it lives


def share_one_device() -> None:
    """Let all gloo groups that this process makes from now on share one device.

    torch makes a device for each group, and gloo starts a thread for each device, which wakes up
    every 10 ms whether or not anything arrives. The ranks of a test session hold hundreds of groups
    for one another's tests: some 100,000 wake-ups a second, two thirds of two processors.
    """
    device = dist.ProcessGroupGloo.create_default_device()

    class OneDevice(dist.ProcessGroupGloo):
        """A gloo group on the device of all."""

        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: datetime.timedelta = DEFAULT_TIMEOUT,
        ) -> None:
            options = cast(Any, dist.ProcessGroupGloo)._Options()
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    cast(Any, distributed_c10d).ProcessGroupGloo = OneDevice


def avoid_coalesced_gathers() -> None:
    """Let torch's functional all-gathers of CPU tensors start gloo's plain all-gather.

    Theirs is the coalesced one, for one tensor too, so `DTensor.full_tensor` and
    `DTensor.redistribute` meet it. Two threads serve a gloo group, and each notes the name of what
    it has completed in one string, without a lock. ``ALLGATHER_COALESCED`` is long enough to lie on
    the heap: while one thread still notes it, the next call completes on the other, and both free
    the same memory. torch 2.13 alone, 2 ranks that call ``full_tensor`` in a loop on busy cores:
    SIGABRT, ``malloc(): unaligned tcache chunk detected``, within two minutes.
    """
    _replaced.impl("all_gather_into_tensor", _all_gather, "CPU")
    _replaced.impl("all_gather_into_tensor_coalesced", _all_gather_each, "CPU")


def _all_gather(x: Tensor, group_size: int, group: "str | dist.ProcessGroup") -> Tensor:
    if isinstance(group, str):
        group = cast(Any, distributed_c10d)._resolve_process_group(group)
    output = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
        dist.all_gather_into_tensor(output, x.contiguous(), group=group)
    return output


def _all_gather_each(
    inputs: list[Tensor], group_size: int, group: "str | dist.ProcessGroup"
) -> list[Tensor]:
    return [_all_gather(x, group_size, group) for x in inputs]
