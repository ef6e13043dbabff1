"""`ParallelDims`: the degrees of one training run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from ._config import (
    add_arguments,
    arguments_from_args,
    arguments_from_config,
    arguments_from_dict,
    name_data,
    read_toml,
    read_yaml,
)
from ._degrees import (
    DEFAULT_ORDER,
    as_world,
    resolve_fields,
    resolved_degrees,
    summarize,
    world_axes,
)
from ._errors import Explanation, ParallelDimsError, Report, raise_errors
from ._layout import RankLayout, ViewConfig
from ._model import read_numbers
from ._names import is_of_framework
from ._rules import Subject, check_rules, explain_rules
from ._topology import Topology, explain_topology, topology_violations

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from ._mesh import ParallelMesh


class _Origin:
    """Where a value of `ParallelDims` came from: no field, so neither compared nor listed."""

    __slots__ = ("_etp_from_tp",)
    _etp_from_tp: bool


@dataclass(frozen=True, slots=True)
class ParallelDims(_Origin):
    """How many ranks each axis has, checked as far as the numbers given allow.

    ``dp_replicate * dp_shard * cp * tp * pp`` is the world, and one of these may be -1: it follows
    from the world. Single values are checked at once, their product as soon as the world is known,
    here or in `resolve`. Degrees may be integers of any type or strings that spell one. A value:
    frozen, hashable, equal by its fields. Needs no torch and communicates nothing.

    Attributes:
        dp_replicate: Replicas of the sharded model.
        dp_shard: Ranks that shard parameters; None is -1 unless another degree is.
        cp: Parts of one sequence.
        tp: Parts of one layer.
        pp: Pipeline stages.
        ep: Ranks that hold different experts.
        etp: Ranks that share one expert: 1 or ``tp``, or any number with ``free_etp``.
        ulysses_degree: Ranks of ``cp`` that exchange heads instead of sequence; it divides ``cp``.
        world_size: Number of ranks.
        ep_mode: ``"folded"``: experts live on ranks that the dense layers already use,
            ``ep * etp * efsdp == dp_shard * cp * tp``. ``"peer"``: ``ep`` is one more factor of the
            world, and for dense layers and data one more axis of data parallelism.
        order: The axes, outermost first: ranks that are neighbours differ along the last. A folded
            ``ep`` has no place of its own in it and may be left out. Also one string with commas.
        fsdp_folds_cp: Parameters are sharded over ``cp`` too. Without, gradients are to be reduced
            over ``replicate``, which has ``cp``.
        free_etp: Folded experts may be cut over any ``etp``, as in Megatron-LM; its groups are then
            neighbours among the ranks of ``dp_shard * cp * tp`` and need not be those of ``tp``.

    Raises:
        ParallelDimsError: With all that can be told to be wrong.

    Example:
        >>> ParallelDims(cp=2, tp=2, ep=4, world_size=16).dp_shard
        4
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
    ep_mode: Literal["folded", "peer"] = "folded"
    order: tuple[str, ...] = DEFAULT_ORDER
    fsdp_folds_cp: bool = True
    free_etp: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "_etp_from_tp", False)
        for name, value in resolve_fields(self._fields()).items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self._fields(), "_etp_from_tp": self._etp_from_tp}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _DEFAULTS}

    def _resolved(self) -> dict[str, int]:
        return resolved_degrees(self._fields())

    def resolve(self, world_size: int) -> "ParallelDims":
        """Return the copy for this world with every degree a number; idempotent.

        Args:
            world_size: Number of ranks.

        Returns:
            A configuration without None or -1 among its degrees, or this one if it is that already.

        Raises:
            ParallelDimsError: The degrees do not make this world, or are for another.
        """
        world = as_world(self._fields(), world_size)
        return self if self.world_size == world else replace(self, world_size=world)

    @classmethod
    def from_config(cls, config: object, world_size: int | None = None) -> "ParallelDims":
        """Return the resolved degrees that a mapping or any object's attributes give.

        Names are the fields of this class, ``dp`` for ``dp_shard``, and those that torchtitan,
        Megatron-LM, accelerate and DeepSpeed use; other names are ignored, unless they say a degree
        other than 1 in another spelling, at any level. Absent and None mean default, except that
        ``etp`` is then ``tp`` unless a name is torchtitan's, accelerate's or DeepSpeed's: so it is
        in Megatron-LM. The constructor's own default is 1, and `summary` says where ``etp`` was
        taken from ``tp``. An ``order`` with dashes is Megatron-LM's, innermost first.

        Args:
            config: The degrees by name, among other things; an empty mapping is all defaults.
            world_size: Number of ranks; None takes the configuration's own ``world_size``.

        Raises:
            ParallelDimsError: A value is no degree, the degrees do not make the world, two names of
                one degree differ, a name says a degree but is not one of those that are read, the
                configuration has another ``world_size`` or none is known, or it has none of the
                names or can have none, as a number or a list.

        Example:
            >>> ParallelDims.from_config({"tensor_model_parallel_size": 4}, 8).dp_shard
            2
        """
        return cls._from_names(config, world_size, needs_world=True)

    @classmethod
    def _from_names(
        cls, config: object, world_size: int | None, *, needs_world: bool
    ) -> "ParallelDims":
        arguments, found, etp_is_tp = arguments_from_config(config, world_size)
        given = {**_DEFAULTS, "world_size": world_size, **arguments}
        try:
            dims = cls(**resolve_fields(given, found, needs_world=needs_world, etp_is_tp=etp_is_tp))
        except ParallelDimsError as error:
            raise name_data(error, config) from None
        object.__setattr__(dims, "_etp_from_tp", etp_is_tp)
        return dims

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "ParallelDims":
        """Return the degrees whose `to_dict` this is; an unknown key is an error."""
        arguments, unknown = arguments_from_dict(mapping)
        return cls(**resolve_fields({**_DEFAULTS, **arguments}, unknown))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain integers, None and a list, ready for JSON."""
        return {**self._fields(), "order": list(self.order)}

    @classmethod
    def from_toml(
        cls,
        path: str | PathLike[str],
        table: str | None = None,
        world_size: int | None = None,
    ) -> "ParallelDims":
        """Return the degrees that a TOML file has, at its top or in a table such as ``"run.mesh"``.

        A table with names of a framework, such as torchtitan's ``"parallelism"``, is read as
        `from_config` does. One with the fields of this class alone is read as `from_dict` does.

        Args:
            path: The file.
            table: The name of a table, with dots between levels; None is the file's top.
            world_size: Number of ranks; None takes the table's own ``world_size``, if it has one.

        Raises:
            ParallelDimsError: There is no such table, or its degrees are wrong as in `from_config`
                or `from_dict`.
        """
        return cls._from_table(read_toml(path, table), world_size)

    @classmethod
    def _from_table(cls, table: Mapping[str, Any], world_size: int | None) -> "ParallelDims":
        if not is_of_framework(table):
            dims = cls.from_dict(table)
            return dims if world_size is None else dims.resolve(world_size)
        return cls._from_names(table, world_size, needs_world=False)

    @classmethod
    def from_yaml(
        cls,
        path: str | PathLike[str],
        table: str | None = None,
        world_size: int | None = None,
    ) -> "ParallelDims":
        """Return the degrees that a YAML file has, as `from_toml` does; needs PyYAML."""
        return cls._from_table(read_yaml(path, table), world_size)

    @staticmethod
    def add_arguments(parser: "ArgumentParser") -> None:
        """Add one optional argument for each degree, and ``--order``, to a command line."""
        add_arguments(parser)

    @classmethod
    def from_args(cls, args: "Namespace", world_size: int | None = None) -> "ParallelDims":
        """Return the degrees given on a command line; what is not given has its default."""
        return cls(**arguments_from_args(args), world_size=world_size)

    def check(
        self,
        model: object,
        seq_len: int | None = None,
        global_batch: int | None = None,
        *,
        causal_balance: bool = False,
        sequence_parallel: bool = True,
        topology: Topology | None = None,
    ) -> Report:
        """Return every rule that these degrees break for a model, its sequences and its batch.

        Rules whose fields are absent do not apply, and the fields are named in ``skipped``. Unknown
        fields are ignored, None is absent; a known field that is not a positive integer is an error
        of rule ``"number"``.

        Args:
            model: A mapping or configuration object (Hugging Face ones as they are), or an object
                that has one as ``config``.
            seq_len: Tokens of one sequence.
            global_batch: Samples of one step over all ranks.
            causal_balance: The sequence must also cut into twice ``cp`` parts, so that each rank
                gets an early and a late one.
            sequence_parallel: Ranks of ``tp`` hold parts of the sequence between the layers, so
                that ``tp`` must divide it too. False for plain tensor parallelism, whose ranks all
                hold the whole sequence there.
            topology: With one, axes that cross a node are advice.

        Returns:
            Errors and advice, and the names of the fields that were absent.

        Raises:
            ParallelDimsError: The model can have no fields, as a name or a number, or a degree is
                still to be inferred.
        """
        report = check_rules(
            self._subject(model, seq_len, global_batch, causal_balance, sequence_parallel)
        )
        nodes = () if topology is None else topology_violations(self.layout(), topology)
        return Report([*report, *nodes], report.skipped)

    def _subject(
        self,
        model: object,
        seq_len: object,
        global_batch: object,
        causal_balance: bool,
        sequence_parallel: bool,
    ) -> Subject:
        numbers, wrong = read_numbers(model, seq_len, global_batch)
        return Subject(
            degrees=self._resolved() | {"ulysses_degree": self.ulysses_degree or 1},
            sharding=self._view_config().folds.sharding,
            numbers=numbers,
            wrong=wrong,
            causal_balance=causal_balance,
            sequence_parallel=sequence_parallel,
            ep_mode=self.ep_mode,
            free_etp=self.free_etp,
        )

    def validate(
        self,
        model: object,
        seq_len: int | None = None,
        global_batch: int | None = None,
        *,
        causal_balance: bool = False,
        sequence_parallel: bool = True,
    ) -> None:
        """Raise one error with every error that `check` finds; arguments as there.

        Raises:
            ParallelDimsError: At least one rule is broken; ``violations`` has all of them.

        Example:
            >>> ParallelDims(tp=4, dp_shard=1).validate({}, seq_len=61, sequence_parallel=False)
        """
        raise_errors(
            self.check(
                model,
                seq_len,
                global_batch,
                causal_balance=causal_balance,
                sequence_parallel=sequence_parallel,
            )
        )

    def explain(
        self,
        model: object = None,
        seq_len: int | None = None,
        global_batch: int | None = None,
        *,
        causal_balance: bool = False,
        sequence_parallel: bool = True,
        topology: Topology | None = None,
    ) -> tuple[Explanation, ...]:
        """Return every rule with its numbers and what it says of them.

        Args:
            model: As in `check`; None has no fields.
            seq_len: Tokens of one sequence.
            global_batch: Samples of one step over all ranks.
            causal_balance: As in `check`.
            sequence_parallel: As in `check`.
            topology: With one, a line for each axis says whether it leaves a node.

        Returns:
            One explanation for each rule, in a fixed order.

        Raises:
            ParallelDimsError: As in `check`.
        """
        model = {} if model is None else model
        subject = self._subject(model, seq_len, global_batch, causal_balance, sequence_parallel)
        nodes = () if topology is None else explain_topology(self.layout(), topology)
        return (*explain_rules(subject, world_axes(self.ep_mode)), *nodes)

    def _view_config(self) -> ViewConfig:
        return ViewConfig(
            degrees=self._resolved(),
            ulysses_degree=self.ulysses_degree,
            peer=self.ep_mode == "peer",
            fsdp_folds_cp=self.fsdp_folds_cp,
        )

    def layout(self) -> RankLayout:
        """Return which rank sits where; a pure function of the degrees and the order.

        Raises:
            ParallelDimsError: A degree is still to be inferred.
        """
        return RankLayout(self._view_config(), self.order)

    def build_mesh(
        self,
        device_type: str | None = None,
        *,
        topology: Topology | None = None,
        timeout: timedelta | None = None,
    ) -> "ParallelMesh":
        """Create the process groups of all axes and return them as torch device meshes.

        Collective: every rank of the default process group calls it with the same degrees. One
        all-reduce over the world compares them before a group is created, another one tells
        afterwards whether all ranks succeeded. Where one fails, every rank destroys the groups
        that it created and raises.

        Args:
            device_type: One that the default process group has a backend for, or ``"meta"``. By
                default the accelerator's, unless the world runs on gloo alone or has no backend for
                it. An accelerator's device must have been set before.
            topology: How many ranks a node has; it must fit the world. The mesh then knows which of
                its axes cross a node.
            timeout: Timeout of the new groups, torch's default if None. A rank whose peer fails
                while they create a group waits for it that long.

        Returns:
            The meshes; as a context manager it destroys its groups at the end of the block.

        Raises:
            MeshError: There is no default process group, ranks disagree, the device type has no
                backend in this world, the device type or the timeout is none, or another rank
                failed.
            ParallelDimsError: On ranks whose degrees or topology do not make its world; where only
                some ranks have such degrees, the others raise `MeshError`.
            RuntimeError: Torch could not create a group of this rank; a note names the group.

        Example:
            >>> with ParallelDims(tp=2).build_mesh() as mesh:
            ...     train(mesh["dp_replicate", "fsdp"], mesh["tp"])
        """
        from ._mesh import build_mesh

        return build_mesh(self, device_type, topology, timeout)

    def summary(self) -> str:
        """Return one line with every degree, and whether `from_config` took ``etp`` from ``tp``."""
        return summarize(self._fields(), etp_from_tp=self._etp_from_tp)

    @property
    def dp_size(self) -> int:
        """Return how many ranks see different samples: ``dp_replicate * dp_shard``, peer ``ep``."""
        return self.layout().size("dp")

    @property
    def non_dp_size(self) -> int:
        """Return how many ranks see the same samples: ``cp * tp * pp``."""
        degrees = self._resolved()
        return degrees["cp"] * degrees["tp"] * degrees["pp"]

    @property
    def efsdp(self) -> int:
        """Return over how many ranks an expert is sharded; see `ParallelDims` for the rule."""
        return self.layout().size("efsdp")

    @property
    def seq_len_divisor(self) -> int:
        """Return what a sequence length must be a multiple of.

        With causal balance and with sequence parallelism over ``tp``.
        """
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
        """Return whether dense parameters are sharded, over all that ``fsdp`` folds."""
        return self.layout().size("fsdp") > 1

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


_DEFAULTS = {field.name: field.default for field in fields(ParallelDims)}
