"""The sharded and the unsharded form of each parameter, and the modules that register it.

`ShardedParameter` represents one parameter. `ParameterTable` lists the parameters of one group.
`note_managed` marks every submodule of a unit, because only the modules that were passed to
`fully_shard` refer to their unit.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, getitem, is_, setitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.utils.parametrize import is_parametrized

from hp_dtensor import (
    Collectives,
    RaggedShard,
    RaggedTensor,
    mark_repeated_rows,
    redistribute,
)

from ._errors import StateError
from ._extensions import Extension
from ._mesh import MeshInfo
from ._torch import (
    POST_ALL_GATHER,
    PRE_ALL_GATHER,
    hooks_after_gradient,
    is_extended,
    local_of,
    parameters_of,
    run,
    set_local,
    storage_references,
    wrapper_like,
)
from .layout import LayoutName

SHARDED_ATTRIBUTE = "_fully_shard_became"
HOLDER_ATTRIBUTE = "_fully_shard_holder"
MANAGED_ATTRIBUTE = "_fully_shard_managed"


@dataclass(frozen=True, slots=True)
class Owner:
    """A module and the name under which it registers a parameter.

    A tied parameter has several owners. ``registry`` is the ``_parameters`` dict of ``module``.
    """

    module: nn.Module
    registry: dict[str, nn.Parameter | None]
    name: str

    def get(self) -> nn.Parameter | None:
        """Return the parameter that the module registers now, or None if it was removed."""
        return self.registry.get(self.name)


class ShardedParameter:
    """A parameter of a group: sharded between uses, unsharded during forward and backward.

    Attributes:
        sharded: A DTensor, or a `RaggedTensor` of hp-dtensor. It stays the same object, because
            optimizers hold it.
        unsharded: A parameter over a view of the all-gather output.
        layout: Layout of the group.
        atom: Only for the ragged layout. Number of consecutive elements that are never split
            between ranks; see the argument ``granularity`` of `fully_shard`.
        part: Function that returns the local tensor of ``sharded``, or of a tensor with the same
            placements, such as its gradient.
        local_view: The local tensor of ``sharded``.
    """

    part: Callable[[Any], Tensor]
    sharded: nn.Parameter
    unsharded: nn.Parameter
    local_view: Tensor

    def __init__(
        self,
        original: nn.Parameter,
        owners: Sequence[Owner],
        name: str,
        mesh_info: MeshInfo,
        dim: int | None = 0,
        layout: LayoutName = "exact",
        atom: int = 1,
    ) -> None:
        """Determine the mesh and the placements of the sharded parameter. Allocates no memory.

        Args:
            original: The parameter before `fully_shard`.
            owners: All modules that register ``original``.
            name: Path of the parameter from the unit's module, such as ``"0.weight"``.
            mesh_info: The data-parallel mesh.
            dim: Tensor dim to shard. None: the parameter is replicated, not sharded.
            layout: Layout of the group.
            atom: Only for the ragged layout. Number of consecutive elements that are never split
                between ranks.

        Raises:
            MeshError: The mesh of ``original`` does not fit the data-parallel mesh.
            InvalidParameterError: ``original`` has an invalid all-gather extension.
        """
        self.name = name
        self.dim = dim
        self.layout = layout
        self.atom = atom
        self._ragged: RaggedShard | None = None
        self.owners = tuple(owners)
        self.original = weakref.ref(original)
        self._own: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
        if isinstance(original, DTensor):
            self._own = (original.device_mesh, tuple(original.placements))
        self._mesh, self._placements = mesh_info.layout(self._own, name, dim)
        self._reduced_here = mesh_info.axes_within(self._own)
        whole = dim is None and mesh_info.shards
        self.axes = mesh_info.axes.replicated() if whole else mesh_info.axes
        self._requires_grad = original.requires_grad
        self._repeated_rows = getattr(original, "repeated_rows", ())
        self._held: Tensor | None = None  # gradients accumulated by `accumulate_gradient`
        self._is_built = False
        self._previous: weakref.ref[nn.Parameter] | None = None  # replaced by user code
        self.extension: Extension | None = None
        if is_extended(original):
            self.extension = Extension(original, name, owners[0].module, self._mesh)
        self.shape = torch.Size(original.shape)
        self.stride = original.stride()

    def note_original(self) -> None:
        """Mark the original parameter as sharded, so that `sharded_from` finds this object.

        Modules outside the unit may still use the original parameter.
        """
        original = self.original()
        if original is not None:
            vars(original)[SHARDED_ATTRIBUTE] = _WeakReference(self)

    @torch.no_grad()
    def build_sharded(self, local: Tensor, ragged: RaggedShard | None = None) -> None:
        """Create the sharded parameter over ``local``, the local tensor of this rank.

        The parameter is a DTensor if ``ragged`` is None. Otherwise it is a `RaggedTensor`, and
        ``ragged`` is its placement on the shard axis.
        """
        self._ragged = ragged
        self.part = local_of if ragged is None else attrgetter("local")
        self.sharded = nn.Parameter(self._laid_out(local), requires_grad=self._requires_grad)
        mark_repeated_rows(self.sharded, self._repeated_rows)
        vars(self.sharded)[HOLDER_ATTRIBUTE] = _WeakReference(self)
        # ``nn.Parameter`` has made a view of ``local``. Optimizers must write to ``local`` itself.
        self.put(local)

    def _laid_out(self, local: Tensor) -> Tensor:
        if self._ragged is not None:
            runs: tuple[Placement | RaggedShard, ...] = (*self._placements[:-1], self._ragged)
            return RaggedTensor.from_local(local, self._mesh, runs, shape=self.shape)
        # `from_local` moves tensors to the mesh's type of device, unless they are on the meta
        # device. With offloading, the shard has to stay on the CPU.
        like = DTensor.from_local(
            local.to("meta"),
            self._mesh,
            self._placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )
        return wrapper_like([like])([local])[0]

    @torch.no_grad()
    def build_unsharded(self, view: Tensor) -> None:
        """Create the unsharded parameter over ``view``, a view of the all-gather output.

        If a previous unsharded parameter exists, this method increments its version. A backward
        that saved the previous parameter then raises.
        """
        if self._is_built:
            increment_version(self.unsharded)
        self._is_built = True
        if self._own is not None:
            mesh, placements = self._own
            view = DTensor.from_local(
                view, mesh, placements, run_check=False, shape=self.shape, stride=self.stride
            )
        self.unsharded = nn.Parameter(view, requires_grad=self._requires_grad)
        vars(self.unsharded)[SHARDED_ATTRIBUTE] = _WeakReference(self)  # for `sharded_from`

    @torch.no_grad()
    def move_unsharded(self, view: Tensor) -> None:
        """Replace the memory of the unsharded parameter by ``view``, and keep its gradient.

        The version is incremented, so that a backward that saved the previous memory raises. With
        an all-gather extension, the parameter is created again, because its class may change.
        """
        if self.extension is not None:
            gradient = self.unsharded.grad
            with torch.inference_mode(False):
                self.build_unsharded(view)
            self.unsharded.grad = gradient
            return
        increment_version(self.unsharded)
        if self._own is None:
            self.unsharded.data = view
        else:
            set_local(cast(DTensor, self.unsharded), view)

    def _registered(self) -> nn.Parameter:
        """Return the parameter that user code registered in place of the sharded one.

        Returns the sharded parameter if it was not replaced. If a tied parameter has different
        replacements, returns the replacement in the last of its owners.
        """
        for owner in reversed(self.owners):
            present = owner.get()
            if present is not None and present is not self.sharded:
                return present
        return self.sharded

    def put(self, view: Tensor) -> None:
        """Replace the local tensor of the sharded parameter by ``view``, without a copy."""
        if self._ragged is None:
            set_local(cast(DTensor, self.sharded), view)
        else:
            self.sharded.data = cast(RaggedTensor, self.sharded).like(view)
        self.local_view = self.part(self.sharded)

    def wrap(self, local: Tensor) -> Tensor:
        """Return a tensor with the placements of ``sharded`` over ``local``."""
        (wrapped,) = wrapper_of([self])([local])
        return wrapped

    def fits(self, found: object) -> bool:
        """Return whether ``found`` has the class, mesh and placements of the sharded parameter."""
        own = cast(DTensor | RaggedTensor, self.sharded)
        return (
            isinstance(found, DTensor | RaggedTensor)
            and type(found.data) is type(own.data)
            and found.shape == self.shape
            and found.device_mesh == self._mesh
            and tuple(found.placements) == tuple(own.placements)
        )

    def replacement_error(self) -> str | None:
        """Return an error message if a registered parameter cannot replace the sharded one.

        Returns None if all modules in ``owners`` register the sharded parameter or a valid
        replacement.
        """
        for owner in self.owners:
            if owner.get() is None:
                return self._removal(owner)
        present = [owner.get() for owner in self.owners]
        others = [each for each in present if each is not self.sharded]
        if not all(isinstance(each, nn.Parameter) for each in others):
            return (
                f"{self.name} was replaced by a tensor that is not an nn.Parameter, as "
                "torch.func.functional_call does it; a sharded module computes with its own "
                "parameters only: load other values, for example by load_state_dict"
            )
        for each in cast("list[nn.Parameter]", others):
            if self._previous is not None and each is self._previous():
                return (
                    f"{self.name} was replaced, and then the earlier parameter was registered "
                    "again; its values are gone, because the replacement was copied to its shard; "
                    "use load_state_dict to change values for a while"
                )
            holder = _noted(each, HOLDER_ATTRIBUTE)
            if holder not in (None, self) and holder._registered() is not each:
                return (
                    f"{self.name} and {holder.name} were exchanged; copy the values instead, for "
                    "example with load_state_dict"
                )
        others = [each for each in others if not self.fits(each)]
        if not others:
            return self._changed_extension()
        found: object = others[0]
        what = f"a plain tensor of shape {tuple(cast(Tensor, found).shape)}"
        if isinstance(found, DTensor | RaggedTensor):
            kind = "DTensor" if isinstance(found, DTensor) else "RaggedTensor"
            what = (
                f"a {kind} of shape {tuple(found.shape)}, placed {found.placements} on "
                f"{found.device_mesh}"
            )
        own = cast(DTensor, self.sharded)
        return (
            f"{self.name} was replaced by {what}; only a {type(own.data).__name__} of shape "
            f"{tuple(self.shape)}, placed {own.placements} on {self._mesh}, can take its place"
        )

    def _changed_extension(self) -> str | None:
        """Return an error message if the all-gather extension was added or lost, else None.

        User code can add or lose an extension when it replaces or converts the parameter.
        """
        found = self._registered()
        local = self.part(found)
        if self.extension is None and (is_extended(found) or is_extended(local)):
            return (
                f"{self.name} has gained {PRE_ALL_GATHER} or {POST_ALL_GATHER} after fully_shard, "
                "which looks for them only once; attach them before fully_shard, as methods of the "
                "parameter's tensor class"
            )
        if self.extension is not None and not is_extended(local):
            kind = type(self.part(self.sharded)).__name__
            return (
                f"{self.name} was replaced by a plain tensor; only a {kind} can take its place, "
                f"with {PRE_ALL_GATHER}, so load it without assign=True"
            )
        return None

    def _removal(self, owner: Owner) -> str:
        if is_parametrized(owner.module, owner.name):
            return (
                f"{self.name} was parametrized (torch.nn.utils.parametrize) after fully_shard; a "
                "unit keeps the parameters that it was given, so parametrize before fully_shard"
            )
        what = "set to None" if owner.name in owner.registry else "removed"
        return (
            f"{self.name} was {what} after fully_shard; a unit keeps the parameters that it was "
            "given, so do that before fully_shard, or freeze it with requires_grad_(False); "
            "reset() puts it back"
        )

    def undo_replacement(self) -> None:
        """Register the sharded parameter again where user code has registered another tensor.

        Modules from which the parameter was removed are left unchanged.
        """
        for owner in self.owners:
            if owner.get() is not None:
                owner.registry[owner.name] = self.sharded

    def take_replacement(self) -> None:
        """Use the parameter that user code registered in place of the sharded one, if any.

        The replacement is registered in all modules that share the parameter, because user code may
        have replaced a tied parameter in one of them only.
        """
        before, self.sharded = self.sharded, self._registered()
        if before is not self.sharded:
            self._previous = weakref.ref(before)
        vars(self.sharded).setdefault(HOLDER_ATTRIBUTE, _WeakReference(self))
        mark_repeated_rows(self.sharded, self._repeated_rows)  # conversions lose the mark
        for owner in self.owners:
            owner.registry[owner.name] = self.sharded

    def local(self) -> Tensor:
        """Return the local tensor of the sharded parameter, or of its replacement by user code.

        Valid only if `replacement_error` returns None.
        """
        return self.part(self._registered())

    @property
    def is_plain(self) -> bool:
        """Return whether the unsharded parameter is a plain tensor, not a DTensor."""
        return self._own is None

    def accumulate_gradient(self, dtype: torch.dtype) -> None:
        """Move the unsharded gradient from ``.grad`` to an accumulator of dtype ``dtype``.

        A no-op if ``.grad`` is None. `take_gradient` returns the accumulated sum.
        """
        gradient, self.unsharded.grad = self.unsharded.grad, None
        if gradient is not None:
            self._held = gradient.to(dtype) if self._held is None else self._held.add_(gradient)

    def clear_gradient(self, set_to_none: bool) -> None:
        """Set the sharded gradient to None if ``set_to_none`` is True, else to zeros."""
        gradient = self.sharded.grad
        if gradient is not None and set_to_none:
            self.sharded.grad = None
        elif gradient is not None:
            self.part(gradient).zero_()

    def drop_gradient(self) -> None:
        """Discard the unsharded gradient and the sum accumulated by `accumulate_gradient`."""
        self._held = None
        self.unsharded.grad = None

    def no_gradient(self) -> Tensor:
        """Return zeros in place of a missing gradient.

        They have the shape of the unsharded parameter, or of its local tensor if it is a DTensor.
        """
        whole: Tensor = self.unsharded
        whole = local_of(whole) if isinstance(whole, DTensor) else whole
        return torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)

    def take_gradient(self, collectives: Collectives) -> Tensor | None:
        """Remove the unsharded gradient and return its contiguous local tensor.

        Returns None if there is no gradient. A DTensor gradient is redistributed to the placements
        of the original parameter. If the gradient is Partial over a mesh dim that the group reduces
        over, it stays Partial over this mesh dim.
        """
        gradient, self.unsharded.grad = self.unsharded.grad, None
        held, self._held = self._held, None
        if held is not None:
            gradient = held if gradient is None else held.add_(gradient)
        if gradient is None:
            return None
        if self._own is not None:
            target = self._own[1]
            for axis in self._reduced_here:
                if (found := cast(DTensor, gradient).placements[axis]).is_partial():
                    target = (*target[:axis], found, *target[axis + 1 :])
            laid_out = redistribute(cast(DTensor, gradient), target, collectives=collectives)
            return local_of(laid_out).contiguous()
        return gradient.contiguous()

    def add_gradient(self, local: Tensor) -> None:
        """Accumulate ``local``, this rank's reduced gradient, into the sharded gradient.

        Then run the post-accumulate-grad hooks of the sharded parameter.
        """
        sharded = self.sharded
        present = sharded.grad
        if present is None:
            sharded.grad = self.wrap(local)
        else:
            self.part(present).add_(local)
        if (hooks := hooks_after_gradient(sharded)) is not None:
            for hook in list(hooks.values()):
                hook(sharded)


def wrapper_of(
    parameters: Sequence[ShardedParameter],
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Return a function that wraps local tensors in DTensors or ragged tensors.

    The function takes a list of local tensors, one per parameter. The results have the placements
    of ``parameters``, which are parameters of one group.
    """
    sharded = [cast(Any, parameter.sharded) for parameter in parameters]
    if parameters[0].layout == "exact":
        return wrapper_like(sharded)
    return partial(RaggedTensor.like_each, sharded)


class _Identity(torch.autograd.Function):
    """Autograd function that `gradient_accumulator` uses to find the node of a leaf.

    The function calls no operator on the leaf, so it works for every tensor class.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def gradient_accumulator(parameter: nn.Parameter) -> Node | None:
    """Return the AccumulateGrad node of a parameter, which may be frozen.

    Returns None for integer and bool dtypes, which have no gradients. The parameter refers to the
    node weakly, so the caller must keep a reference as long as the hooks of the node are needed.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    trains = parameter.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        apply: Any = _Identity.apply
        output: Tensor = apply(parameter.requires_grad_(True))
    parameter.requires_grad_(trains)
    return None if output.grad_fn is None else output.grad_fn.next_functions[0][0]


class _WeakReference:
    """Weak reference to a `ShardedParameter`, for an attribute of a tensor.

    A pickled copy of the tensor has the attribute None.
    """

    def __init__(self, parameter: ShardedParameter) -> None:
        self.get = weakref.ref(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _noted(tensor: Tensor, attribute: str) -> ShardedParameter | None:
    reference: _WeakReference | None = vars(tensor).get(attribute)
    return None if reference is None else reference.get()


def sharded_from(candidate: nn.Parameter) -> ShardedParameter | None:
    """Return the `ShardedParameter` that `fully_shard` created from ``candidate``.

    ``candidate`` may also be its unsharded parameter. Returns None if ``candidate`` was not
    sharded, or if its unit was garbage-collected.
    """
    return _noted(candidate, SHARDED_ATTRIBUTE)


def mixture(parameters: Sequence[ShardedParameter]) -> str | None:
    """Return an error message if the parameters of a group differ in dtype or device, else None.

    Checks the parameters that are registered now, which user code may have replaced. Valid only if
    `ShardedParameter.replacement_error` returns None for all parameters.
    """
    kinds: dict[str, list[str]] = {}
    for parameter in parameters:
        local = parameter.local()
        kinds.setdefault(f"{local.dtype} on {local.device}", []).append(parameter.name)
    if len(kinds) == 1:
        return None
    listed = " and ".join(f"{names} of {kind}" for kind, names in kinds.items())
    return f"a group has parameters {listed}; convert all of them, or none"


def meta_device_error(parameters: Sequence[ShardedParameter], path: str) -> StateError:
    """Return a `StateError` that names the parameters on the meta device.

    ``path``: path of the unit from the root module; empty for the root.
    """
    names = [parameter.name for parameter in parameters if parameter.local().is_meta]
    where = f"in {path}: " if path else ""
    return StateError(
        f"{where}{names} are on the meta device; load them with load_safetensors, or a state dict "
        "with assign=True, or give them memory with to_empty() and values, before the first forward"
    )


_each = chain.from_iterable
_registries_of, _names_of = attrgetter("registries"), attrgetter("names")
_registered_of, _attributes_of = attrgetter("registered"), attrgetter("attributes")
_storages_of, _references_of = attrgetter("storages"), attrgetter("references")
_EXTENSION = frozenset({PRE_ALL_GATHER, POST_ALL_GATHER})


class ParameterTable:
    """Lists of a group's parameters and of their registrations.

    ``registered[i]`` is the tensor last registered as ``registries[i][names[i]]``. With lists,
    `map` registers and checks all parameters without a Python call per parameter. `are_unchanged`
    checks the tables of all groups under a root at once. The table is created again if the group
    gets new parameters.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], shards: Sequence[Tensor], flat: Tensor | None
    ) -> None:
        """List the parameters and their owners.

        Args:
            parameters: All parameters of a group. Either all are DTensors, or all are
                `RaggedTensor` objects.
            shards: Views of ``flat``, one for each parameter.
            flat: The flat shard of the group. None for parameters with all-gather extensions.
        """
        owners = [(each, owner) for each in parameters for owner in each.owners]
        self.sharded = [each.sharded for each in parameters]
        self.unsharded = [each.unsharded for each in parameters]
        self.registries = [owner.registry for _, owner in owners]
        self.names = [owner.name for _, owner in owners]
        self._sharded_at = [each.sharded for each, _ in owners]
        self._unsharded_at = [each.unsharded for each, _ in owners]
        self.registered = self._sharded_at
        self._part, self._parts = parameters[0].part, [each.local_view for each in parameters]
        self._shards = [] if flat is None else list(shards)
        self._addresses = list(map(Tensor.data_ptr, self._shards))
        # Each shard keeps one reference to this storage until the shard is moved elsewhere.
        self.storages = [] if flat is None else [flat.untyped_storage()]
        self.references = storage_references(self.storages)
        # User code may add the methods of an all-gather extension to these attributes after
        # `fully_shard`. `are_unchanged` detects this.
        plain = [each for each in parameters if each.extension is None]
        self.attributes = [vars(x) for each in plain for x in (each.sharded, each.local_view)]

    def register_sharded(self) -> None:
        """Register the sharded parameters with their modules."""
        run(map(setitem, self.registries, self.names, self._sharded_at))
        self.registered = self._sharded_at

    def register_unsharded(self) -> None:
        """Register the unsharded parameters with their modules."""
        run(map(setitem, self.registries, self.names, self._unsharded_at))
        self.registered = self._unsharded_at

    def has_parts(self) -> bool:
        """Return whether no local tensor was replaced since the table was created."""
        return all(map(is_, self._parts, map(self._part, self.sharded)))

    def moved(self) -> bool:
        """Return whether the address of a shard has changed since the table was created.

        For example, sending a CPU tensor to another process moves its storage to shared memory.
        """
        references = storage_references(self.storages)
        if references == self.references:
            return False
        if list(map(Tensor.data_ptr, self._shards)) != self._addresses:
            return True
        self.references = references  # only a view was created or deleted
        return False


def are_unchanged(tables: Sequence[ParameterTable], backward: bool) -> bool:
    """Return whether user code has neither replaced nor moved a parameter of the tables.

    If ``backward`` is True, moved parameters are ignored, because backward needs the parameters of
    its forward.
    """
    return _are_registered(tables) and (backward or _are_in_place(tables))


def _are_registered(tables: Sequence[ParameterTable]) -> bool:
    """Return whether the modules still have the parameters that each table registered last.

    Also returns False if user code has added an all-gather extension to a parameter.
    """
    attributes = _each(map(_attributes_of, tables))
    try:
        found = map(getitem, _each(map(_registries_of, tables)), _each(map(_names_of, tables)))
        unchanged = all(map(is_, found, _each(map(_registered_of, tables))))
    except KeyError:
        return False  # a parameter was removed from its module
    return unchanged and all(map(_EXTENSION.isdisjoint, attributes))


def _are_in_place(tables: Sequence[ParameterTable]) -> bool:
    """Return whether all sharded parameters still have their local tensors at the same address."""
    if not all([table.has_parts() for table in tables]):
        return False
    references = storage_references(_each(map(_storages_of, tables)))
    if references == list(_each(map(_references_of, tables))):
        return True
    return not any([table.moved() for table in tables])


class _Managed:
    """Mark on a module: which of its parameters belong to units, and which are ignored.

    A copied or unpickled module has no mark, because its parameters belong to no unit.

    Attributes:
        names: Names of the parameters that belong to units.
        ignored: Names of the ignored parameters.
    """

    def __init__(self, names: Iterable[str], ignored: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.ignored = frozenset(ignored)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the mark is None


def note_managed(roots: Iterable[nn.Module], ignored: Container[int] = ()) -> None:
    """Mark all parameters under ``roots`` as members of units.

    Parameters with an id in ``ignored`` are marked as ignored.
    """
    for root in roots:
        for inner in root.modules():
            found = {name: p for name, p in parameters_of(inner).items() if p is not None}
            left = {name for name, p in found.items() if id(p) in ignored}
            inner.__dict__[MANAGED_ATTRIBUTE] = _Managed(found.keys() - left, left)


def is_managed(module: nn.Module, name: str) -> bool:
    """Return whether the parameter ``name`` of ``module`` belongs to a unit."""
    noted = module.__dict__.get(MANAGED_ATTRIBUTE)
    return isinstance(noted, _Managed) and name in noted.names


def named_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module under ``roots`` once, with its path.

    If there are several roots, the path begins with the index of the root: ``"[0].layers"``.
    """
    seen: set[nn.Module] = set()
    for position, root in enumerate(roots):
        yield from root.named_modules(seen, f"[{position}]" if len(roots) > 1 else "")


def added_parameters(roots: Sequence[nn.Module]) -> list[str]:
    """Return the paths of trainable parameters that were added to ``roots`` after `fully_shard`.

    These parameters are plain tensors, belong to no unit, and were not ignored.
    """
    return [
        f"{path}.{name}" if path else name
        for path, inner in named_modules(roots)
        for noted in [inner.__dict__.get(MANAGED_ATTRIBUTE)]
        for name, p in parameters_of(inner).items()
        if p is not None and p.requires_grad and not isinstance(p, DTensor | RaggedTensor)
        if not isinstance(noted, _Managed) or name not in noted.names | noted.ignored
    ]
