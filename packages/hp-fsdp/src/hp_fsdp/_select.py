"""Selects the parameters that a `fully_shard` call shards, and the dimension of each."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from ._errors import (
    InvalidParameterError,
    MeshError,
    ParameterError,
    ParameterTypeError,
    UnsupportedParameterError,
    is_int,
    shown,
)
from ._mesh import MeshInfo, PlacementOnMesh
from ._param import (
    Owner,
    ShardedParameter,
    is_managed,
    named_modules,
    sharded_from,
)
from ._torch import PRE_ALL_GATHER, is_extended, local_of, parameters_of
from ._unit import units_in
from .layout import PLANNERS, LayoutName

ShardPlacement = Callable[[nn.Parameter], Shard | PlacementOnMesh | None]
Granularity = int | Callable[[nn.Parameter], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSelection:
    """The arguments of `fully_shard` that apply to single parameters.

    Attributes:
        ignored: Ids of the parameters that are not sharded.
        placement: The argument ``shard_placement_fn``.
        least_numel: The argument ``min_shard_numel``. Smaller parameters are not sharded.
        layout: Layout of the parameters.
        granularity: The argument ``granularity``, which requires ``layout="ragged"``. Number of
            consecutive elements that are never split between ranks, or a function that returns it.
    """

    ignored: frozenset[int] = frozenset()
    placement: ShardPlacement | None = None
    least_numel: int = 0
    layout: LayoutName = "exact"
    granularity: Granularity | None = None

    @staticmethod
    def of(
        ignored: Collection[nn.Parameter] | None,
        placement: ShardPlacement | None,
        least_numel: int,
        layout: LayoutName = "exact",
        granularity: Granularity | None = None,
    ) -> "ParameterSelection":
        """Check the arguments and return the selection.

        Raises `ParameterError` if an argument is invalid.
        """
        given: object = () if ignored is None else ignored
        if not isinstance(given, Collection) or isinstance(given, str | Tensor):
            raise ParameterError(f"ignored_params is {shown(given)}; allowed: a set of parameters")
        for each in given:
            if not isinstance(each, nn.Parameter):
                raise ParameterError(
                    f"an element of ignored_params is {shown(each)}; allowed: nn.Parameters"
                )
        least: object = least_numel
        if not is_int(least) or least < 0:
            raise ParameterError(f"min_shard_numel is {shown(least)}; allowed: 0, 1, ...")
        legal = list(PLANNERS)
        if layout not in legal:
            raise ParameterError(
                f"layout is {shown(layout)}; allowed: {' and '.join(map(repr, legal))}"
            )
        if placement is not None and not callable(placement):
            raise ParameterTypeError(
                f"shard_placement_fn is {shown(placement)}; allowed: a function of a parameter"
            )
        ragged = layout == "ragged"
        if ragged and placement is not None:
            raise ParameterError("shard_placement_fn has no meaning in the ragged layout")
        if not ragged and granularity is not None:
            raise ParameterError("granularity has a meaning in the ragged layout only")
        return ParameterSelection(
            ignored=frozenset(id(each) for each in given),
            placement=placement,
            least_numel=least_numel,
            layout=layout,
            granularity=granularity,
        )

    def atom(self, parameter: nn.Parameter, name: str) -> int:
        """Return how many consecutive elements of a parameter are never split between ranks.

        Raises `ParameterError` if ``granularity`` is not a positive integer.
        """
        asked = self.granularity
        found: object = 1 if asked is None else asked(parameter) if callable(asked) else asked
        if not is_int(found) or found < 1:
            raise ParameterError(
                f"granularity gives {_given(found)} for {name}; allowed: 1, 2, ... elements"
            )
        return found

    def place(
        self, parameter: nn.Parameter, name: str, mesh_info: MeshInfo
    ) -> tuple[int | None, MeshInfo]:
        """Return the dimension to shard, and the mesh info.

        The dimension is None if the parameter is not sharded. The mesh info is ``mesh_info``,
        unless ``shard_placement_fn`` returns a mesh. Raises `ParameterError` or `MeshError` if
        ``shard_placement_fn`` returns an invalid result.
        """
        if not mesh_info.shards:
            return None, mesh_info
        placement: object = None if self.placement is None else self.placement(parameter)
        if isinstance(placement, PlacementOnMesh):
            mesh_info = MeshInfo.from_torch(placement.mesh_info, name)
            placement = placement.placement
        return self._dim(parameter, name, placement, mesh_info.axes.shard.size), mesh_info

    def _dim(
        self, parameter: nn.Parameter, name: str, placement: object, degree: int
    ) -> int | None:
        if placement is not None and type(placement) is not Shard:
            raise ParameterError(
                f"shard_placement_fn gives {_given(placement)} for {name}; allowed: Shard(dim), "
                "None, and torch's ShardPlacementResult of one of them and a mesh"
            )
        if _largest_numel(parameter) < self.least_numel:
            return None
        if placement is None:
            return _default_dim(parameter, degree)
        dim, ndim = placement.dim, parameter.ndim
        if not -ndim <= dim < ndim:
            raise InvalidParameterError(
                f"{name} has {ndim} dimensions, so it has no dim {dim} to shard"
            )
        dim %= ndim
        degrees = [*_own_degrees(parameter, dim), degree]
        if dim and parameter.shape[dim] % math.prod(degrees):
            raise UnsupportedParameterError(
                f"dim {dim} of {name}, of size {parameter.shape[dim]}, does not divide over "
                f"{' x '.join(map(str, degrees))} ranks; only dim 0 may be sharded unevenly"
            )
        return dim


def _given(value: object) -> str:
    said = shown(value)
    return f"something {said}" if said.startswith("of type") else said


def _own_degrees(parameter: nn.Parameter, dim: int) -> list[int]:
    """Return the sizes of the mesh dims over which a DTensor is sharded along ``dim``.

    Returns an empty list for a plain tensor.
    """
    if not isinstance(parameter, DTensor):
        return []
    own = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return [size for placement, size in own if placement.is_shard(dim)]


def _largest_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of the largest local tensor on any rank.

    Local tensors have different sizes if a mesh dim shards unevenly. The largest size is the same
    on all ranks, so all ranks make the same decision.
    """
    parts = (
        -(-size // math.prod(_own_degrees(parameter, dim)))
        for dim, size in enumerate(parameter.shape)
    )
    return math.prod(parts)


def _default_dim(parameter: nn.Parameter, degree: int) -> int:
    """Return the dimension to shard if ``shard_placement_fn`` selects none.

    The default is dim 0. The exception is a DTensor that is sharded along dim 0 already and has
    fewer than ``degree`` rows per rank, for example experts. Its default is the first other dim
    that is not sharded and has a length divisible by ``degree``, or dim 0 if no dim has this.
    """
    if not isinstance(parameter, DTensor):
        return 0
    sizes = _own_degrees(parameter, 0)
    if not sizes or parameter.shape[0] >= math.prod(sizes) * degree:
        return 0
    free = (
        dim
        for dim in range(1, parameter.ndim)
        if parameter.shape[dim] % degree == 0 and not _own_degrees(parameter, dim)
    )
    return next(free, 0)


def select_parameters(
    modules: Sequence[nn.Module], mesh_info: MeshInfo, selection: ParameterSelection
) -> list[ShardedParameter]:
    """Return the parameters of ``modules`` that belong to no unit. Tied parameters appear once.

    Names are paths from the module. If there are several modules, a name starts with the position
    of the module in the list, such as ``[1].weight``. Raises `ParameterError` or `MeshError` if a
    parameter cannot be sharded.
    """
    managed, places = _of_other_units(modules)
    owners: dict[int, list[Owner]] = {}
    found: dict[int, tuple[nn.Parameter, str]] = {}
    for path, inner in named_modules(modules):
        for name, candidate in parameters_of(inner).items():
            where = (id(parameters_of(inner)), name)
            if candidate is None or id(candidate) in managed or where in places:
                continue
            if id(candidate) in selection.ignored:
                continue
            full_name = f"{path}.{name}" if path else name
            _check_free(candidate, inner, name, full_name)
            _check_module(candidate, inner, name, full_name, mesh_info.mesh.size())
            owners.setdefault(id(candidate), []).append(Owner(inner, parameters_of(inner), name))
            found.setdefault(id(candidate), (candidate, full_name))
    for original, name in found.values():
        _check_parameter(original, name, mesh_info.mesh)
    return [
        _made(original, owners[key], name, mesh_info, selection)
        for key, (original, name) in found.items()
    ]


def _made(
    original: nn.Parameter,
    owners: Sequence[Owner],
    name: str,
    mesh_info: MeshInfo,
    selection: ParameterSelection,
) -> ShardedParameter:
    dim, mesh_info = selection.place(original, name, mesh_info)
    if is_extended(original) and dim != 0:
        raise ParameterError(
            f"{name} is of type {type(original).__name__}, which has an all-gather extension, and "
            f"would be {'replicated' if dim is None else f'sharded along dim {dim}'}; allowed: "
            "Shard(0) and layout='ragged'"
        )
    atom = 1 if dim is None else selection.atom(original, name)
    # With one rank, all layouts are the same.
    is_split = dim is not None and mesh_info.axes.shard.size > 1
    layout = selection.layout if is_split else "exact"
    parameter = ShardedParameter(original, owners, name, mesh_info, dim, layout, atom)
    if layout == "ragged" and not parameter.is_plain:
        raise ParameterError(
            f"{name} is a DTensor already; the ragged layout takes plain parameters, so shard "
            "the modules that have such ones with layout='exact'"
        )
    return parameter


def _of_other_units(modules: Sequence[nn.Module]) -> tuple[set[int], set[tuple[int, str]]]:
    """Return the ids of the parameters of all units in ``modules``, and their registrations.

    A registration is the id of a module's parameter dict and a name in this dict. It identifies a
    parameter that user code has replaced.
    """
    managed: set[int] = set()
    places: set[tuple[int, str]] = set()
    for group in (group for unit in units_in(*modules) for group in unit.groups):
        for parameter in group.parameters:
            managed |= {id(parameter.sharded), id(parameter.unsharded)}
            places.update((id(owner.registry), owner.name) for owner in parameter.owners)
    return managed, places


def _check_free(candidate: nn.Parameter, module: nn.Module, name: str, full_name: str) -> None:
    if is_managed(module, name):
        raise ParameterError(
            f"{full_name} of {type(module).__name__} is sharded already, by a call on another "
            "module that contains it; shard blocks first and the root last, and give modules that "
            "share a submodule to fully_shard as one list"
        )
    if (sharded := sharded_from(candidate)) is not None:
        raise ParameterError(
            f"{full_name} is the same parameter as {sharded.name} of a unit sharded before; give "
            "both modules to fully_shard as one list"
        )


def _check_module(
    candidate: nn.Parameter, module: nn.Module, name: str, full_name: str, size: int
) -> None:
    """Raise `ParameterError` for a scripted module, and for an unsupported embedding weight.

    Weights that require grad are not supported in an embedding with ``sparse`` or ``max_norm``. An
    embedding with ``max_norm`` writes to its unsharded weight in forward, and resharding would
    discard the new values. With one rank ``max_norm`` is allowed, because the unsharded weight is
    the shard.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ParameterError(
            f"{full_name} is of a ScriptModule; shard its module before it is scripted, or ignore "
            "it"
        )
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or name != "weight":
        return
    if type(module).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return
    what = ""
    if module.sparse:
        what = "sparse=True, whose gradients cannot be reduced; make it with sparse=False"
    elif module.max_norm is not None and size > 1:
        what = (
            f"max_norm={module.max_norm}, which writes to the unsharded weight, so that the "
            "shards would not be renormalized; renormalize them after each step, or ignore it"
        )
    if what and candidate.requires_grad:
        raise UnsupportedParameterError(f"{full_name} is of an {type(module).__name__} with {what}")


def _check_parameter(original: nn.Parameter, name: str, mesh: DeviceMesh) -> None:
    if isinstance(original, DTensor) and is_extended(local := local_of(original)):
        raise ParameterError(
            f"{name} is a DTensor of {type(local).__name__}, which has an all-gather extension "
            f"({PRE_ALL_GATHER}); allowed: plain tensors with such an extension, so unwrap it "
            "before, or ignore it"
        )
    if isinstance(original, UninitializedParameter):
        raise ParameterError(f"{name} has no shape yet; run its lazy module before fully_shard")
    if original.ndim == 0:
        raise ParameterError(f"{name} is a scalar; make it a tensor of one element to shard it")
    if not original.is_contiguous():
        raise UnsupportedParameterError(
            f"{name} of shape {tuple(original.shape)} has strides {original.stride()}; only "
            "contiguous parameters can be sharded, so call .contiguous() first"
        )
    if isinstance(original, DTensor) and original.device_mesh.device_type != mesh.device_type:
        raise MeshError(
            f"{name} is a DTensor on a {original.device_mesh.device_type} mesh, to be sharded over "
            f"a {mesh.device_type} mesh; both must have one device type"
        )
