"""Between two meshes: what stands for a tensor on other ranks, and whether all plan alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from ._errors import LayoutError, MeshError
from ._groups import ranks_of_both
from ._layout import Box, Layout, checked_sizes, replicated
from ._planner import Plan
from .collectives._c10d import TorchCollectives
from .collectives._interface import Axis, RankMismatchError
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
    """Represents a tensor on a rank that is not in the tensor's mesh.

    The object has no data. Using it as a tensor raises TypeError. A distributed checkpoint saves
    nothing for a `NonMember`. Remove it from a state dict before loading: torch's loader accepts
    tensors only.

    Args:
        layout: Layout of the tensor. Its ``ranks`` are the ranks that hold the tensor.
        shape: Global shape.
        dtype: Dtype of the tensor.
        requires_grad: Whether the tensor requires grad on the ranks that hold it.
        graph: Empty tensor that connects this object to the autograd graph. `redistribute` sets it.

    Raises:
        LayoutError: ``layout`` is not a `Layout`, or ``shape`` does not fit it.

    Examples:
        >>> NonMember(Layout((2,), (Shard(0),), ranks=(4, 5)), (8, 8), torch.float32).shape
        (8, 8)
    """

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    graph: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.layout), Layout):
            raise LayoutError(f"a NonMember takes the tensor's Layout, got {self.layout!r}")
        object.__setattr__(self, "shape", checked_sizes(self.shape))
        self.layout.check_shape(self.shape)

    def anchor(self) -> torch.Tensor:
        """Return an empty tensor that represents this object in the autograd graph.

        Returns:
            A tensor with no elements. It requires grad.
        """
        return torch.zeros(0, requires_grad=True) if self.graph is None else self.graph

    def backward(self) -> None:
        """Take part in the backward pass of the ranks that hold the tensor.

        Call this method when those ranks call ``backward``. The gradient then flows back through
        the redistributions in which this rank took part. After several redistributions in a row,
        call it on the last result only. If it is called on an earlier result, this rank waits for
        peers that never call.

        Raises:
            TypeError: The object is not the result of a redistribution, or no gradient flows
                through it.
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


class _Fingerprint(NamedTuple):
    """What a rank is about to do: in words, and as a digest that tells any two apart."""

    rank: int
    digest: bytes
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank} plans {self.words}"


class ConsistencyCheck:
    """Checks that all ranks of both meshes have the same plan.

    ``find`` gives the axis of these ranks. Compared are both layouts with their ranks, shape,
    dtype, steps, and whether a gradient is to come back. A comparison is one all-reduce of 32
    bytes; where ranks differ, they also gather the words of each, and all raise
    `RankMismatchError` with the same text. Where they do not even plan for the same ranks, some
    wait for what is never sent, and raise it when the group times out. ``passed`` holds the
    ``requires_grad`` of the comparisons that found no difference.
    """

    def __init__(
        self, plan: Plan, dtype: torch.dtype, find: Callable[[], Axis], device: str
    ) -> None:
        # An axis of one rank means nothing, however it is spelled.
        source, target = replicated(plan.source), replicated(plan.target)
        self._ranks = list(ranks_of_both(plan))
        steps = [str(step) for step in plan.steps]
        exact = repr((source, target, tuple(plan.shape), str(dtype), steps))
        # Layouts of many ranks are long: each call hashes the rest only.
        self._base = sha256(exact.encode()).hexdigest()
        kinds = " and ".join(step.kind for step in plan.steps)
        shape = list(plan.shape)
        self._words = (
            f"{dtype} of shape {shape} from {_described(source)} to {_described(target)} by {kinds}"
        )
        self._find = find
        self._device = device
        self.passed: set[bool] = set()

    def start(self, requires_grad: bool, fault: str) -> Callable[[], None]:
        """Start to compare, and return what waits for all ranks and raises if any differs.

        ``fault`` is what is wrong on this rank alone.
        """
        gradient = "with a gradient to come back" if requires_grad else "without a gradient"
        words = fault or f"{self._words}, {gradient}"
        digest = sha256(f"{self._base} {requires_grad} {fault}".encode()).digest()
        mine = _Fingerprint(dist.get_rank(), digest, words)
        # The largest of numbers and of their opposites are opposite where all are the same.
        numbers = [int.from_bytes(digest[at : at + 7], "little") for at in (0, 7)]
        most = torch.tensor([*numbers, *(-n for n in numbers)], device=self._device)
        try:
            # The first call makes the group, and waits there for its ranks.
            axis = self._find()
            work = TorchCollectives().all_reduce(axis, [most], "max")
        except MeshError:
            raise
        except RuntimeError as error:
            raise self._late(mine) from error

        def finish() -> None:
            try:
                high, low, high_opposite, low_opposite = work.wait()[0].tolist()
                if (high, low) == (-high_opposite, -low_opposite):
                    self.passed.add(requires_grad)
                    return
                fingerprints: list[Any] = [None] * axis.size
                dist.all_gather_object(fingerprints, mine, cast(dist.ProcessGroup, axis.group))
            except RuntimeError as error:
                raise self._late(mine) from error
            first = min(fingerprints)
            other = min(each for each in fingerprints if each.digest != first.digest)
            raise RankMismatchError(
                f"the ranks of both meshes plan different transfers: {first}; "
                f"{other}; call on all of them with the same tensor, or a NonMember that "
                "says the same of it, and the same target, cost and max_bytes"
            )

        return finish

    def _late(self, mine: _Fingerprint) -> RankMismatchError:
        return RankMismatchError(
            f"ranks {self._ranks} did not all take part in time in the transfer that rank "
            f"{mine.rank} plans as {mine.words}; some did not make the call, or with meshes that "
            "have other ranks than these"
        )


def _described(layout: Layout) -> str:
    mesh = f"a mesh of shape {list(layout.mesh_shape)}"
    return f"{layout} on ranks {layout.ranks_in_words()} as {mesh}"
