"""Packing of each large gradient when autograd has computed it, for ``grads="accumulate"``."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hp_dtensor import Collectives

from ._errors import StateError
from ._param import ShardedParameter
from .layout import GradientRows


class GradientBucket:
    """Input of a reduce-scatter, of shape ``[degree, width]``, in which gradients accumulate.

    The first gradient of a parameter overwrites the memory. Later gradients are added to it.
    `finish` writes zeros for parameters without a gradient.

    Args:
        rows: Layout of the packed gradients.
        flat: Uninitialized flat tensor of ``rows.numel`` elements.

    Attributes:
        written: One bool per parameter: whether the bucket has a gradient of it.
    """

    def __init__(self, rows: GradientRows, flat: Tensor) -> None:
        self._rows = rows
        self._flat = flat
        self._packed = flat.view(rows.degree, rows.width)
        self.written = [False] * len(rows.columns)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the parameter at position ``index``.

        Runs one kernel, or two kernels if the gradient is sharded along dim 0 and its size is not
        divisible by the number of ranks.
        """
        columns = self._rows.columns[index]
        first, self.written[index] = not self.written[index], True
        full = columns.full_rows(self._packed)
        if not columns.left:
            _write(full, columns.spec.by_rank(gradient).view(full.shape), first)
            return
        count = columns.full * columns.spec.rows
        if count:
            _write(full, gradient[:count].view(full.shape), first)
        _write(columns.last_row(self._packed), gradient[count:], first)

    def finish(self, tag_flags: Tensor) -> Tensor:
        """Return the packed gradients as a flat tensor, with zeros for missing gradients.

        If ``separate_flags`` of the layout is False, each row ends with flags: one per parameter, 1
        if the parameter has a gradient and else 0, then ``tag_flags``.

        Args:
            tag_flags: Flags of the unit's tag, of shape ``[TAG_FLAGS]``.
        """
        rows = self._packed
        for columns, written in zip(self._rows.columns, self.written, strict=True):
            first = columns.full if written else 0
            if written and columns.left:
                rows[first, columns.padding_start : columns.end].zero_()
                first += 1
            if first < self._rows.degree and columns.end > columns.start:
                rows[first:, columns.start : columns.end].zero_()
        for _, start, end in self._rows.gaps:
            rows[:, start:end].zero_()
        if not self._rows.separate_flags:
            flags = rows[:, self._rows.flags : self._rows.flags + len(self.written)]
            flags.fill_(1)
            start = self._rows.flags + len(self.written)
            rows[:, start : start + len(tag_flags)] = tag_flags
            for i, written in enumerate(self.written):
                if not written:
                    flags[:, i].zero_()
        return self._flat


def _write(target: Tensor, source: Tensor, first: bool) -> None:
    if first:
        target.copy_(source)
    else:
        target.add_(source)


class BucketHooks:
    """Hooks that move each large gradient of a parameter group to a `GradientBucket`.

    Two kinds of gradients have no hooks and are packed at the end of the unit's backward:

    - small gradients, because they need little memory;
    - gradients of DTensors, because they may need a redistribution.

    Args:
        parameters: The parameters of the group.
        large: Indices of the parameters with large shards.
        reduced: Function that returns the indices of the parameters in the next reduction, in
            packing order.
        rows_of: Function that returns the layout of the packed gradients of such indices.
        allocate: Function that allocates a flat tensor of a number of elements.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        large: Sequence[int],
        reduced: Callable[[], list[int]],
        rows_of: Callable[[Sequence[int]], GradientRows],
        allocate: Callable[[int], Tensor],
    ) -> None:
        self._parameters = parameters
        self._large = [i for i in large if parameters[i].is_plain]
        self._reduced = reduced
        self._rows_of = rows_of
        self._allocate = allocate
        self._bucket: GradientBucket | None = None
        self._chosen: list[int] = []
        self._rows: GradientRows | None = None

    def register(self) -> None:
        """Register the hooks. Called whenever the unsharded parameters were created."""
        self._rows = None
        for i in self._large:
            unsharded = self._parameters[i].unsharded
            if unsharded.is_floating_point():
                # torch requires this for the hooks. Each unshard sets the final value.
                unsharded.requires_grad_(True)
                unsharded.register_post_accumulate_grad_hook(partial(self._add, i))

    def _begin(self) -> GradientBucket:
        if self._bucket is None:
            chosen = self._reduced()
            if self._rows is None or chosen != self._chosen:
                self._chosen, self._rows = chosen, self._rows_of(chosen)
            self._bucket = GradientBucket(self._rows, self._allocate(self._rows.numel))
        return self._bucket

    @torch.no_grad()
    def _add(self, index: int, unsharded: Tensor) -> None:
        gradient, unsharded.grad = unsharded.grad, None
        parameter = self._parameters[index]
        # The gradient of a parameter that was frozen since its forward is dropped.
        if gradient is None or not parameter.sharded.requires_grad:
            return
        bucket = self._begin()
        if index not in self._chosen:
            raise StateError(
                f"a gradient of {parameter.name}, which was frozen when gradients began to "
                "accumulate; unfreeze parameters only after a reduction"
            )
        bucket.add(self._chosen.index(index), gradient.contiguous())

    def finish(
        self, chosen: Sequence[int], collectives: Collectives, tag_flags: Tensor
    ) -> tuple[Tensor, list[bool]]:
        """Return the packed gradients of the parameters at ``chosen``, and start a new bucket.

        Args:
            chosen: Indices of the parameters in this reduction.
            collectives: Collectives for the redistribution of gradients that are DTensors.
            tag_flags: Flags of the unit's tag, of shape ``[TAG_FLAGS]``.

        Returns:
            The packed gradients as a flat tensor, and one bool per parameter: whether this rank has
            a gradient of it.

        Raises:
            StateError: The bucket was started for other parameters than ``chosen``.
        """
        bucket = self._begin()
        if self._chosen != list(chosen):
            names = [self._parameters[i].name for i in self._chosen]
            raise StateError(
                f"gradients of {names} were accumulated, and since then other parameters were "
                "unfrozen; unfreeze parameters only after a reduction"
            )
        for position, index in enumerate(self._chosen):
            gradient = self._parameters[index].take_gradient(collectives)
            if gradient is not None:
                bucket.add(position, gradient)
        self._bucket = None
        return bucket.finish(tag_flags), bucket.written

    def drop(self) -> None:
        """Discard the accumulated gradients."""
        self._bucket = None
