"""Describe a parameter by the tensors in a file: stacked, concatenated, transposed, reordered.

The tensors of a published checkpoint often differ from the parameters of a model. For example, the
file has one matrix for each expert, and the model has one parameter that stacks all experts. A
`Source` describes such a parameter as an expression of stored tensors:
``Stack([Stored("experts.0.up"), Stored("experts.1.up")])``.

Sources work on index ranges. So any box (rectangular region) of the parameter can be read or
written without the rest. The module needs no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from ._boxes import Box
from ._errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Concatenate",
    "Piece",
    "Reorder",
    "Slice",
    "Source",
    "SourcePlan",
    "SourceRule",
    "Stack",
    "Stored",
    "Transpose",
]

# Shape of each stored tensor, by name.
Shapes: TypeAlias = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor, and the box of the parameter that has the same elements.

    A box is one half-open range ``(start, stop)`` of indices for each dim.

    Attributes:
        name: Name of the stored tensor.
        stored: Box of the stored tensor.
        target: Box of the parameter.
        dims: For each dim of the parameter, the corresponding dim of the stored tensor. None for a
            new dim along which stored tensors are stacked.

    Examples:
        >>> source = Stack([Stored("a"), Stored("b")])
        >>> (piece,) = source.pieces(((1, 2), (0, 3)), {"a": (3,), "b": (3,)})
        >>> piece.name, piece.stored, piece.dims
        ('b', ((0, 3),), (None, 0))
    """

    name: str
    stored: Box
    target: Box
    dims: tuple[int | None, ...]

    def as_target(self, stored: "Tensor") -> "Tensor":
        """Return a view of the stored elements with the dims of the parameter.

        Args:
            stored: The elements of the box ``stored``, with the shape of that box.

        Returns:
            A view with the shape of the box ``target``.
        """
        view = stored.permute([dim for dim in self.dims if dim is not None])
        for position, dim in enumerate(self.dims):
            if dim is None:
                view = view.unsqueeze(position)
        return view

    def as_stored(self, target: "Tensor") -> "Tensor":
        """Return a view of the parameter's elements with the dims of the stored tensor.

        Args:
            target: The elements of the box ``target``, with the shape of that box.

        Returns:
            A view with the shape of the box ``stored``.
        """
        added = [position for position, dim in enumerate(self.dims) if dim is None]
        kept = [dim for dim in self.dims if dim is not None]
        view = target.squeeze(added) if added else target
        return view.permute([kept.index(dim) for dim in range(len(kept))])


class Source(ABC):
    """Base class of the expressions that describe a parameter by stored tensors.

    Examples:
        Experts that a file stores one by one, as a parameter ``[2, 4, 3]``:

        >>> experts = Stack([Stored("experts.0.up"), Stored("experts.1.up")])
        >>> experts.shape({"experts.0.up": (4, 3), "experts.1.up": (4, 3)})
        (2, 4, 3)
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, in order of use."""

    @abstractmethod
    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the shape of the parameter that this source describes.

        Args:
            stored: Shape of each stored tensor, by name.

        Returns:
            The global shape of the parameter.

        Raises:
            LayoutError: The stored shapes do not fit this source. For example, the parts of a
                `Stack` have different shapes.
            KeyError: ``stored`` has no shape for a tensor in `names`.
        """

    @abstractmethod
    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of stored tensors that make up a box of the parameter.

        Args:
            box: One half-open range ``(start, stop)`` of the parameter's indices for each dim.
            stored: Shape of each stored tensor, by name.

        Yields:
            One `Piece` at a time. The ``target`` boxes of all pieces cover each element of ``box``
            exactly once.
        """


@dataclass(frozen=True, slots=True)
class Stored(Source):
    """A stored tensor without changes.

    Args:
        name: Name of the tensor in the file.

    Examples:
        >>> Stored("head.weight").shape({"head.weight": (50, 8)})
        (50, 8)
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, in order of use."""
        return (self.name,)

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the shape of the stored tensor; see `Source.shape`."""
        return tuple(stored[self.name])

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield one piece, which covers the whole ``box``; see `Source.pieces`."""
        yield Piece(self.name, box, box, tuple(range(len(box))))


class _Several(Source):
    """Base class of `Stack` and `Concatenate`, which join several sources along one dim."""

    parts: Sequence[Source]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, in order of use."""
        return tuple(name for part in self.parts for name in part.names)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise LayoutError(f"a {type(self).__name__} has no parts; give at least one source")


class _OfOne(Source):
    """Base class of `Slice`, `Transpose` and `Reorder`, which change one source."""

    source: Source

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors, in order of use."""
        return self.source.names


@dataclass(frozen=True, slots=True)
class Stack(_Several):
    """Sources of equal shape, stacked along a new dim, as by ``torch.stack``.

    Args:
        parts: The sources to stack.
        dim: Position of the new dim in the result. Defaults to 0.

    Raises:
        LayoutError: There are no parts.

    Examples:
        >>> Stack([Stored("a"), Stored("b")]).shape({"a": (3, 5), "b": (3, 5)})
        (2, 3, 5)
    """

    parts: Sequence[Source]
    dim: int = 0

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the shape of the stack: the shape of one source, with the new dim inserted.

        See `Source.shape`.
        """
        shapes = [part.shape(stored) for part in self.parts]
        first = shapes[0]
        _check_dim(self, self.dim, len(first) + 1)
        for part, shape in zip(self.parts, shapes, strict=True):
            if shape != first:
                raise LayoutError(
                    f"a Stack has {_named(self.parts[0])} of shape {first} and {_named(part)} of "
                    f"shape {shape}; all parts must have one shape"
                )
        return (*first[: self.dim], len(shapes), *first[self.dim :])

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of the stacked sources that ``box`` overlaps; see `Source.pieces`."""
        at = self.dim
        for index in range(*box[at]):
            for piece in self.parts[index].pieces((*box[:at], *box[at + 1 :]), stored):
                yield replace(
                    piece,
                    target=(*piece.target[:at], (index, index + 1), *piece.target[at:]),
                    dims=(*piece.dims[:at], None, *piece.dims[at:]),
                )


@dataclass(frozen=True, slots=True)
class Concatenate(_Several):
    """Sources concatenated along an existing dim, as by ``torch.cat``.

    Args:
        parts: The sources, in order.
        dim: Dim along which the sources are concatenated. Defaults to 0.

    Raises:
        LayoutError: There are no parts.

    Examples:
        >>> Concatenate([Stored("gate"), Stored("up")]).shape({"gate": (4, 8), "up": (4, 8)})
        (8, 8)
    """

    parts: Sequence[Source]
    dim: int = 0

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the shape of the sources, with their lengths along ``dim`` added up.

        See `Source.shape`.
        """
        shapes = [part.shape(stored) for part in self.parts]
        first, at = shapes[0], self.dim
        _check_dim(self, at, len(first))
        for part, shape in zip(self.parts, shapes, strict=True):
            if (shape[:at], shape[at + 1 :]) != (first[:at], first[at + 1 :]):
                raise LayoutError(
                    f"a Concatenate along dim {at} has {_named(self.parts[0])} of shape {first} "
                    f"and {_named(part)} of shape {shape}; they may differ in dim {at} only"
                )
        return (*first[:at], sum(shape[at] for shape in shapes), *first[at + 1 :])

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of each source that overlaps ``box``; see `Source.pieces`."""
        start, stop = box[self.dim]
        end = 0
        for part in self.parts:
            begin, end = end, end + part.shape(stored)[self.dim]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                inner = _with_range(box, self.dim, (low - begin, high - begin))
                for piece in part.pieces(inner, stored):
                    yield _moved(piece, self.dim, begin)


@dataclass(frozen=True, slots=True)
class Slice(_OfOne):
    """Indices ``start`` to ``stop`` of a source along a dim, as by ``Tensor.narrow``.

    Args:
        source: Source to slice.
        dim: Dim to slice.
        start: First index of the slice along ``dim``.
        stop: Index after the last index of the slice.

    Examples:
        >>> Slice(Stored("qkv"), dim=0, start=8, stop=12).shape({"qkv": (16, 8)})
        (4, 8)
    """

    source: Source
    dim: int
    start: int
    stop: int

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the source's shape, with ``stop - start`` as the length of ``dim``."""
        shape = self.source.shape(stored)
        _check_dim(self, self.dim, len(shape))
        if not 0 <= self.start <= self.stop <= shape[self.dim]:
            raise LayoutError(
                f"a Slice takes {self.start} to {self.stop} of dim {self.dim} of "
                f"{_named(self.source)}, which has shape {shape}; the range must be within it"
            )
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of the source that make up ``box``; see `Source.pieces`."""
        # Index 0 of the slice is index `start` of the source. So convert the box to indices of the
        # source, and the target boxes of the pieces back to indices of the slice.
        low, high = box[self.dim]
        inner = _with_range(box, self.dim, (low + self.start, high + self.start))
        for piece in self.source.pieces(inner, stored):
            yield _moved(piece, self.dim, -self.start)


@dataclass(frozen=True, slots=True)
class Transpose(_OfOne):
    """A source with two dims exchanged, as by ``Tensor.transpose``.

    Args:
        source: Source to transpose.
        dim0: First dim to exchange. Defaults to 0.
        dim1: Second dim to exchange. Defaults to 1.

    Examples:
        >>> Transpose(Stored("weight")).shape({"weight": (3, 5)})
        (5, 3)
    """

    source: Source
    dim0: int = 0
    dim1: int = 1

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the source's shape with the two dims exchanged; see `Source.shape`."""
        shape = self.source.shape(stored)
        for dim in (self.dim0, self.dim1):
            _check_dim(self, dim, len(shape))
        return tuple(shape[dim] for dim in self._order(len(shape)))

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of the source, with the two dims exchanged; see `Source.pieces`."""
        order = self._order(len(box))
        for piece in self.source.pieces(tuple(box[dim] for dim in order), stored):
            yield replace(
                piece,
                target=tuple(piece.target[dim] for dim in order),
                dims=tuple(piece.dims[dim] for dim in order),
            )

    def _order(self, ndim: int) -> list[int]:
        order = list(range(ndim))
        order[self.dim0], order[self.dim1] = self.dim1, self.dim0
        return order


@dataclass(frozen=True, slots=True)
class Reorder(_OfOne):
    """A source with the indices of one dim in another order, as by ``Tensor.index_select``.

    Indices may be left out or repeated. Use it if the model holds its experts in another order than
    the file, or holds several copies of an expert.

    Args:
        source: Source to reorder.
        indices: For each index of the result along ``dim``, the index in the source.
        dim: Dim to reorder. Defaults to 0.

    Examples:
        >>> Reorder(Stored("experts"), (3, 0, 3)).shape({"experts": (4, 8)})
        (3, 8)
    """

    source: Source
    indices: Sequence[int]
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(self.indices))

    def shape(self, stored: Shapes) -> tuple[int, ...]:
        """Return the source's shape, with the number of indices as the length of ``dim``."""
        shape = self.source.shape(stored)
        _check_dim(self, self.dim, len(shape))
        length = shape[self.dim]
        wrong = [index for index in self.indices if not 0 <= index < length]
        if wrong:
            raise LayoutError(
                f"a Reorder takes index {wrong[0]} along dim {self.dim} of {_named(self.source)}, "
                f"which has shape {shape}; use 0 to {length - 1}"
            )
        return (*shape[: self.dim], len(self.indices), *shape[self.dim + 1 :])

    def pieces(self, box: Box, stored: Shapes) -> Iterator[Piece]:
        """Yield the pieces of the source that make up ``box``; see `Source.pieces`.

        Consecutive numbers in ``indices`` give one piece together.
        """
        start, stop = box[self.dim]
        while start < stop:
            first, end = self.indices[start], start + 1
            while end < stop and self.indices[end] == first + end - start:
                end += 1
            inner = _with_range(box, self.dim, (first, first + end - start))
            for piece in self.source.pieces(inner, stored):
                yield _moved(piece, self.dim, start - first)
            start = end


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """Describes all parameters of a model by the tensors in the files of a checkpoint.

    Attributes:
        parameters: The source of each parameter and buffer, by its name in the model.
        stored: Shape of each stored tensor, by its name in the files.
        ignored: Names of stored tensors that the model does not need.

    Examples:
        >>> plan = SourcePlan({"head": Stored("lm_head")}, {"lm_head": (50, 8)})
        >>> plan.parameters["head"].shape(plan.stored)
        (50, 8)
    """

    parameters: Mapping[str, Source]
    stored: Shapes
    ignored: frozenset[str] = field(default_factory=frozenset)


SourceRule: TypeAlias = Callable[[Shapes | None], SourcePlan]
"""Function that returns the `SourcePlan` of a checkpoint.

To load a checkpoint, call it with the shape of each stored tensor, by name. To save a checkpoint,
call it with None: the function then chooses the names and shapes of the stored tensors.
"""


def _check_dim(source: Source, dim: int, ndim: int) -> None:
    if not 0 <= dim < ndim:
        raise LayoutError(
            f"a {type(source).__name__} of {_named(source)} has dim {dim} of {ndim} dims; use 0 to "
            f"{ndim - 1}"
        )


def _named(source: Source) -> str:
    names = source.names
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _with_range(box: Box, dim: int, interval: tuple[int, int]) -> Box:
    return (*box[:dim], interval, *box[dim + 1 :])


def _moved(piece: Piece, dim: int, distance: int) -> Piece:
    """Return the piece with its target box moved along ``dim`` by ``distance`` indices."""
    low, high = piece.target[dim]
    return replace(piece, target=_with_range(piece.target, dim, (low + distance, high + distance)))
