"""What stands for a tensor on a rank outside its mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ._layout import Box, Layout, check_sizes
from .ragged._tensor import checkpointed


class _NoTensor(TypeError, AttributeError):
    """A TypeError; an AttributeError too, so that ``hasattr`` answers False."""


def _no_boxes(absent: "NonMember") -> tuple[Box, ...]:
    return ()


def _no_data(absent: "NonMember", start: Sequence[int]) -> NoReturn:
    absent._refuse("a checkpoint")


@checkpointed(_no_boxes, _no_data)
@dataclass(frozen=True, slots=True)
class NonMember:
    """What stands for a tensor on a rank that is not in its mesh.

    There is no data: what a tensor can do raises TypeError here. A distributed checkpoint writes
    nothing for it; leave it out of what is loaded, as torch's loader takes tensors only.

    Args:
        layout: The tensor's layout, with the ranks that hold it.
        shape: The global shape.
        dtype: The tensor's dtype.
        requires_grad: What the tensor says on the ranks that hold it.
        graph: Where it comes from; set by `redistribute`.

    Raises:
        LayoutError: A shape that the layout does not fit.

    Example:
        >>> NonMember(Layout((2,), (Shard(0),), ranks=(4, 5)), (8, 8), torch.float32)
    """

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    graph: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sizes(self.shape)
        object.__setattr__(self, "shape", tuple(self.shape))
        self.layout.check(len(self.shape))

    def anchor(self) -> torch.Tensor:
        """Return an empty tensor in the place of this one in the graph of autograd."""
        return torch.zeros(0, requires_grad=True) if self.graph is None else self.graph

    def backward(self) -> None:
        """Take part in the backward pass of the ranks that hold the tensor.

        Called where these call ``backward`` of what they made of it: the gradient then comes back
        through the redistributions that this rank took part in, with what these communicate.
        Raises `TypeError` for one that comes from none, or that no gradient flows through.
        """
        if self.graph is None:
            raise _NoTensor(
                f"no gradient flows through this NonMember of shape {self.shape}: it is the result "
                "of no redistribution, or of one whose tensor required none; call backward of the "
                "result that redistribute returned on this rank, and give a NonMember to "
                "redistribute with requires_grad=True where the tensor has it"
            )
        self.graph.backward(torch.zeros(0))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        given += [item for each in given if isinstance(each, list | tuple) for item in each]
        absent = next(each for each in given if isinstance(each, cls))
        absent._refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        # Python itself asks for names with underscores, to copy or to pickle.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    def __bool__(self) -> NoReturn:
        self._refuse("bool")

    def __len__(self) -> NoReturn:
        self._refuse("len")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("indexing")

    def _operate(self, *others: object) -> NoReturn:
        self._refuse("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _operate
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _operate

    def _refuse(self, use: str) -> NoReturn:
        raise _NoTensor(
            f"this rank holds no part of the tensor of shape {self.shape}, so {use} has nothing to "
            f"work on; it is on ranks {self.layout.ranks_in_words()} as {self.layout}: use it "
            "there, or redistribute it to a mesh with this rank"
        )
