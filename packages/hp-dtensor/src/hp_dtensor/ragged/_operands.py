"""Which operands an operator may take together, and where its result then lies."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.distributed.tensor import DTensor

from ._ops import RaggedOpError
from ._spec import RaggedSpec

if TYPE_CHECKING:
    from ._tensor import RaggedTensor


def common_spec(
    kind: "type[RaggedTensor]",
    use: object,
    operands: Sequence[object],
    written: Sequence[object] = (),
) -> RaggedSpec:
    """Return where the operands, of which some are ragged, lie; raise unless they lie alike.

    What is ``written`` to is ragged; the others may be numbers and plain 0-dim tensors.
    """
    first = next(x for x in operands if isinstance(x, kind))
    spec = first._spec
    for x in operands:
        if isinstance(x, kind):
            fits = x._spec is spec or x._spec == spec
        elif isinstance(x, Tensor):
            fits = _goes_with_all(x) and not any(x is target for target in written)
        else:
            continue
        if not fits:
            raise RaggedOpError(
                f"{use} of {described(first, kind)} and {described(x, kind)}, which lie "
                "differently; use operands that lie alike, numbers or 0-dim tensors that are not "
                "written to, or redistribute one first"
            )
    return spec


def specs_of_rows(
    kind: "type[RaggedTensor]", use: object, operands: Sequence[object]
) -> Sequence[RaggedSpec | None]:
    """Return where the first tensors of all lists lie, the second ones, and so on; None if nowhere.

    Each row, with the operands that are no lists, is a case of `common_spec`, or has no ragged
    tensor.
    """
    columns = [value for value in operands if is_tensor_list(value)]
    others = [value for value in operands if isinstance(value, Tensor)]
    found = [[x._spec if isinstance(x, kind) else None for x in column] for column in columns]
    ragged = [specs for specs in found if any(specs)]
    plain = [column for column, specs in zip(columns, found, strict=True) if not any(specs)]
    # Lists that lie alike row by row are what optimizers give: one comparison for each list.
    if (
        all(specs == ragged[0] for specs in ragged)
        and all(map(all, ragged[:1]))
        and all(map(_goes_with_all, (*others, *chain(*plain))))
    ):
        return ragged[0]
    rows = [(*row, *others) for row in zip_longest(*columns)]
    return [
        common_spec(kind, use, row) if any(isinstance(x, kind) for x in row) else None
        for row in rows
    ]


def is_tensor_list(value: object) -> TypeGuard[Sequence[Tensor]]:
    """Return whether an operand is a list of tensors."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


def described(x: Any, kind: "type[RaggedTensor]") -> str:
    """Return what an operand is, the same on every rank."""
    if isinstance(x, kind):
        mesh = tuple(x.device_mesh.shape)
        return f"a {list(x.shape)} tensor as {x._spec.layout} on a mesh of shape {mesh}"
    return f"a {list(x.shape)} {type(x).__name__}" if isinstance(x, Tensor) else repr(x)


def _goes_with_all(x: object) -> bool:
    return not isinstance(x, Tensor) or (x.ndim == 0 and not isinstance(x, DTensor))
