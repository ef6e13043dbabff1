"""`ParallelDims`: the parallel degrees of one training run, such as ``tp`` and ``cp``."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from datetime import timedelta
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from ._config import (
    OPTIONS,
    arguments_from_args,
    arguments_from_config,
    arguments_from_dict,
    is_of_framework,
    name_source_of_dp_shard,
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
    broken,
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

    ``_etp_from_tp`` is True if `ParallelDims.from_config`, `ParallelDims.from_toml` or
    `ParallelDims.from_yaml` sets ``etp`` to the value of ``tp``, at once or, if ``tp`` is -1, in
    `ParallelDims.resolve`. The attribute is not a field, so ``==`` and `ParallelDims.to_dict`
    ignore it.
    """

    __slots__ = ("_etp_from_tp",)
    _etp_from_tp: bool


@dataclass(frozen=True, slots=True)
class ParallelDims(_EtpSource):
    """Parallel degrees of one training run: the sizes of the mesh dimensions.

    The world size is the product ``dp_replicate * dp_shard * cp * tp * pp``. With
    ``ep_mode="peer"``, it is ``dp_replicate * dp_shard * ep * cp * tp * pp``. One factor of the
    product may be -1: this degree is inferred from the world size. The constructor checks each
    value. The product is checked when the world size is known, in the constructor or in `resolve`.

    Degrees may be integers of any type, or strings such as ``"8"``. An instance is frozen, hashable
    and compared by its fields. `ParallelDims` works without torch. Only `build_mesh` communicates.

    Args:
        dp_replicate: Number of replicas of the sharded model.
        dp_shard: Number of ranks that shard parameters. Defaults to -1 (inferred from the world
            size), or to 1 if another degree is -1.
        cp: Number of ranks that share one sequence (context parallel).
        tp: Number of ranks that share one layer (tensor parallel).
        pp: Number of pipeline stages.
        ep: Number of ranks that hold different experts.
        etp: Number of ranks that share one expert. It must be 1 or ``tp``, unless ``free_etp`` is
            True.
        ulysses_degree: Number of ranks inside ``cp`` that exchange attention heads by all-to-all
            (DeepSpeed-Ulysses). It must divide ``cp``. Defaults to None: no Ulysses attention.
        world_size: Number of ranks. If it is None, call `resolve` later to set it.
        ep_mode: With ``"folded"``, experts reuse the ranks of the dense layers:
            ``ep * etp * efsdp == dp_shard * cp * tp``. FSDP shards each expert over ``efsdp``
            ranks. With ``"peer"``, ``ep`` is a factor of the world size. Ranks along ``ep`` then
            have different samples, and FSDP shards dense parameters over ``ep`` too.
        order: Names of the mesh dimensions, outermost first, as a list, a tuple or one string with
            commas. Consecutive ranks differ along the last dimension. If ``ep_mode`` is
            ``"folded"``, ``ep`` may be absent.
        fsdp_folds_cp: If True, FSDP shards parameters over ``cp`` too. If False, the ranks of
            ``cp`` hold replicas, and gradients must be reduced over ``mesh["replicate"]``, which
            has the ranks of ``dp_replicate`` and ``cp``.
        free_etp: If True, ``etp`` may differ from 1 and ``tp``, as in Megatron-LM. Each group of
            ``etp`` then consists of consecutive ranks of ``dp_shard``, ``cp`` and ``tp``, and may
            differ from the groups of ``tp``. If ``ep_mode`` is ``"peer"``, this option has no
            effect.

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
        """Return all degrees as positive integers.

        Returns:
            A dict. A key is a name in `DEGREES`, such as ``"tp"``, and the value is the degree.

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
            A copy with this world size, in which every degree is a positive integer. If this
            instance already has the same world size, the result is this instance.

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
        """Read degrees from a configuration of hp-mesh or of another framework.

        - The method reads the fields of this class, the name ``dp`` (for ``dp_shard``), and the
          names of torchtitan, Megatron-LM, accelerate and DeepSpeed, such as ``cp_size``.
        - Some further names of degrees, such as ``pp_size``, are not supported. If such a name has
          a value above 1, the error says which field to use.
        - All other names are ignored.
        - A field that is absent or None has the default of this class.
        - If a degree has a name of torchtitan, accelerate or DeepSpeed, the default of ``etp`` is
          1. Otherwise it is the value of ``tp``, as in Megatron-LM.
        - An ``order`` with dashes, such as ``"tp-cp-ep-dp-pp"``, is innermost first, as in
          Megatron-LM.

        Args:
            config: A mapping, or an object with attributes. It may have other fields too. An empty
                mapping means all defaults.
            world_size: Number of ranks. Defaults to the field ``world_size`` of ``config``.

        Returns:
            An instance with this world size. All its degrees are positive integers.

        Raises:
            ParallelDimsError: A value is not a degree; the degrees do not fit the world size; two
                names of one degree have different values; a name that is not supported has a value
                above 1; the world size is missing, or differs from the one in ``config``; or
                ``config`` has no name of a degree.

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
        if needs_world and given["world_size"] is None:
            reason = "world_size=None is not a degree; pass world_size to from_config, "
            reason += "a positive integer"
            found.append(broken("value", reason, {"world_size": None}))
        try:
            dims = cls(**resolve_fields(given, found, etp_is_tp=etp_is_tp))
        except ParallelDimsError as error:
            raise name_source_of_dp_shard(error, config) from None
        object.__setattr__(dims, "_etp_from_tp", etp_is_tp)
        return dims

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "ParallelDims":
        """Create an instance from the result of `to_dict`.

        Args:
            mapping: A key is a field of this class. Absent fields have their defaults.

        Returns:
            An instance with the fields in ``mapping``.

        Raises:
            ParallelDimsError: A key is not a field of this class, a value is invalid, or the
                degrees break a rule.

        Examples:
            >>> ParallelDims.from_dict({"tp": 2, "world_size": 8}).dp_shard
            4
        """
        arguments, unknown = arguments_from_dict(mapping)
        return cls(**resolve_fields({**_DEFAULTS, **arguments}, unknown))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in a form that JSON can store.

        Returns:
            A dict. A key is a field of this class. The value of ``"order"`` is a list. `from_dict`
            accepts the result.
        """
        return {**self._fields(), "order": list(self.order)}

    @classmethod
    def from_toml(
        cls, path: str | PathLike[str], table: str | None = None, world_size: int | None = None
    ) -> "ParallelDims":
        """Read degrees from a TOML file or from one table of the file.

        If the table contains a key of another framework, such as ``tensor_parallel_degree`` of
        torchtitan, `from_config` reads the table. Otherwise `from_dict` reads it.

        Args:
            path: Path of the file.
            table: Name of a table, with dots between levels, such as ``"run.mesh"``. Defaults to
                the top level of the file.
            world_size: Number of ranks. Defaults to the field ``world_size`` of the table. If both
                are absent, call `resolve` later.

        Returns:
            An instance with the degrees of the table.

        Raises:
            ParallelDimsError: The file cannot be read or is no TOML, the table does not exist, a
                value is invalid, or the degrees break a rule.
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
        """Read degrees from a YAML file or from one mapping in the file.

        If the mapping has a name of another framework, such as ``dp_shard_size`` of accelerate,
        `from_config` reads the mapping. Otherwise `from_dict` reads it. PyYAML must be installed.

        Args:
            path: Path of the file.
            table: Name of the mapping, with dots between levels, such as ``"run.mesh"``. Defaults
                to the top level of the file.
            world_size: Number of ranks. Defaults to the field ``world_size`` of the mapping. If
                both are absent, call `resolve` later.

        Returns:
            An instance with the degrees of the mapping.

        Raises:
            ParallelDimsError: The file cannot be read or is no YAML, the mapping does not exist, a
                value is invalid, or the degrees break a rule.
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
            args: Result of ``parse_args``. If the user did not give an option, the field has its
                default.
            world_size: Number of ranks. If it is None, call `resolve` later.

        Returns:
            An instance with the degrees of the command line.

        Raises:
            ParallelDimsError: A value is not a degree, the degrees break a rule, or ``args`` has
                none of the options. It is also raised if ``args`` has a degree above 1 under
                another name, such as ``tensor_model_parallel_size``: use `from_config`.
        """
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
        """List the rules that these degrees break for a model, its sequences and its batch.

        A rule is skipped if the model or the arguments do not have a value that the rule needs. If
        a value is invalid, for example a negative number of heads, the result has a violation with
        the rule code ``"number"``. Fields of the model that no rule needs are ignored.

        Args:
            model: A mapping, a configuration object such as a Hugging Face ``PretrainedConfig``, or
                an object with an attribute ``config``, such as a Hugging Face model.
            seq_len: Number of tokens per sequence. If None, rules about it are skipped.
            global_batch: Number of sequences per optimizer step, over all ranks. If None, the rule
                about it is skipped.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``. Each rank then computes an
                early and a late part of the sequence, which balances causal attention.
            sequence_parallel: If True, activations between layers are sharded over ``tp`` along the
                sequence, so ``tp`` must divide ``seq_len``. If False, each rank of ``tp`` holds
                whole sequences.
            topology: Number of ranks per node. If it is not None, the result has advice for each
                mesh dimension with groups that cross nodes.

        Returns:
            A `Report`: a sequence of `Violation` objects of level ``"error"`` or ``"advice"``. It
            is empty if no rule is broken. `Report.skipped` has the names of the absent values.

        Raises:
            ParallelDimsError: ``model`` is neither a mapping nor an object with attributes; the
                model has two values for one field; ``causal_balance`` or ``sequence_parallel`` is
                not a bool; or a degree is -1 because the world size is unknown.

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

        The rules and arguments are the same as in `check`. Violations of level ``"advice"``, for
        example about unequal pipeline stages, do not raise an error. `check` returns them.

        Args:
            model: A mapping, a configuration object such as a Hugging Face ``PretrainedConfig``, or
                an object with an attribute ``config``, such as a Hugging Face model.
            seq_len: Number of tokens per sequence.
            global_batch: Number of sequences per optimizer step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``.
            sequence_parallel: If True, ``tp`` must divide ``seq_len``.

        Raises:
            ParallelDimsError: At least one violation has the level ``"error"``. The attribute
                ``violations`` lists all such violations.

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
        """Return for every rule of `check` the values that it compares, and whether it is broken.

        The result also has the rules that `check` skips, and the rules that do not apply.

        Args:
            model: A mapping or a configuration object, as in `check`. Defaults to an empty
                mapping: all rules about the model are skipped.
            seq_len: Number of tokens per sequence.
            global_batch: Number of sequences per optimizer step, over all ranks.
            causal_balance: If True, ``2 * cp`` must divide ``seq_len``.
            sequence_parallel: If True, ``tp`` must divide ``seq_len``.
            topology: Number of ranks per node. If it is not None, the result also says which mesh
                dimensions have groups that cross nodes.

        Returns:
            One `Explanation` for each rule, always in the same order. If ``topology`` is not None,
            one `Explanation` for the world size and one for each mesh dimension follow.

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
        """Return the argument ``degrees`` of `RankLayout`.

        Returns:
            A dict. A key is a name in `DEGREES`, such as ``"tp"``, and the value is a positive
            integer. If ``ulysses_degree`` is not None, the dict also has the key ``"ulysses"``.
        """
        degrees = self._resolved()
        return (
            degrees if self.ulysses_degree is None else degrees | {"ulysses": self.ulysses_degree}
        )

    def _plan_mesh(self, world_size: int, rank: int) -> "tuple[ParallelDims, MeshPlan]":
        """Compute the process groups of one rank, without communication.

        Args:
            world_size: Number of ranks.
            rank: Global rank.

        Returns:
            A pair: a copy of this instance with the world size, and the plan of the process groups
            and device meshes that ``rank`` must create.
        """
        dims = self.resolve(world_size)
        return dims, plan_mesh(dims._axis_degrees(), dims._folds(), dims.order, rank)

    def layout(self) -> RankLayout:
        """Return the coordinates and groups of all ranks, without communication.

        Returns:
            A `RankLayout`. Its methods compute the coordinates of a rank and the ranks of a group.
            It depends on the fields of this instance only and needs no process group.

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

        This method is collective: every rank of the default process group must call it with the
        same arguments. Set the accelerator's current device before. One all-reduce compares the
        arguments of all ranks before groups are created. A second all-reduce checks whether all
        ranks succeeded. If one rank fails, every rank destroys the groups that it created and
        raises an error.

        Args:
            device_type: A device type for which the default process group has a backend, or
                ``"meta"``. Defaults to the accelerator's type if the default process group has a
                backend for it, else to ``"cpu"``.
            topology: Number of ranks per node, for `ParallelMesh.crosses_nodes`.
            timeout: Timeout of the new groups. Defaults to torch's default. If one rank fails while
                groups are created, another rank can wait this long before it raises.

        Returns:
            A `ParallelMesh` with the device meshes. If it is used in a ``with`` statement, the end
            of the block destroys the process groups.

        Raises:
            MeshError: There is no default process group; the ranks have different degrees; the
                device type or the timeout is invalid; the device type has no backend; or another
                rank failed.
            ParallelDimsError: The degrees or the topology that this rank passed do not fit the
                number of ranks. Ranks that passed correct arguments raise `MeshError` instead.
            RuntimeError: torch could not create a process group of this rank. A note of the
                exception names the group.

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
            ``etp=2 (from tp)`` means that ``etp`` was absent in a configuration and has the value
            of ``tp``.
        """
        degrees = degrees_from(self._fields())
        words: dict[str, object] = {name: degrees[name] for name in (*BASE_AXES, "ep", "etp")}
        if self._etp_from_tp and self.tp != 1:
            words["etp"] = f"{self.tp} (from tp)"
        others = {"ulysses": self.ulysses_degree, "world": self.world_size}
        words |= {name: value for name, value in others.items() if value is not None}
        for name in ("ep_mode", "fsdp_folds_cp", "free_etp"):
            if getattr(self, name) != _DEFAULTS[name]:
                words[name] = getattr(self, name)
        return " ".join(f"{name}={value}" for name, value in words.items())

    @property
    def dp_size(self) -> int:
        """Number of ranks with different samples.

        It is ``dp_replicate * dp_shard``, or ``dp_replicate * dp_shard * ep`` if ``ep_mode`` is
        ``"peer"``.
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
        """Number of tokens that must divide the length of every sequence.

        If ``cp`` is 1, the number is ``tp``. If ``cp`` is above 1, the number is ``2 * cp * tp``,
        because each rank of ``cp`` computes an early and a late part of the sequence to balance
        causal attention.
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
        return (self._resolved()["ep"] if self.ep == INFERRED else self.ep) > 1

    @property
    def etp_enabled(self) -> bool:
        """Whether ``etp`` is above 1: each expert is split over ranks."""
        etp = self.tp if self._etp_from_tp else self.etp
        return (self._resolved()["tp"] if etp == INFERRED else etp) > 1


_DEFAULTS = {field.name: field.default for field in fields(ParallelDims)}
