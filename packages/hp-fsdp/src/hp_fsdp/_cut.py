"""How one parameter is cut along one of its dimensions: pure functions of shapes."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A tensor of ``shape`` cut along ``dim`` for ``degree`` ranks.

    Along dim 0 as ``torch.chunk`` does; along another dimension the parts must be equal.
    """

    shape: tuple[int, ...]
    dim: int
    degree: int

    @property
    def planned_shape(self) -> tuple[int, ...]:
        """Return the shape to plan with: the same number of elements, cut along dim 0."""
        if self.dim == 0:
            return self.shape
        return self.degree, math.prod(self.shape) // self.degree

    def local_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        size = -(-self.shape[self.dim] // self.degree)
        size = max(0, min(size, self.shape[self.dim] - index * size))
        return *self.shape[: self.dim], size, *self.shape[self.dim + 1 :]

    def part(self, whole: Tensor, index: int) -> Tensor:
        """Return one rank's part of the whole tensor, as a view."""
        size = -(-self.shape[self.dim] // self.degree)
        start = min(index * size, self.shape[self.dim])
        return whole.narrow(self.dim, start, self.local_shape(index)[self.dim])

    def by_rank(self, whole: Tensor) -> Tensor:
        """Return a contiguous tensor so that its first dimension is cut as the parts lie.

        Along dim 0 it is the tensor itself; otherwise ``[degree, before, rest]``, which is a view:
        reading it through in order gives the parts one after another.
        """
        if self.dim == 0:
            return whole
        before, rest = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim :])
        return whole.view(before, self.degree, rest // self.degree).transpose(0, 1)
