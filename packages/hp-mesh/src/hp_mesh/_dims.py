"""`ParallelDims`: the degrees of one training run."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from datetime import timedelta
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from ._config import (
    OPTIONS,
    arguments_from_config,
    arguments_from_dict,
    is_of_framework,
    name_source_of_dp_shard,
    read_field,
    read_toml,
    read_yaml,
)
from ._degrees import BASE_AXES, DEFAULT_ORDER, DEGREES, degrees_from, resolve_fields, world_axes
from ._errors import (
    INFERRED,
    Explanation,
    ParallelDimsError,
    Report,
    as_degree,
    as_flag,
    join_words,
    raise_errors,
    refusal,
)
from ._layout import Folds, MeshPlan, RankLayout, plan_mesh
from ._model import read_numbers
from ._rules import (
    Subject,
    Topology,
    check_rules,
    explain_rules,
    explain_topology,
    topology_violations,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from ._mesh import ParallelMesh


class _Origin:
    """Base class with one slot: True if `from_config` took ``etp`` from ``tp``.

    The slot is not a dataclass field, so ``==`` and `to_dict` ignore it.
    """

    __slots__ = ("_etp_from_tp",)
    _etp_from_tp: bool


@dataclass(frozen=True, slots=True)
class ParallelDims(_Origin):
    """Parallel degrees of one training run: how many ranks each axis has.

    The product ``dp_replicate * dp_shard * cp * tp * pp`` is the world size; with
    ``ep_mode="peer"``, ``ep`` is one more factor. One of these degrees may be -1: it is then
    inferred from the world size. Each value is checked at once. The product is checked when the
    world size is known, here or in `resolve`.

    Degrees may be integers of any type, or strings such as ``"8"``. An instance is frozen, hashable
    and compared by its fields. It needs no torch and communicates nothing.

    Args:
        dp_replicate: Number of replicas of the sharded model.
        dp_shard: Number of ranks that shard parameters. Defaults to -1, or to 1 if another degree
            is -1.
        cp: Number of ranks that share one sequence (context parallel).
        tp: Number of ranks that share one layer (tensor parallel).
        pp: Number of pipeline stages.
        ep: Number of ranks that hold different experts.
        etp: Number of ranks that share one expert: 1 or ``tp``. Any number if ``free_etp`` is True.
        ulysses_degree: Number of ranks of ``cp`` that exchange heads instead of keys and values. It
            divides ``cp``.
        world_size: Number of ranks. If None, `resolve` sets it later.
        ep_mode: With ``"folded"``, experts use the ranks of the dense layers:
            ``ep * etp * efsdp == dp_shard * cp * tp``, where ``efsdp`` ranks shard each expert.
            With ``"peer"``, ``ep`` is a separate axis. Its ranks have different samples, and dense
            parameters are sharded over it too.
        order: Names of the axes, outermost first. Consecutive ranks differ along the last axis.
            One string with commas works too. ``ep`` may be left out if it is folded.
        fsdp_folds_cp: If True, parameters are sharded over ``cp`` too. If False, they are not, and
            gradients have to be reduced over ``mesh["replicate"]``, which has the ranks of
            ``dp_replicate`` and ``cp``.
        free_etp: If True, folded experts may be split over any ``etp``, as in Megatron-LM. The
            groups of ``etp`` are then consecutive among the ranks of ``dp_shard``, ``cp`` and
            ``tp``, and they can differ from the groups of ``tp``.

    Raises:
        ParallelDimsError: A value is not a degree, or the degrees break a rule. The error lists all
            broken rules.

    Examples:
        >>> dims = ParallelDims(cp=2, tp=2, ep=4, world_size=16)
        >>> dims.dp_shard
        4
        >>> dims.efsdp
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
        """Return every degree as a number.

        Raises:
            ParallelDimsError: A degree still has to be inferred, or the product is too large.
        """
        if self.world_size is not None:
            return {name: getattr(self, name) for name in DEGREES}
        degrees = degrees_from(self._fields())
        unknown = [name for name, degree in degrees.items() if degree == INFERRED]
        if unknown:
            reason = f"{join_words(unknown)} is not known yet; call resolve(world_size)"
            raise refusal("resolved", reason, dict.fromkeys(unknown, INFERRED))
        world = prod(degrees[name] for name in world_axes(self.ep_mode))
        resolve_fields({**self._fields(), "world_size": world})
        return degrees

    def resolve(self, world_size: int) -> "ParallelDims":
        """Return a copy for a world size, with every degree a number.

        Args:
            world_size: Number of ranks.

        Returns:
            A configuration without None or -1 among its degrees. It is this one if nothing changes.

        Raises:
            ParallelDimsError: The product of the degrees is not ``world_size``, or this
                configuration has another world size.
        """
        world = as_degree("world_size", world_size)
        if self.world_size == world:
            return self
        if self.world_size is not None:
            reason = f"world_size={world} is not the world_size={self.world_size} that these "
            reason += f"degrees are for ({self.summary()})"
            values = {"world_size": world, "configured": self.world_size}
            raise refusal("world", reason, values)
        dims, given = copy(self), {**self._fields(), "world_size": world}
        for name, value in resolve_fields(given, etp_is_tp=self._etp_from_tp).items():
            object.__setattr__(dims, name, value)
        return dims

    @classmethod
    def from_config(cls, config: object, world_size: int | None = None) -> "ParallelDims":
        """Read degrees from a mapping, or from the attributes of an object, and resolve them.

        Reads the fields of this class, ``dp`` for ``dp_shard``, and the names that torchtitan,
        Megatron-LM, accelerate and DeepSpeed use. Some frameworks have further names of degrees,
        such as ``pp_size``. They are not read: if such a name has a value above 1, the error says
        which name to use. All other names are ignored.

        A field that is absent or None has its default. ``etp`` is an exception: with the names of
        this class or of Megatron-LM it defaults to ``tp``, as in Megatron-LM, and `summary` says
        so. An ``order`` with dashes has Megatron-LM's meaning: innermost first.

        Args:
            config: Degrees by name, among other fields. An empty mapping means all defaults.
            world_size: Number of ranks. Defaults to the field ``world_size`` of ``config``.

        Returns:
            The resolved degrees.

        Raises:
            ParallelDimsError: A value is not a degree; the degrees do not fit the world size; two
                names of one degree have different values; a name of a degree that is not read has a
                value above 1; the world size is missing or differs; or ``config`` has none of the
                names that are read.

        Examples:
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
            raise name_source_of_dp_shard(error, config) from None
        object.__setattr__(dims, "_etp_from_tp", etp_is_tp)
        return dims

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "ParallelDims":
        """Read degrees from a mapping that `to_dict` made.

        Args:
            mapping: Fields of this class by name.

        Returns:
            The degrees.

        Raises:
            ParallelDimsError: A key is not a field of this class, or the degrees are wrong.

        Examples:
            >>> ParallelDims.from_dict({"tp": 2, "world_size": 8}).dp_shard
            4
        """
        arguments, unknown = arguments_from_dict(mapping)
        return cls(**resolve_fields({**_DEFAULTS, **arguments}, unknown))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as integers, strings, None and a list, ready for JSON.

        Returns:
            One item for each field of this class.
        """
        return {**self._fields(), "order": list(self.order)}

    @classmethod
    def from_toml(
        cls, path: str | PathLike[str], table: str | None = None, world_size: int | None = None
    ) -> "ParallelDims":
        """Read degrees from a TOML file or from one table of it.

        A table with names of a framework, such as torchtitan's ``"parallelism"``, is read by the
        rules of `from_config`. A table with fields of this class only is read by the rules of
        `from_dict`.

        Args:
            path: Path of the file.
            table: Name of a table, with dots between levels, such as ``"run.mesh"``. Defaults to
                the top level.
            world_size: Number of ranks. Defaults to ``world_size`` of the table, if it is there.

        Returns:
            The degrees.

        Raises:
            ParallelDimsError: The table does not exist, or its degrees are wrong.
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
        cls, path: str | PathLike[str], table: str | None = None, world_size: int | None = None
    ) -> "ParallelDims":
        """Read degrees from a YAML file or from one table of it. Needs PyYAML.

        Args:
            path: Path of the file.
            table: Name of a table, with dots between levels. Defaults to the top level.
            world_size: Number of ranks. Defaults to ``world_size`` of the table, if it is there.

        Returns:
            The degrees, by the rules of `from_toml`.

        Raises:
            ParallelDimsError: The table does not exist, or its degrees are wrong.
        """
        return cls._from_table(read_yaml(path, table), world_size)

    @staticmethod
    def add_arguments(parser: "ArgumentParser") -> None:
        """Add one optional argument for each field except ``world_size`` to a command line.

        Args:
            parser: Parser to which the arguments are added.

        Examples:
            >>> from argparse import ArgumentParser
            >>> parser = ArgumentParser()
            >>> ParallelDims.add_arguments(parser)
            >>> ParallelDims.from_args(parser.parse_args(["--tp", "2"]), world_size=8).dp_shard
            4
        """
        group = parser.add_argument_group("parallel degrees")
        for name, text in OPTIONS.items():
            option = name.replace("_", "-")
            # Values stay strings, so that a wrong one raises the same error as everywhere else.
            metavar = "N" if name in (*DEGREES, "ulysses_degree") else option.upper()
            group.add_argument(f"--{option}", metavar=metavar, help=text)

    @classmethod
    def from_args(cls, args: "Namespace", world_size: int | None = None) -> "ParallelDims":
        """Read degrees from parsed command-line arguments; see `add_arguments`.

        Args:
            args: Result of ``parse_args``. An argument that was not given has its default.
            world_size: Number of ranks. If None, `resolve` sets it later.

        Returns:
            The degrees.

        Raises:
            ParallelDimsError: A value is not a degree, or the degrees break a rule.
        """
        given = {name: read_field(args, name) for name in OPTIONS}
        given = {name: value for name, value in given.items() if value is not None}
        return cls(**given, world_size=world_size)

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
        """List the rules that these degrees break for a model, its sequences and its batch.

        A rule is skipped if it needs a field that is absent or None. Unknown fields are ignored. A
        known field that is not a positive integer is an error of rule ``"number"``.

        Args:
            model: A mapping, a configuration object such as one of Hugging Face, or an object with
                such a ``config``.
            seq_len: Number of tokens of one sequence.
            global_batch: Number of sequences of one step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide the sequence, so that each rank gets an
                early and a late part.
            sequence_parallel: If True, the ranks of ``tp`` hold parts of the sequence between
                layers, so ``tp`` must divide it. If False, each of them holds the whole sequence.
            topology: If given, each axis that crosses nodes is reported as advice.

        Returns:
            Errors and advice. ``skipped`` has the names of the absent fields.

        Raises:
            ParallelDimsError: ``model`` cannot have fields (a string or a number, for example) or
                has two values for one field, an option is not a bool, or a degree still has to be
                inferred.

        Examples:
            >>> dims = ParallelDims(tp=4, world_size=8)
            >>> [str(broken) for broken in dims.check({"num_attention_heads": 6})]
            ['tp=4 does not divide num_attention_heads=6; use 1, 2, 3 or 6']
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
            sharding=self._folds().sharding,
            numbers=numbers,
            wrong=wrong,
            causal_balance=as_flag("causal_balance", causal_balance),
            sequence_parallel=as_flag("sequence_parallel", sequence_parallel),
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
        """Raise one error that lists every error that `check` finds.

        Args:
            model: A mapping, a configuration object such as one of Hugging Face, or an object with
                such a ``config``.
            seq_len: Number of tokens of one sequence.
            global_batch: Number of sequences of one step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide the sequence.
            sequence_parallel: If True, ``tp`` must divide the sequence.

        Raises:
            ParallelDimsError: At least one rule is broken. ``violations`` lists all of them.

        Examples:
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
        """List every rule with the numbers that it read and its verdict.

        Args:
            model: A mapping or a configuration object, as in `check`. Defaults to an empty
                mapping.
            seq_len: Number of tokens of one sequence.
            global_batch: Number of sequences of one step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide the sequence.
            sequence_parallel: If True, ``tp`` must divide the sequence.
            topology: If given, one explanation for each axis says whether it crosses nodes.

        Returns:
            One explanation for each rule, always in the same order. With ``topology``, one for the
            world size and one for each axis follow.

        Raises:
            ParallelDimsError: ``model`` is neither a mapping nor an object with attributes, has two
                values for one field, or a degree still has to be inferred.

        Examples:
            >>> print(ParallelDims(tp=2, world_size=4).explain()[0].text)
            dp_shard*tp=2*2 is world_size=4
        """
        model = {} if model is None else model
        subject = self._subject(model, seq_len, global_batch, causal_balance, sequence_parallel)
        nodes = () if topology is None else explain_topology(self.layout(), topology)
        return (*explain_rules(subject, world_axes(self.ep_mode)), *nodes)

    def _folds(self) -> Folds:
        return Folds(
            peer=self.ep_mode == "peer",
            over_tp=self.etp == self.tp > 1,
            fsdp_folds_cp=self.fsdp_folds_cp,
            ulysses=self.ulysses_degree is not None,
        )

    def _axis_degrees(self) -> dict[str, int]:
        """Return the degrees that sizes of axes follow from."""
        degrees = self._resolved()
        return (
            degrees if self.ulysses_degree is None else degrees | {"ulysses": self.ulysses_degree}
        )

    def _plan_mesh(self, world_size: int, rank: int) -> "tuple[ParallelDims, MeshPlan]":
        """Return the resolved degrees, and the groups and views of one rank."""
        dims = self.resolve(world_size)
        return dims, plan_mesh(dims._axis_degrees(), dims._folds(), dims.order, rank)

    def layout(self) -> RankLayout:
        """Return the position of every rank on every axis.

        Returns:
            The layout. It depends on the degrees and the order only.

        Raises:
            ParallelDimsError: A degree still has to be inferred.

        Examples:
            >>> ParallelDims(tp=2, world_size=4).layout().group("tp", rank=3)
            (2, 3)
        """
        return RankLayout(self._axis_degrees(), self._folds(), self.order)

    def build_mesh(
        self,
        device_type: str | None = None,
        *,
        topology: Topology | None = None,
        timeout: timedelta | None = None,
    ) -> "ParallelMesh":
        """Create the process groups of all axes and return them as torch device meshes.

        Collective: every rank of the default process group calls it with the same degrees. One
        all-reduce over the world compares the degrees before a group is created. A second one
        compares the success of all ranks afterwards. If one rank fails, every rank destroys the
        groups that it created, and raises.

        Args:
            device_type: A device type for which the default process group has a backend, or
                ``"meta"``. Defaults to the accelerator's type; to ``"cpu"`` if the world has no
                backend for it. Set the accelerator's current device before.
            topology: Number of ranks per node. The mesh then reports the axes that cross nodes.
            timeout: Timeout of the new groups. Defaults to torch's default. If one rank fails while
                groups are created, another rank can wait for it that long.

        Returns:
            The meshes. If they are used as a context manager, their groups are destroyed at the end
            of the block.

        Raises:
            MeshError: There is no default process group; the ranks have different degrees; the
                device type or the timeout is invalid; the device type has no backend; or another
                rank failed.
            ParallelDimsError: The degrees or the topology of this rank do not fit its world. Ranks
                with correct degrees raise `MeshError` instead.
            RuntimeError: torch could not create a group of this rank. A note names the group.

        Examples:
            On 4 ranks:

            >>> with ParallelDims(tp=2).build_mesh() as mesh:
            ...     mesh["tp"].size(), mesh["dp_replicate", "fsdp"].shape
            (2, (1, 2))
        """
        from ._mesh import build_mesh

        return build_mesh(self, device_type, topology, timeout)

    def summary(self) -> str:
        """Return all degrees in one line.

        Returns:
            For example ``"dp_replicate=1 dp_shard=4 ..."``. It says ``(from tp)`` after ``etp`` if
            `from_config` took ``etp`` from ``tp``.
        """
        degrees = degrees_from(self._fields())
        words: dict[str, object] = {name: degrees[name] for name in (*BASE_AXES, "ep", "etp")}
        if self._etp_from_tp and self.tp != 1:
            words["etp"] = f"{words['etp']} (from tp)"
        others = {"ulysses": self.ulysses_degree, "world": self.world_size}
        words |= {name: value for name, value in others.items() if value is not None}
        for name in ("ep_mode", "fsdp_folds_cp", "free_etp"):
            if getattr(self, name) != _DEFAULTS[name]:
                words[name] = getattr(self, name)
        return " ".join(f"{name}={value}" for name, value in words.items())

    @property
    def dp_size(self) -> int:
        """Number of ranks with different samples.

        It is ``dp_replicate * dp_shard``, times ``ep`` in peer mode.
        """
        return self.layout().size("dp")

    @property
    def non_dp_size(self) -> int:
        """Number of ranks that share their samples: ``cp * tp * pp``."""
        degrees = self._resolved()
        return degrees["cp"] * degrees["tp"] * degrees["pp"]

    @property
    def efsdp(self) -> int:
        """Number of ranks over which each expert is sharded."""
        return self.layout().size("efsdp")

    @property
    def seq_len_divisor(self) -> int:
        """Number of which a sequence length must be a multiple, with balanced causal attention.

        It is ``2 * cp * tp`` if ``cp`` is above 1, else ``tp``.
        """
        degrees = self._resolved()
        return degrees["tp"] * (2 * degrees["cp"] if degrees["cp"] > 1 else 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model has more than one replica."""
        return self._resolved()["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether ``dp_shard`` is above 1."""
        return self._resolved()["dp_shard"] > 1

    @property
    def dp_enabled(self) -> bool:
        """Whether ranks have different samples."""
        return self.dp_size > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether dense parameters are sharded over more than one rank."""
        return self.layout().size("fsdp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split over ranks."""
        return self._resolved()["cp"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split over ranks."""
        return self._resolved()["tp"] > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return self._resolved()["pp"] > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether different ranks hold different experts."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Whether single experts are split over ranks."""
        return self.etp > 1


_DEFAULTS = {field.name: field.default for field in fields(ParallelDims)}
