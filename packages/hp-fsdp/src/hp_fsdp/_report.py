"""What a plan costs, as values that can be printed or asserted."""

from collections.abc import Iterable
from dataclasses import dataclass

from ._group import ParameterGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReport:
    """One parameter: its name, unsharded local shape, and how it is gathered."""

    name: str
    shape: tuple[int, ...]
    rows_per_rank: int
    direct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group: ``parameter_bytes`` of content, ``padding_bytes`` that every gather adds to it.

    ``unit`` is the path of the group's unit under the module that reports, which itself is
    ``(root)``; of a list, all paths. ``axes`` maps each axis that gradients are reduced
    over to its degree.
    """

    unit: str
    dtype: str
    axes: dict[str, int]
    parameter_bytes: int
    padding_bytes: int
    shard_bytes: int
    parameters: tuple[ParameterReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The groups of a module and of the modules in it; ``str`` gives a table."""

    groups: tuple[GroupReport, ...]

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            axes = " x ".join(f"{name}={size}" for name, size in group.axes.items())
            lines.append(
                f"{group.unit}: {group.dtype} over {axes}: {group.parameter_bytes} bytes, "
                f"{group.padding_bytes} of padding, {group.shard_bytes} per rank"
            )
            lines += [
                f"  {p.name} {list(p.shape)}: {p.rows_per_rank} rows per rank, "
                f"{'direct' if p.direct else 'packed'}"
                for p in group.parameters
            ]
        return "\n".join(lines)


def report(groups: Iterable[tuple[str, ParameterGroup]]) -> PlanReport:
    """Return the report of groups, each with the name of its unit.

    It is the same on every rank; nothing is communicated.
    """
    return PlanReport(groups=tuple(_group_report(unit, group) for unit, group in groups))


def _group_report(unit: str, group: ParameterGroup) -> GroupReport:
    plan, axes = group.layout.plan, group.axes
    return GroupReport(
        unit=unit,
        dtype=str(group.layout.shard.dtype).removeprefix("torch."),
        axes={axis.name: axis.size for axis in axes.named},
        parameter_bytes=plan.parameter_bytes,
        padding_bytes=plan.padding_bytes,
        shard_bytes=plan.shard_numel * group.layout.shard.element_size(),
        parameters=tuple(
            ParameterReport(
                name=parameter.name, shape=cut.shape, rows_per_rank=slot.rows, direct=slot.direct
            )
            for parameter, slot, cut in zip(
                group.parameters, group.layout.slots, group.layout.cuts, strict=True
            )
        ),
    )
