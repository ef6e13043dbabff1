"""`ParallelDims`: the degrees of one training run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any

from ._config import add_arguments, arguments_from_args, arguments_from_config, arguments_from_dict
from ._degrees import (
    BASE_AXES,
    DEFAULT_ORDER,
    INFERRED,
    as_degree,
    as_order,
    check_resolved,
    infer_degrees,
    value_violations,
)
from ._errors import ParallelDimsError, Report, Violation, join_words, raise_errors
from ._layout import RankLayout
from ._model import read_numbers
from ._rules import Subject, check_rules

if TYPE_CHECKING:
    from ._mesh import ParallelMesh


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How many ranks each axis has, checked as far as the numbers given allow.

    ``dp_replicate * dp_shard * cp * tp * pp`` is the world. One of these may be -1 and then follows
    from the world; ``dp_shard=None`` is -1 unless another is. Experts live on ranks that the dense
    layers already use: ``ep * etp * efsdp == dp_shard * cp * tp``, with ``etp`` 1 or ``tp``.
    ``ulysses_degree`` divides ``cp``. ``order`` lists the axes, outermost first: ranks that are
    neighbours differ along the last. ``ep`` has no place of its own in it and may be left out.

    Degrees may also be integers of other types or strings that spell one, ``order`` one string with
    commas. Raises `ParallelDimsError`: for single values at once, for the product as soon as the
    world is known, here or in `resolve`. Needs no torch.
    """

    dp_replicate: int = 1
    dp_shard: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses_degree: int | None = None
    world_size: int | None = None
    order: tuple[str, ...] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        violations: list[Violation] = []
        for name in (*BASE_AXES, "ep", "etp", "ulysses_degree", "world_size"):
            optional = name in ("dp_shard", "ulysses_degree", "world_size")
            try:
                value = as_degree(
                    name, getattr(self, name), inferable=name in BASE_AXES, optional=optional
                )
                object.__setattr__(self, name, value)
            except ParallelDimsError as error:
                violations += error.violations
        raise_errors(violations)
        object.__setattr__(self, "order", as_order(self.order))
        degrees = self._degrees()
        raise_errors(value_violations(degrees, self.ulysses_degree, self.order))
        if self.world_size is not None:
            for name, value in infer_degrees(degrees, self.world_size).items():
                object.__setattr__(self, name, value)
            check_resolved(self._degrees(), self.ulysses_degree)

    def _degrees(self) -> dict[str, int]:
        names = (*BASE_AXES, "ep", "etp")
        degrees = {name: getattr(self, name) for name in names if name != "dp_shard"}
        others = INFERRED in degrees.values()
        absent = 1 if others else INFERRED
        return {**degrees, "dp_shard": absent if self.dp_shard is None else self.dp_shard}

    def _resolved(self) -> dict[str, int]:
        degrees = self._degrees()
        if self.world_size is not None:
            return degrees
        if INFERRED not in degrees.values():
            return replace(self, world_size=prod(degrees[name] for name in BASE_AXES))._degrees()
        unknown = [name for name, degree in degrees.items() if degree == INFERRED]
        raise ParallelDimsError(
            [
                Violation(
                    rule="resolved",
                    values={name: INFERRED for name in unknown},
                    reason=f"{join_words(unknown)} is not known yet; call resolve(world_size)",
                )
            ]
        )

    def resolve(self, world_size: int) -> "ParallelDims":
        """Return the copy for this world with every degree a number; idempotent.

        Raises `ParallelDimsError` if the degrees do not make this world, or if they were given or
        resolved for another.
        """
        if self.world_size is None:
            return replace(self, world_size=world_size)
        if self.world_size == world_size:
            return self
        raise ParallelDimsError(
            [
                Violation(
                    rule="world",
                    values={"world_size": world_size, "given": self.world_size},
                    reason=f"world_size={world_size} is not the world_size={self.world_size} that "
                    f"these degrees are for ({self.summary()})",
                )
            ]
        )

    @classmethod
    def from_config(cls, config: object, world_size: int) -> "ParallelDims":
        """Return the resolved degrees that a mapping or any object's attributes give.

        Absent and None mean default, except that ``etp`` is then ``tp``. ``dp`` is taken as an
        older name of ``dp_shard``. Other names are ignored.
        """
        arguments = arguments_from_config(config)
        dims = cls(**arguments, world_size=world_size)
        return dims if "etp" in arguments else replace(dims, etp=dims.tp)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "ParallelDims":
        """Return the degrees whose `to_dict` this is; an unknown key is an error."""
        return cls(**arguments_from_dict(mapping))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain integers, None and a list, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "order": list(self.order)}

    @staticmethod
    def add_arguments(parser: ArgumentParser) -> None:
        """Add one optional argument for each degree, and ``--order``, to a command line."""
        add_arguments(parser)

    @classmethod
    def from_args(cls, args: Namespace, world_size: int | None = None) -> "ParallelDims":
        """Return the degrees given on a command line; what is not given has its default."""
        return cls(**arguments_from_args(args), world_size=world_size)

    def check(
        self,
        model: object,
        seq_len: int | None = None,
        global_batch: int | None = None,
        *,
        causal_balance: bool = False,
    ) -> Report:
        """Return every rule that these degrees break for a model, its sequences and its batch.

        ``model`` is a mapping or configuration object (Hugging Face ones as they are), or has one
        as ``config``. ``seq_len`` counts tokens, ``global_batch`` samples over all ranks. With
        ``causal_balance`` the sequence must also cut into twice ``cp`` parts, so that each rank
        gets an early and a late one. A known field that is not a positive integer is an error of
        rule ``"number"``; None is absent. Rules whose fields are absent do not apply, and the
        fields are named in ``skipped``. Unknown fields are ignored.
        """
        numbers, wrong = read_numbers(model, seq_len, global_batch)
        return check_rules(
            Subject(
                degrees=self._resolved(),
                ulysses_degree=self.ulysses_degree,
                numbers=numbers,
                wrong=wrong,
                causal_balance=causal_balance,
            )
        )

    def validate(
        self,
        model: object,
        seq_len: int | None = None,
        global_batch: int | None = None,
        *,
        causal_balance: bool = False,
    ) -> None:
        """Raise one `ParallelDimsError` with every error that `check` finds."""
        raise_errors(self.check(model, seq_len, global_batch, causal_balance=causal_balance))

    def layout(self) -> RankLayout:
        """Return which rank sits where; a pure function of the degrees and the order."""
        return RankLayout(self._resolved(), self.ulysses_degree, self.order)

    def build_mesh(
        self, device_type: str | None = None, *, timeout: timedelta | None = None
    ) -> "ParallelMesh":
        """Create the process groups of all axes and return them as torch device meshes.

        Collective: every rank of the default process group calls it with the same degrees. One
        all-reduce over the world compares them first. ``device_type`` is by default the
        accelerator's unless the world runs on gloo alone; an accelerator's device must have been
        set before. ``timeout`` is that of the new groups, torch's default if None. Raises
        `MeshError` without a default process group or where ranks disagree, `ParallelDimsError` on
        ranks whose degrees do not make its world; where only some ranks have such degrees, the
        others raise `MeshError`.
        """
        from ._mesh import build_mesh

        return build_mesh(self, device_type, timeout)

    def summary(self) -> str:
        """Return one line with every degree."""
        names = (*BASE_AXES, "ep", "etp")
        degrees = self._degrees() | {"ulysses": self.ulysses_degree, "world": self.world_size}
        line = [f"{name}={degrees[name]}" for name in names]
        line += [f"{name}={degrees[name]}" for name in ("ulysses", "world") if degrees[name]]
        return " ".join(line)

    @property
    def dp_size(self) -> int:
        """Return how many ranks see different samples: ``dp_replicate * dp_shard``."""
        degrees = self._resolved()
        return degrees["dp_replicate"] * degrees["dp_shard"]

    @property
    def non_dp_size(self) -> int:
        """Return how many ranks see the same samples: ``cp * tp * pp``."""
        degrees = self._resolved()
        return degrees["cp"] * degrees["tp"] * degrees["pp"]

    @property
    def efsdp(self) -> int:
        """Return over how many ranks an expert is sharded: ``dp_shard * cp * tp / (ep * etp)``."""
        return self.layout().size("efsdp")

    @property
    def seq_len_divisor(self) -> int:
        """Return what a sequence length must be a multiple of, causal balance included."""
        degrees = self._resolved()
        return degrees["tp"] * (2 * degrees["cp"] if degrees["cp"] > 1 else 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether there is more than one replica."""
        return self._resolved()["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether ``dp_shard`` is more than one rank."""
        return self._resolved()["dp_shard"] > 1

    @property
    def dp_enabled(self) -> bool:
        """Return whether ranks see different samples."""
        return self.dp_size > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Return whether dense parameters are sharded, over ``dp_shard`` and ``cp``."""
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def cp_enabled(self) -> bool:
        """Return whether sequences are cut over ranks."""
        return self._resolved()["cp"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether layers are cut over ranks."""
        return self._resolved()["tp"] > 1

    @property
    def pp_enabled(self) -> bool:
        """Return whether there is more than one pipeline stage."""
        return self._resolved()["pp"] > 1

    @property
    def ep_enabled(self) -> bool:
        """Return whether experts live on different ranks."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Return whether single experts are cut over ranks."""
        return self.etp > 1
