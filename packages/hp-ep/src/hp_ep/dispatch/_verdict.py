"""What all ranks conclude from the reports of all: an error, or what they need of each other."""

from collections.abc import Sequence

import torch

from .._errors import RoutingError
from ._faults import DTYPES, Fault, Given

_TEXTS: dict[int, str] = {
    Fault.ID_OUT_OF_RANGE: "expert id {given} is not one of 0 .. {expected}",
    Fault.DUPLICATE_ID: "a token names expert {given} twice; its choices must be distinct",
    Fault.WRONG_SUM: "counts sum to {given}, but {expected} rows were given; they must be equal",
    Fault.NEGATIVE_COUNT: "a count is {given}; counts must be at least 0",
    Fault.ROW_DIMS: "the tokens or rows have {given} dimensions; give a matrix [tokens, dim]",
    Fault.ROW_LENGTH: "rows have {given} numbers each; these experts take {expected}",
    Fault.WEIGHT_DIMS: "weights have {given} dimensions; give a matrix [tokens, k]",
    Fault.WEIGHT_TOKENS: "weights are for {given} tokens, but x has {expected}; they must be equal",
    Fault.ID_DIMS: "expert_ids have {given} dimensions; give a matrix [tokens, k]",
    Fault.ID_TOKENS: "expert_ids are for {given} tokens, but x has {expected}; they must be equal",
    Fault.ID_CHOICES: "expert_ids name {given} experts per token, but there are {expected} weights",
    Fault.CHOICES: "each token names {given} of {expected} experts; use 1 to {expected}",
    Fault.ID_DTYPE: "expert_ids are {dtype}; they must be torch.int64",
    Fault.COUNT_SHAPE: "counts are not a vector with one number for each of the {expected} experts "
    "of all ranks, but {given} numbers",
    Fault.OVERFLOW: "an expert was chosen {given} times by this rank's tokens, but has room for "
    "{expected}; raise the capacity or drop what does not fit",
    Fault.COUNT_DTYPE: "counts are {dtype}; they must be torch.int64 or torch.int32",
    Fault.ROW_DTYPE: "the tokens or rows are {dtype}; they must be of a floating dtype",
    Fault.ROW_DEVICE: "the tokens or rows are no tensor on the device of the layer",
    Fault.WEIGHT_DTYPE: "weights are {dtype}; they must be of a floating dtype",
}

_DTYPE_FAULTS = (Fault.ID_DTYPE, Fault.COUNT_DTYPE, Fault.ROW_DTYPE, Fault.WEIGHT_DTYPE)


def raise_faults(reports: Sequence[Sequence[int]], ranks: Sequence[int] | None) -> None:
    """Raise a `RoutingError` that names every rank with a fault; without ``ranks`` names none.

    Also where no rank has a fault of its own, but they give rows of different length or dtype, or
    weights of different dtype, or only some of them are under autocast.
    """
    if any(kind != Fault.NONE for kind, _, _ in reports):
        raise describe_faults(reports, ranks)
    if len(set(map(tuple, reports))) == 1:
        return
    every = [Given.read(given, packed) for _, given, packed in reports]
    rows = [f"{g.length} of {g.dtype}" for g in every]
    raise_unequal("rows of one length and dtype", rows, reports, ranks)
    computed = [str(g.computed) for g in every]
    raise_unequal(
        "rows that autocast, on all ranks or on none, has computed in one dtype",
        computed,
        reports,
        ranks,
    )
    raise_unequal("weights of one dtype", [str(g.weights) for g in every], reports, ranks)


def raise_unequal(
    what: str, given: Sequence[str], reports: Sequence[object], ranks: Sequence[int] | None
) -> None:
    """Raise a `RoutingError` that lists what each rank has ``given`` unless it is all the same."""
    if len(set(given)) > 1:
        names = _names(reports, ranks)
        each = "; ".join(name + text for name, text in zip(names, given, strict=True))
        raise RoutingError(f"all ranks must give {what}, also without tokens; got {each}")


def describe_faults(reports: Sequence[Sequence[int]], ranks: Sequence[int] | None) -> RoutingError:
    """Return the error that names all faults, and keeps the reports."""
    error = RoutingError(
        "; ".join(
            name + _TEXTS[kind].format(given=given, expected=expected, dtype=_dtype(kind, given))
            for name, (kind, given, expected) in zip(_names(reports, ranks), reports, strict=True)
            if kind != Fault.NONE
        )
    )
    error.reports, error.ranks = reports, ranks
    return error


def needs_grad(reports: Sequence[Sequence[int]]) -> tuple[bool, bool]:
    """Return whether any rank's rows, and any rank's weights, need a gradient."""
    every = [Given.read(given, packed) for _, given, packed in set(map(tuple, reports))]
    return any(g.rows_need_grad for g in every), any(g.weights_need_grad for g in every)


def _names(reports: Sequence[object], ranks: Sequence[int] | None) -> list[str]:
    return [""] * len(reports) if ranks is None else [f"rank {rank}: " for rank in ranks]


def _dtype(kind: int, given: int) -> torch.dtype | None:
    return DTYPES[given] if kind in _DTYPE_FAULTS else None
