"""What a dispatcher checks: its own configuration, and what each rank gives to a call.

What one rank alone can see to be wrong becomes a report of three integers that travels to the whole
group with the counts: the fault, what was given, what was expected. The report of a rank without a
fault describes its inputs instead, so that ranks compare them. All ranks raise one error after it.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from zlib import crc32

import torch
from torch import Tensor

from hp_dtensor import Axis, AxisMesh, Collectives, TorchCollectives

from .._errors import ExpertConfigError, RoutingError
from .._sizes import check_sizes
from .._torch import autocast_dtype

REPORT_SIZE = 3
# A report holds the CRC-32 of a dispatcher's name, so that one of any name can be compared.
_NAMES = {
    crc32(name.encode()): name
    for name in ("rows by expert", "AllToAll", "Dedup", "Hierarchical", "Padded")
}
Report = tuple[int, int, int]

_PAYLOADS = (torch.bfloat16, torch.float16, torch.float32)
# Ranks run one torch, so a dtype's place in its list means the same everywhere.
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


class Fault(IntEnum):
    """What can be wrong with one rank's inputs."""

    NONE = 0
    ID_OUT_OF_RANGE = 1
    DUPLICATE_ID = 2
    WRONG_SUM = 3
    NEGATIVE_COUNT = 4
    ROW_DIMS = 5
    ROW_LENGTH = 6
    WEIGHT_DIMS = 7
    WEIGHT_TOKENS = 8
    ID_DIMS = 9
    ID_TOKENS = 10
    ID_CHOICES = 11
    CHOICES = 12
    ID_DTYPE = 13
    COUNT_SHAPE = 14
    COUNT_DTYPE = 15
    OVERFLOW = 16
    ROW_DTYPE = 17
    WEIGHT_DTYPE = 18
    ROW_DEVICE = 19
    WEIGHT_ROWS = 20


_TEXTS: dict[int, str] = {
    Fault.ID_OUT_OF_RANGE: "expert id {given} is not one of 0 .. {expected}",
    Fault.DUPLICATE_ID: "a token names expert {given} twice; its choices must be distinct, or all "
    "but one have weight 0",
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
    Fault.WEIGHT_ROWS: "weights are not a vector with one number for each of the {expected} rows, "
    "but {given} numbers",
    Fault.WEIGHT_DTYPE: "weights are {dtype}; they must be of a floating dtype",
}
_DTYPE_FAULTS = (Fault.ID_DTYPE, Fault.COUNT_DTYPE, Fault.ROW_DTYPE, Fault.WEIGHT_DTYPE)


class Keywords(IntFlag):
    """What a model of transformers is called with, by which its ranks communicate or do not."""

    NONE = 0
    LABELS = 1
    NUM_ITEMS = 2
    ROUTER_LOGITS = 4

    def __str__(self) -> str:
        """Return their names."""
        names = {
            Keywords.LABELS: "labels",
            Keywords.NUM_ITEMS: "num_items_in_batch",
            Keywords.ROUTER_LOGITS: "output_router_logits",
        }
        return " and ".join(name for each, name in names.items() if each in self) or "none of them"


_ALL_KEYWORDS = 2 ** len(Keywords)
KEYWORDS: ContextVar[Keywords] = ContextVar("keywords", default=Keywords.NONE)
"""Those of the call that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A rank's valid input, as ranks compare it: row length, dtypes, and what needs a gradient.

    ``kind``: CRC-32 of the dispatcher's name; all ranks need the same dispatcher, since each sends
    other messages. ``computed``: dtype in which the experts compute, which autocast changes.
    ``payload``: dtype in which rows are sent.
    """

    length: int
    dtype: torch.dtype
    computed: torch.dtype
    payload: torch.dtype
    weights: torch.dtype
    rows_need_grad: bool
    weights_need_grad: bool
    keywords: Keywords
    kind: int

    @classmethod
    def of(
        cls,
        rows: Tensor,
        weights: Tensor,
        payload: torch.dtype | None = None,
        kind: str = "rows by expert",
    ) -> "InputSpec":
        """Return the description of ``rows``, that travel in ``payload``, and their ``weights``."""
        grad = torch.is_grad_enabled()
        return cls(
            length=rows.shape[1],
            dtype=rows.dtype,
            computed=autocast_dtype(rows),
            payload=payload or rows.dtype,
            weights=weights.dtype,
            rows_need_grad=grad and rows.requires_grad,
            weights_need_grad=grad and weights.requires_grad,
            keywords=KEYWORDS.get(),
            kind=crc32(kind.encode()),
        )

    def report(self) -> Report:
        """Return it as a report, all but the length in one number."""
        dtypes = self.kind * _ALL_KEYWORDS + int(self.keywords)
        for dtype in (self.dtype, self.computed, self.payload, self.weights):
            dtypes = dtypes * len(_DTYPES) + _DTYPES.index(dtype)
        flags = self.rows_need_grad * 2 + self.weights_need_grad
        return Fault.NONE, self.length, dtypes * 4 + flags

    @classmethod
    def read(cls, length: int, packed: int) -> "InputSpec":
        """Return what the last two numbers of such a report say."""
        dtypes, weights = divmod(packed // 4, len(_DTYPES))
        dtypes, payload = divmod(dtypes, len(_DTYPES))
        dtypes, computed = divmod(dtypes, len(_DTYPES))
        options, dtype = divmod(dtypes, len(_DTYPES))
        kind, keywords = divmod(options, _ALL_KEYWORDS)
        return cls(
            length=length,
            dtype=_DTYPES[dtype],
            computed=_DTYPES[computed],
            payload=_DTYPES[payload],
            weights=_DTYPES[weights],
            rows_need_grad=packed & 2 > 0,
            weights_need_grad=packed & 1 > 0,
            keywords=Keywords(keywords),
            kind=kind,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checked:
    """Arguments that are safe to go on with, and the report ``[3]`` on those that were given."""

    x: Tensor
    weights: Tensor
    expert_ids: Tensor
    report: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Of which dispatcher, how many experts, how to communicate, what to check and to narrow."""

    kind: str
    num_experts: int
    collectives: Collectives
    validate: bool | None
    payload: torch.dtype | None

    def check(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Checked:
        """Return the arguments, or none in place of faulty ones: that rank takes part without.

        All ranks raise once they have seen each other's reports. Reads nothing on the host but on
        the CPU.
        """
        found = check_routing(x, weights, expert_ids, self.num_experts, self)
        if found[0] != Fault.NONE:
            weights = weights.new_empty(0, 1)
            x = weights.new_empty((0, 1), dtype=x.dtype)
            expert_ids = x.new_empty((0, 1), dtype=torch.int64)
        report = as_tensor(found, x.device)
        if checks_data(expert_ids, self.validate):
            expert_ids, report = check_ids(expert_ids, weights, self.num_experts, report)
        return Checked(x=x, weights=weights, expert_ids=expert_ids, report=report)

    def narrow(self, rows: Tensor) -> Tensor:
        """Return ``rows`` in the dtype in which they travel; their gradient travels so too."""
        return rows.to(self.travelling(rows))

    def travelling(self, rows: Tensor) -> torch.dtype:
        """Return the payload's dtype where it is narrower than that of ``rows``, else theirs."""
        if self.payload is None or self.payload.itemsize >= rows.element_size():
            return rows.dtype
        return self.payload


def check_config(
    kind: str,
    num_experts: int,
    name: str,
    num_ranks: int,
    collectives: Collectives | None,
    validate: bool | None,
    payload: torch.dtype | None,
) -> DispatchConfig:
    """Return the configuration; `ExpertConfigError` where ``num_ranks`` do not divide the experts.

    ``kind`` is the dispatcher's name, and ``name`` what the ranks are called. Also for a number of
    experts that is none, and for a ``payload`` that is not meant for rows.
    """
    check_sizes({"num_experts": num_experts})
    check_divides(name, num_ranks, num_experts)
    if payload is not None and payload not in _PAYLOADS:
        raise ExpertConfigError(f"payload={payload} is not one of {list(_PAYLOADS)} or None")
    return DispatchConfig(
        kind=kind,
        num_experts=num_experts,
        collectives=or_torch(collectives),
        validate=validate,
        payload=payload,
    )


def check_divides(name: str, size: int, num_experts: int) -> None:
    """Raise an `ExpertConfigError` if ``size`` ranks do not share the experts evenly."""
    if num_experts % size:
        legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ExpertConfigError(
            f"{name}={size} does not divide num_experts={num_experts}; use one of {legal} ranks, "
            "or a placement with replicas that fill the ranks evenly"
        )


def expert_axis(mesh: AxisMesh | Axis) -> Axis:
    """Return the axis of a 1-D mesh, whatever its name, or the axis ``ep`` of a larger one."""
    if isinstance(mesh, Axis):
        return mesh
    if mesh.ndim == 1:
        return Axis.of(mesh, 0)
    names = mesh.mesh_dim_names or ()
    if "ep" not in names:
        raise ExpertConfigError(
            f"no axis 'ep' in a mesh with axes {list(names)}; pass the 1-D mesh of the axis that "
            "splits the experts"
        )
    return Axis.of(mesh, "ep")


def or_torch(collectives: Collectives | None) -> Collectives:
    """Return ``collectives``, or those of torch where none are given."""
    return TorchCollectives() if collectives is None else collectives


def checks_data(data: Tensor, validate: bool | None) -> bool:
    """Return whether to look into ``data``: as told, or by default where reading it is free."""
    return data.is_cpu if validate is None else validate


def as_tensor(report: Report, device: torch.device) -> Tensor:
    """Return ``report`` as a tensor ``[3]`` on ``device``, filled there: nothing synchronises."""
    if device.type == "cpu":
        return torch.tensor(report, dtype=torch.int64, device="cpu")
    return torch.stack([_filled(number, device) for number in report])


def check_routing(
    x: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    config: DispatchConfig | None = None,
) -> Report:
    """Return whether shapes and dtypes describe one routing; looks into no tensor."""
    if x.dim() != 2:
        return Fault.ROW_DIMS, x.dim(), 2
    if weights.dim() != 2:
        return Fault.WEIGHT_DIMS, weights.dim(), 2
    if expert_ids.dim() != 2:
        return Fault.ID_DIMS, expert_ids.dim(), 2
    if weights.shape[0] != x.shape[0]:
        return Fault.WEIGHT_TOKENS, weights.shape[0], x.shape[0]
    if expert_ids.shape[0] != x.shape[0]:
        return Fault.ID_TOKENS, expert_ids.shape[0], x.shape[0]
    if expert_ids.shape[1] != weights.shape[1]:
        return Fault.ID_CHOICES, expert_ids.shape[1], weights.shape[1]
    if not 1 <= weights.shape[1] <= num_experts:
        return Fault.CHOICES, weights.shape[1], num_experts
    if expert_ids.dtype != torch.int64:
        return Fault.ID_DTYPE, _DTYPES.index(expert_ids.dtype), 0
    if not x.is_floating_point():
        return Fault.ROW_DTYPE, _DTYPES.index(x.dtype), 0
    if x.device != weights.device:
        return Fault.ROW_DEVICE, 0, 0
    if not weights.is_floating_point():
        return Fault.WEIGHT_DTYPE, _DTYPES.index(weights.dtype), 0
    if config is None:
        return InputSpec.of(x, weights).report()
    return InputSpec.of(x, weights, config.travelling(x), config.kind).report()


def check_rows(
    rows: Tensor, counts: Tensor, weights: Tensor | None, num_experts: int, dim: int
) -> Report:
    """Return whether shapes and dtypes are those of sorted rows; looks into no tensor."""
    if rows.dim() != 2:
        return Fault.ROW_DIMS, rows.dim(), 2
    if rows.shape[1] != dim:
        return Fault.ROW_LENGTH, rows.shape[1], dim
    if counts.shape != (num_experts,):
        return Fault.COUNT_SHAPE, counts.numel(), num_experts
    if counts.dtype not in (torch.int64, torch.int32):
        return Fault.COUNT_DTYPE, _DTYPES.index(counts.dtype), 0
    if not rows.is_floating_point():
        return Fault.ROW_DTYPE, _DTYPES.index(rows.dtype), 0
    if weights is not None and weights.shape != rows.shape[:1]:
        return Fault.WEIGHT_ROWS, weights.numel(), rows.shape[0]
    return InputSpec.of(rows, rows).report()


def check_ids(
    expert_ids: Tensor, weights: Tensor, num_experts: int, report: Tensor
) -> tuple[Tensor, Tensor]:
    """Check ``expert_ids [tokens, k]``; return ids that are in range, and the report ``[3]``.

    Ids outside ``0 .. num_experts - 1`` are clamped. The report is ``report`` if no id is a fault.
    A choice whose weight in ``weights [tokens, k]`` is 0 may repeat an expert, since replayed
    routings are padded with such choices. The host does not wait for a device.
    """
    if expert_ids.numel() == 0:
        return expert_ids, report
    if expert_ids.is_cpu and _are_good(expert_ids, num_experts):  # most often all there is to do
        return expert_ids, report
    last = num_experts - 1
    safe, choices = expert_ids.clamp(0, last), expert_ids.shape[1]
    if choices > 1:
        # Choices of weight 0 get numbers of their own, which no expert has.
        own = torch.arange(num_experts, num_experts + choices, device=safe.device)
        ordered = torch.where(weights == 0, own, safe).sort(1).values
        twice = ordered[:, 1:] == ordered[:, :-1]
        duplicate = ordered[:, 1:].take(twice.reshape(-1).to(torch.uint8).argmax())
        report = _where(twice.any(), Fault.DUPLICATE_ID, duplicate, report)
    outside = safe != expert_ids
    stray = expert_ids.take(outside.reshape(-1).to(torch.uint8).argmax())
    return safe, _where(outside.any(), Fault.ID_OUT_OF_RANGE, stray, report, expected=last)


def _are_good(expert_ids: Tensor, num_experts: int) -> bool:
    """Return whether the ids of each token are distinct and all are in range."""
    ordered = expert_ids.sort(1).values
    if ordered.shape[1] > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return False
    least, most = (int(edge) for edge in ordered.aminmax())
    return least >= 0 and most < num_experts


def check_counts(counts: Tensor, num_rows: int, report: Tensor) -> Tensor:
    """Return the report ``[3]`` on ``counts [experts]`` that should split ``num_rows`` rows."""
    total, least = counts.sum(), counts.min()
    report = _where(total != num_rows, Fault.WRONG_SUM, total, report, expected=num_rows)
    return _where(least < 0, Fault.NEGATIVE_COUNT, least, report)


def check_overflow(counts: Tensor, capacity: int, report: Tensor) -> Tensor:
    """Return the report ``[3]`` on ``counts [experts]`` of which none should exceed ``capacity``.

    A fault that was found before stays.
    """
    most = counts.max()
    crowded = (most > capacity) & (report[0] == Fault.NONE)
    return _where(crowded, Fault.OVERFLOW, most, report, expected=capacity)


def raise_faults(
    reports: Sequence[Sequence[int]], ranks: Sequence[int] | None
) -> tuple[bool, bool]:
    """Return whether any rank's rows, and any rank's weights, need a gradient.

    Raises a `RoutingError` that names every rank with a fault; without ``ranks`` it names none.
    Also where no rank has a fault of its own, but they give rows of different length or dtype, or
    weights of different dtype, or only some of them are under autocast, and where their dispatchers
    are not of one kind.
    """
    if any(kind != Fault.NONE for kind, _, _ in reports):
        raise describe_faults(reports, ranks)
    every = [InputSpec.read(given, packed) for _, given, packed in reports]
    if len(set(every)) > 1:
        raise_unequal(
            "their experts one kind of dispatcher", [_name_of(g.kind) for g in every], ranks
        )
        same = "their model the same of labels, num_items_in_batch and output_router_logits"
        raise_unequal(same, [str(g.keywords) for g in every], ranks)
        rows = [f"{g.length} of {g.dtype}" for g in every]
        raise_unequal("rows of one length and dtype", rows, ranks)
        computed = [str(g.computed) for g in every]
        same = "rows that autocast, on all ranks or on none, has computed in one dtype"
        raise_unequal(same, computed, ranks)
        raise_unequal("rows one payload", [str(g.payload) for g in every], ranks)
        raise_unequal("weights of one dtype", [str(g.weights) for g in every], ranks)
    return any(g.rows_need_grad for g in every), any(g.weights_need_grad for g in every)


def raise_unequal(what: str, given: Sequence[str], ranks: Sequence[int] | None) -> None:
    """Raise a `RoutingError` that lists what each rank has ``given`` unless it is all the same."""
    if len(set(given)) > 1:
        each = "; ".join(
            name + text for name, text in zip(_names(given, ranks), given, strict=True)
        )
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


def _name_of(kind: int) -> str:
    """Return the dispatcher's name; a rank knows those of this package only."""
    return _NAMES.get(kind, f"a dispatcher of another package ({kind:08x})")


def _names(reports: Sequence[object], ranks: Sequence[int] | None) -> list[str]:
    return [""] * len(reports) if ranks is None else [f"rank {rank}: " for rank in ranks]


def _dtype(kind: int, given: int) -> torch.dtype | None:
    return _DTYPES[given] if kind in _DTYPE_FAULTS else None


def _where(
    condition: Tensor, kind: Fault, given: Tensor, otherwise: Tensor, expected: int = 0
) -> Tensor:
    device = otherwise.device
    numbers = torch.stack([_filled(kind, device), given, _filled(expected, device)])
    return torch.where(condition, numbers, otherwise)


def _filled(number: int, device: torch.device) -> Tensor:
    # torch.tensor would copy it from the host, and wait for that.
    return torch.full((), number, dtype=torch.int64, device=device)
