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


class _EtpSource:
    """Base class with one attribute that is not a dataclass field of `ParallelDims`.

    ``_etp_from_tp`` is True if `ParallelDims.from_config` set ``etp`` to the value of ``tp``. The
    attribute is not a field, so ``==`` and `ParallelDims.to_dict` ignore it.
    """

    __slots__ = ("_etp_from_tp",)
    _etp_from_tp: bool


@dataclass(frozen=True, slots=True)
class ParallelDims(_EtpSource):
    """Parallel degrees of one training run: the sizes of the mesh dimensions.

    The product ``dp_replicate * dp_shard * cp * tp * pp`` is the world size. With
    ``ep_mode="peer"``, ``ep`` is another factor. One of these degrees may be -1: this degree is
    then inferred from the world size. Each value is checked when the object is created. The product
    is checked when the world size is known, which may be later, in `resolve`.

    Degrees may be integers of any type, or strings such as ``"8"``. An instance is frozen, hashable
    and compared by its fields. `ParallelDims` works without torch. Only `build_mesh` communicates.

    Args:
        dp_replicate: Number of replicas of the sharded model.
        dp_shard: Number of ranks that shard parameters. Defaults to -1, or to 1 if another degree
            is -1.
        cp: Number of ranks that share one sequence (context parallel).
        tp: Number of ranks that share one layer (tensor parallel).
        pp: Number of pipeline stages.
        ep: Number of ranks that hold different experts.
        etp: Number of ranks that share one expert: 1 or ``tp``. Any number if ``free_etp`` is True.
        ulysses_degree: Number of ranks inside ``cp`` that exchange attention heads by all-to-all
            (DeepSpeed-Ulysses). It divides ``cp``. Defaults to None: no Ulysses attention.
        world_size: Number of ranks. If it is None, the world size is set later, in `resolve`.
        ep_mode: With ``"folded"``, experts reuse the ranks of the dense layers, and
            ``ep * etp * efsdp == dp_shard * cp * tp``. FSDP shards each expert over ``efsdp``
            ranks. With ``"peer"``, ``ep`` is another factor of the world size. Ranks along ``ep``
            then have different samples, and dense parameters are sharded over them too.
        order: Names of the mesh dimensions, outermost first, as a sequence or as one string with
            commas. Consecutive ranks differ along the last dimension. ``ep`` is optional if
            ``ep_mode`` is ``"folded"``.
        fsdp_folds_cp: If True, FSDP shards parameters over ``cp`` too. If False, the ranks of
            ``cp`` hold replicas, and gradients must be reduced over ``mesh["replicate"]``, which
            has the ranks of ``dp_replicate`` and ``cp``.
        free_etp: If True, ``etp`` may differ from 1 and ``tp``, as in Megatron-LM. Each group of
            ``etp`` then consists of consecutive ranks of ``dp_shard``, ``cp`` and ``tp``, and may
            differ from the groups of ``tp``. Has no effect if ``ep_mode`` is ``"peer"``.

    Raises:
        ParallelDimsError: A value is not a degree, or the degrees break a rule, for example
            because their product is not the world size. The error lists all broken rules.

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
        """Return every degree by its name, as a positive integer.

        Raises:
            ParallelDimsError: A degree is -1 because the world size is unknown, or the product of
                the degrees is too large.
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
        """Set the world size and infer the degree that is -1.

        Args:
            world_size: Number of ranks.

        Returns:
            A copy in which every degree is a positive integer. If this instance already has this
            world size, it is returned itself.

        Raises:
            ParallelDimsError: The product of the degrees is not ``world_size``, or this instance
                already has another world size.
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
        """Read degrees from a configuration of this or another framework.

        These names are read: the fields of this class, ``dp`` (for ``dp_shard``), and the names of
        torchtitan, Megatron-LM, accelerate and DeepSpeed. Some names in other frameworks, such as
        ``pp_size``, are known but not read. If such a name has a value above 1, an error says which
        name to use. All other names are ignored.

        A field that is absent or None has its default. ``etp`` is an exception: its default is
        ``tp``, as in Megatron-LM, if ``config`` uses only names of this class and of Megatron-LM.
        An ``order`` with dashes, such as ``"tp-cp-ep-dp-pp"``, is innermost first, as in
        Megatron-LM.

        Args:
            config: A mapping, or an object with attributes. It may have other fields too. An empty
                mapping means all defaults.
            world_size: Number of ranks. Defaults to the field ``world_size`` of ``config``.

        Returns:
            The degrees for this world size, all positive integers.

        Raises:
            ParallelDimsError: A value is not a degree; the degrees do not fit the world size; two
                names of one degree have different values; a known name that is not read has a
                value above 1; the world size is missing, or differs from the one in ``config``; or
                ``config`` has none of the names that are read.

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
        """Create an instance from the result of `to_dict`.

        Args:
            mapping: Fields of this class by name. Absent fields have their defaults.

        Returns:
            An instance with these fields.

        Raises:
            ParallelDimsError: A key is not a field of this class, or the degrees are wrong.

        Examples:
            >>> ParallelDims.from_dict({"tp": 2, "world_size": 8}).dp_shard
            4
        """
        arguments, unknown = arguments_from_dict(mapping)
        return cls(**resolve_fields({**_DEFAULTS, **arguments}, unknown))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in a form that JSON can store.

        Returns:
            The value of each field by its name. ``order`` is a list. `from_dict` reads the result.
        """
        return {**self._fields(), "order": list(self.order)}

    @classmethod
    def from_toml(
        cls, path: str | PathLike[str], table: str | None = None, world_size: int | None = None
    ) -> "ParallelDims":
        """Read degrees from a TOML file or from one table of the file.

        If the table has a name of another framework, such as ``tensor_parallel_degree`` of
        torchtitan, it is read as in `from_config`. If not, it is read as in `from_dict`.

        Args:
            path: Path of the file.
            table: Name of a table, with dots between levels, such as ``"run.mesh"``. Defaults to
                the top level of the file.
            world_size: Number of ranks. Defaults to the field ``world_size`` of the table. If both
                are absent, call `resolve` later.

        Returns:
            An instance with these degrees.

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
        """Read degrees from a YAML file or from one mapping in the file. Needs PyYAML.

        If the mapping has a name of another framework, such as ``dp_shard_size`` of accelerate, it
        is read as in `from_config`. If not, it is read as in `from_dict`.

        Args:
            path: Path of the file.
            table: Name of the mapping, with dots between levels, such as ``"run.mesh"``. Defaults
                to the top level of the file.
            world_size: Number of ranks. Defaults to the field ``world_size`` of the mapping. If
                both are absent, call `resolve` later.

        Returns:
            An instance with these degrees.

        Raises:
            ParallelDimsError: The mapping does not exist, or its degrees are wrong.
        """
        return cls._from_table(read_yaml(path, table), world_size)

    @staticmethod
    def add_arguments(parser: "ArgumentParser") -> None:
        """Add a command-line option for each field of this class except ``world_size``.

        The options have the names of the fields, with dashes: ``--dp-shard``, ``--tp``.

        Args:
            parser: Parser to which the options are added.

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
        """Read degrees from the command-line options that `add_arguments` added.

        Args:
            args: Result of ``parse_args``. Options that the user did not give have the default of
                their field.
            world_size: Number of ranks. If it is None, call `resolve` later.

        Returns:
            An instance with these degrees.

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

        A rule is skipped if a field that it needs is absent or None. Unknown fields of the model
        are ignored. If a known field has an invalid value, the report has an error of the rule
        ``"number"``.

        Args:
            model: A mapping, a configuration object such as a Hugging Face ``PretrainedConfig``, or
                an object with an attribute ``config``, such as a Hugging Face model.
            seq_len: Number of tokens per sequence.
            global_batch: Number of sequences per optimizer step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``. Each rank then computes an
                early and a late part of the sequence, which balances causal attention.
            sequence_parallel: If True, activations between layers are sharded over ``tp`` along the
                sequence, so ``tp`` must divide ``seq_len``. If False, each rank of ``tp`` holds
                whole sequences.
            topology: Number of ranks per node. If given, the report has advice for each mesh
                dimension that crosses nodes.

        Returns:
            A sequence of violations: errors and advice. Its attribute ``skipped`` has the names of
            the absent fields.

        Raises:
            ParallelDimsError: ``model`` has no fields (for example a string or a number); the model
                has two values for one field; an option is not a bool; or a degree is -1 because the
                world size is unknown.

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
        """Raise an error if the degrees break a rule for a model, its sequences and its batch.

        Advice, for example about unequal pipeline stages, does not raise; `check` returns it.

        Args:
            model: A mapping, a configuration object such as a Hugging Face ``PretrainedConfig``, or
                an object with an attribute ``config``, such as a Hugging Face model.
            seq_len: Number of tokens per sequence.
            global_batch: Number of sequences per optimizer step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``.
            sequence_parallel: If True, ``tp`` must divide ``seq_len``.

        Raises:
            ParallelDimsError: At least one rule is broken. The attribute ``violations`` lists all
                broken rules.

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
        """Explain for every rule of `check` which numbers were compared and whether the rule holds.

        Args:
            model: A mapping or a configuration object, as in `check`. Defaults to an empty
                mapping.
            seq_len: Number of tokens per sequence.
            global_batch: Number of sequences per optimizer step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``.
            sequence_parallel: If True, ``tp`` must divide ``seq_len``.
            topology: Number of ranks per node. If given, the result also says which mesh dimensions
                cross nodes.

        Returns:
            One explanation for each rule, always in the same order. If ``topology`` is given, an
            explanation for the world size and one for each mesh dimension follow.

        Raises:
            ParallelDimsError: ``model`` is neither a mapping nor an object with attributes; the
                model has two values for one field; or a degree is -1 because the world size is
                unknown.

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
        """Return the degrees by name, in the form that `RankLayout` takes.

        The dict has ``"ulysses"`` only if ``ulysses_degree`` is set.
        """
        degrees = self._resolved()
        return (
            degrees if self.ulysses_degree is None else degrees | {"ulysses": self.ulysses_degree}
        )

    def _plan_mesh(self, world_size: int, rank: int) -> "tuple[ParallelDims, MeshPlan]":
        """Return the degrees for a world size, and the process groups that one rank must create."""
        dims = self.resolve(world_size)
        return dims, plan_mesh(dims._axis_degrees(), dims._folds(), dims.order, rank)

    def layout(self) -> RankLayout:
        """Return an object that computes coordinates and groups of any rank.

        Returns:
            The layout of all ranks. It depends on the fields of this instance only and needs no
            process group.

        Raises:
            ParallelDimsError: A degree is -1 because the world size is unknown.

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
        """Create the process groups of all mesh dimensions and return torch device meshes.

        Collective: every rank of the default process group calls this method with the same
        arguments. One all-reduce compares the arguments before groups are created. A second
        all-reduce compares whether all ranks succeeded. If one rank fails, every rank destroys the
        groups that it created, and raises. Set the accelerator's current device before the call.

        Args:
            device_type: A device type for which the default process group has a backend, or
                ``"meta"``. Defaults to the accelerator's type if the default process group has a
                backend for it, else to ``"cpu"``.
            topology: Number of ranks per node, for `ParallelMesh.crosses_nodes`.
            timeout: Timeout of the new groups. Defaults to torch's default. If one rank fails while
                groups are created, another rank can wait this long before it raises.

        Returns:
            The meshes. The result can be used in a ``with`` statement: the end of the block
            destroys the groups.

        Raises:
            MeshError: There is no default process group; the ranks have different degrees; the
                device type or the timeout is invalid; the device type has no backend; or another
                rank failed.
            ParallelDimsError: The degrees or the topology of this rank do not fit the number of
                ranks. Ranks with correct degrees raise `MeshError` instead.
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
            A string such as ``"pp=1 dp_replicate=1 dp_shard=4 cp=1 tp=2 ep=1 etp=1 world=8"``.
            ``etp=2 (from tp)`` means that `from_config` set ``etp`` to the value of ``tp``.
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

        It is ``dp_replicate * dp_shard``. With ``ep_mode="peer"``, ``ep`` is another factor.
        """
        return self.layout().size("dp")

    @property
    def non_dp_size(self) -> int:
        """Number of ranks that work on the same samples: ``cp * tp * pp``."""
        degrees = self._resolved()
        return degrees["cp"] * degrees["tp"] * degrees["pp"]

    @property
    def efsdp(self) -> int:
        """Number of ranks over which FSDP shards the parameters of each expert."""
        return self.layout().size("efsdp")

    @property
    def seq_len_divisor(self) -> int:
        """Smallest number of tokens that every sequence length must be a multiple of.

        It is ``2 * cp * tp`` if ``cp`` is above 1, because each rank of ``cp`` computes an early
        and a late part of the sequence to balance causal attention. Else it is ``tp``.
        """
        degrees = self._resolved()
        return degrees["tp"] * (2 * degrees["cp"] if degrees["cp"] > 1 else 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether ``dp_replicate`` is above 1."""
        return self._resolved()["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether ``dp_shard`` is above 1."""
        return self._resolved()["dp_shard"] > 1

    @property
    def dp_enabled(self) -> bool:
        """Whether `dp_size` is above 1: different ranks have different samples."""
        return self.dp_size > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether FSDP shards dense parameters over more than one rank."""
        return self.layout().size("fsdp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether ``cp`` is above 1: sequences are split over ranks."""
        return self._resolved()["cp"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether ``tp`` is above 1: layers are split over ranks."""
        return self._resolved()["tp"] > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether ``pp`` is above 1: there are several pipeline stages."""
        return self._resolved()["pp"] > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether ``ep`` is above 1: different ranks hold different experts."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Whether ``etp`` is above 1: each expert is split over ranks."""
        return self.etp > 1


_DEFAULTS = {field.name: field.default for field in fields(ParallelDims)}
