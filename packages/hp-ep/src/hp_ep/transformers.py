"""Models of Hugging Face transformers: `parallelize_experts` and `checkpoint_sources`.

The experts run through the registry of experts functions of transformers. Models need transformers
5.23 or later, which is imported on the first call.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hp_dtensor import Axis, AxisMesh, Collectives

from ._balance import COUNTED, balance_shares
from ._errors import ExpertConfigError
from ._experts import feed_forward
from ._inputs import check_different_tokens
from ._library import transformers_library
from ._losses import attach
from ._moe import run_chunks, run_here
from ._parameters import (
    check_plain,
    check_untied,
    local_weight,
    replicate_parameters,
    split_experts,
)
from ._products import blocks_of
from ._router import as_axes
from ._sizes import check_factors
from ._sources import checkpoint_sources as checkpoint_sources
from ._styles import Split, check_dispatcher, given_or_best
from ._torch import as_autocast, fenced
from .dispatch._checks import KEYWORDS, Keywords, or_torch
from .dispatch._interface import TokenDispatcher
from .dispatch._local import Local, count_ids

_NAME = __name__  # in the library's registry of experts functions
_ATTRIBUTE = "_expert_dispatch"  # of experts' modules
_LOSS = "load_balancing_loss_func"  # what the library's models compute their auxiliary loss by
_IGNORED = -100  # the label that the library's losses leave out
# What the library's decorator of experts says of a module.
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
_WEIGHTS = ("gate_up_proj", "down_proj")
_WRAPPED = ".base_layer"  # under this name a module of peft holds the module that it wraps
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dispatch:
    """What lies on an experts' module: how its tokens travel."""

    dispatcher: TokenDispatcher

    def __deepcopy__(self, memo: object) -> "_Dispatch":
        """Return this: process groups are not copied with a model."""
        return self


@dataclass(slots=True, kw_only=True, eq=False)
class _Loads:
    """The loads of a layer's experts and their router's bias, stored on the experts' module."""

    load: Tensor
    token_axes: tuple[Axis, ...] | None
    experts_are_split: bool
    collectives: Collectives
    bias_rate: float
    owner: nn.Module | None
    """The module of the library that has the bias; None without."""
    name: str
    replicated_over: None = None

    @property
    def bias(self) -> Tensor | None:
        """Return the bias, of any shape with one number for each expert."""
        return None if self.owner is None else getattr(self.owner, self.name)

    def counted_load(self) -> Tensor:
        """Return the load ``[num_experts]`` int64."""
        return self.load

    def add(self, expert_ids: Tensor) -> None:
        """Count the choices ``[tokens, k]`` of one forward; runs in its backward."""
        self.load = self.load.to(expert_ids.device)
        self.load += count_ids(expert_ids, self.load.shape[0])


class _Summed(int):
    """As ``num_items_in_batch`` it asks a model for the sum of the labels' losses."""


class _Later:
    """Asks a model for router logits, but not for the auxiliary loss, as it counts as False."""

    def __bool__(self) -> bool:
        return False


def parallelize_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    dispatcher: Literal["auto"] | TokenDispatcher = "auto",
    *,
    token_axes: AxisMesh | Sequence[Axis] | None = None,
    node_mesh: AxisMesh | None = None,
    collectives: Collectives | None = None,
    bias_rate: float = 0.0,
) -> list[str]:
    """Split the experts of a transformers model over the ranks of a mesh.

    In the model's forward, a dispatcher sends tokens to the ranks of their experts and back. No
    token is dropped. Parameters of the experts become DTensors with ``Shard(0)`` over ``mesh`` and
    this rank's values, so all ranks must pass equal models. Names and shapes in the state dict do
    not change. Each rank calls the model with its own sequences. Call this function before FSDP. It
    communicates nothing.

    With ``token_axes``, each rank returns a part of the loss. The parts of all ranks add up to the
    loss of one process with all sequences; the same holds for ``aux_loss``. Sum gradients over
    ranks; do not average them (hp-fsdp: ``gradient_reduction="sum"``). Each forward counts the
    labels of all ranks with one small all-reduce per axis. To avoid it, pass
    ``num_items_in_batch``, the number of labels of the whole batch. The auxiliary loss
    (``output_router_logits``) needs one more all-reduce per axis.

    Without ``token_axes``, the loss is the mean over this rank's labels, and a call with an
    auxiliary loss raises an error.

    Args:
        model: A ``PreTrainedModel``. It is changed in place. For a model of peft with adapters on
            the experts' parameters (``target_parameters``), pass ``peft_model.get_base_model()``;
            the adapters become replicated DTensors with whole gradients.
        mesh: 1-D mesh of the ranks that split the experts equally.
        dispatcher: ``"auto"``, or a `TokenDispatcher` for these experts and ranks. Defaults to
            ``"auto"``.
        token_axes: All axes on which ranks hold different tokens: a mesh, `Axis` objects, or ``()``
            if there are none. They have to include the ranks of ``mesh``. Defaults to None: the
            loss covers this rank only, see above.
        node_mesh: The same ranks as a 2-D mesh ``(nodes, ranks of a node)``, so that ``"auto"`` can
            choose `Hierarchical`. Defaults to None.
        collectives: Implementation of the collectives. Defaults to None: ``torch.distributed``.
        bias_rate: Amount by which `update_router_bias` changes the bias of an expert, for routers
            with a bias that transformers does not train (``e_score_correction_bias`` or
            ``expert_bias``). Defaults to 0.0: the bias is not changed.

    Returns:
        The names of the modules of experts.

    Raises:
        ImportError: transformers is missing or older than 5.23.
        ExpertConfigError: This function raises the error on all ranks together, before any change,
            for:

            - a mesh with several axes, or a number of experts that is not divisible by the number
              of ranks;
            - a model of another library, a model without experts in the registry of transformers,
              or a model that was passed to this function before;
            - experts with quantized weights or unknown parameters;
            - ``token_axes`` that do not include all ranks of ``mesh``, or that are given although
              the model computes no loss, such as the one inside ``Qwen3MoeForCausalLM``;
            - a ``bias_rate`` if no router has such a bias.

            Calls of the model raise the error before communication for:

            - an auxiliary loss, if ``token_axes`` is None, if a model that contains ``model``
              computes the loss, with ``return_dict=False``, or with another formula than Mixtral's;
            - adapters that peft has added to experts after this call;
            - ``labels`` if the loss of the model has no argument ``num_items_in_batch``.

            ``save_pretrained`` raises the error unless ``state_dict=`` has unsharded tensors.

    Examples:
        On 2 ranks, with a model of transformers:

        >>> mesh, ids = init_device_mesh("cpu", (2,)), torch.arange(64)[None]
        >>> names = parallelize_experts(model, mesh, token_axes=mesh)
        >>> loss = model(input_ids=ids, labels=ids).loss  # this rank's share
        >>> loss.backward()

    Note:
        - All ranks must call the model equally often. With ``token_axes``, either all or none of
          them must pass each of the keywords ``labels``, ``num_items_in_batch`` and
          ``output_router_logits``. The first exchange of counts compares this. If ranks differ, all
          of them raise a `RoutingError`.
        - In training, the tokens of each expert are counted as in a `TopKRouter`; padding is
          counted, too. `collect_loads` and `update_router_bias` accept the model.
        - The function sets the experts' implementation in the configs of the model. Models that
          share a config object raise an error when called, until they are passed to this function
          too.
    """
    library, registry = transformers_library()
    axis = _checked_axis(mesh)
    check_dispatcher(dispatcher)
    check_factors({"bias_rate": bias_rate})
    if not isinstance(model, library.PreTrainedModel):
        raise ExpertConfigError(
            f"model must be a PreTrainedModel of transformers, got a {type(model).__name__}; give "
            "the model inside a wrapper, and for others use a MoE and ExpertParallel"
        )
    layers = _experts_of(model)
    for name, experts in layers.items():
        try:
            _check_experts(experts, axis)
        except ExpertConfigError as error:
            raise ExpertConfigError(f"{name}: {error}") from error
    check_untied(model, {name: [experts] for name, experts in layers.items()})
    axes = None if token_axes is None else as_axes(token_axes)
    if axes is not None and not _takes_labels(model):
        raise ExpertConfigError(
            "token_axes are for the losses of a model, and the forward of "
            f"{type(model).__name__} makes none; give the model whose forward makes the loss, or "
            "leave token_axes out and make shares of your own loss"
        )
    check_different_tokens(axis, token_axes)
    split = Split(mesh=mesh, expert_axis=axis)
    given = None if isinstance(dispatcher, str) else dispatcher
    dispatchers = {
        name: _dispatcher_of(experts, split, given, node_mesh, collectives)
        for name, experts in layers.items()
    }
    loads = {
        name: _Loads(
            load=torch.zeros(experts.num_experts, dtype=torch.int64, device=mesh.device_type),
            token_axes=axes,
            experts_are_split=axis.size > 1,
            collectives=or_torch(collectives),
            bias_rate=bias_rate,
            **_bias_of(model, name, experts.num_experts),
        )
        for name, experts in layers.items()
    }
    if bias_rate and all(each.owner is None for each in loads.values()):
        raise ExpertConfigError(
            f"bias_rate={bias_rate}, but no router of this {type(model).__name__} has a bias of "
            f"its own, {' or '.join(_ROUTER_BIASES)}; leave bias_rate out"
        )
    registry.register(_NAME, _forward)
    for name, experts in layers.items():
        setattr(experts, COUNTED, loads[name])
        split_experts(experts, mesh, split.placements, None)
        for adapter in _adapters_of(model, name, experts):
            _replicate_adapter(adapter, mesh)
        setattr(experts, _ATTRIBUTE, _Dispatch(dispatcher=dispatchers[name]))
        experts.config._experts_implementation = _NAME
    model.register_forward_pre_hook(partial(_check_adapters, list(layers)))
    _share_losses(model, axes, or_torch(collectives), torch.device(mesh.device_type))
    # Bound to the model it is called on, also of a deep copy.
    model.save_pretrained = MethodType(_save_pretrained, model)
    return list(layers)


def _checked_axis(mesh: DeviceMesh) -> Axis:
    if getattr(mesh, "ndim", None) != 1:
        found = f"a mesh with axes {mesh.mesh_dim_names}" if hasattr(mesh, "ndim") else f"{mesh!r}"
        raise ExpertConfigError(
            f"{found}; pass the 1-D mesh of the axis that splits the experts, as mesh['ep']"
        )
    return Axis.of(mesh, 0)


def _experts_of(model: Any) -> dict[str, Any]:
    """Return the modules that the library's decorator of experts has marked, by name."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, flag) for flag in _FLAGS)
    }
    kind = type(model).__name__
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ExpertConfigError(
            f"this {kind} is quantized, and experts are spread of floating weights; load it "
            "dequantized (dequantize=True of its quantization config)"
        )
    if not layers:
        named = {type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()}
        raise ExpertConfigError(
            f"{kind} has no experts that are called through the registry of transformers: looked "
            f"for modules of classes under @use_experts_implementation, with parameters "
            f"{' and '.join(_WEIGHTS)}, in {sum(1 for _ in model.modules())} modules, of which "
            f"{sorted(named) or 'none'} are named experts; use a MoE and ExpertParallel"
        )
    if any(hasattr(experts, _ATTRIBUTE) for experts in layers.values()):
        raise ExpertConfigError(
            f"this {kind} was given to parallelize_experts before; make a new model for another "
            "mesh or other options"
        )
    return layers


def _check_experts(experts: Any, axis: Axis) -> None:
    """Raise an `ExpertConfigError` unless these can be spread over ``axis`` and computed here."""
    if experts._is_expert_parallel:
        raise ExpertConfigError(
            "transformers itself has spread these experts; load the model without its expert "
            "parallelism (distributed_config)"
        )
    check_plain(experts)
    known = [*_WEIGHTS, *(_BIASES if experts.has_bias else ())]
    found = [name for name, _ in experts.named_parameters()]
    if sorted(found) != sorted(known) or experts.has_post_expert_norm or not experts.has_gate:
        raise ExpertConfigError(
            f"a {type(experts).__name__} has parameters {found}; supported are gated experts "
            f"with {known} alone, without a norm of their results"
        )
    for name in known:
        weight = experts.get_parameter(name)
        if weight.dtype not in _DTYPES or type(weight.data) is not Tensor:
            raise ExpertConfigError(
                f"{name} is a {type(weight.data).__name__} of {weight.dtype}; experts are spread "
                f"of plain tensors of {[str(dtype) for dtype in _DTYPES]}"
            )
        if weight.shape[0] != experts.num_experts:
            raise ExpertConfigError(
                f"{name} has shape {tuple(weight.shape)} for num_experts={experts.num_experts}; "
                "they must agree: give the model before its experts are split"
            )
    number = experts.num_experts
    if number % axis.size:
        legal = [n for n in range(1, number + 1) if number % n == 0]
        raise ExpertConfigError(
            f"{axis.name}={axis.size} does not divide num_experts={number}; use one of {legal} "
            "ranks"
        )


def _dispatcher_of(
    experts: Any,
    split: Split,
    given: TokenDispatcher | None,
    node_mesh: AxisMesh | None,
    collectives: Collectives | None,
) -> TokenDispatcher:
    top_k = getattr(experts.config, "num_experts_per_tok", None)
    if given is None and not isinstance(top_k, int):
        raise ExpertConfigError(
            f"the {type(experts.config).__name__} has no num_experts_per_tok, by which the best "
            "dispatcher is chosen; give one, as AllToAll(mesh, num_experts)"
        )
    down = experts.down_proj
    dim = down.shape[2 if experts.is_transposed else 1]
    return given_or_best(
        given,
        split,
        experts.num_experts,
        node_mesh,
        collectives,
        top_k=top_k or 1,
        row_bytes=dim * down.element_size(),
    )


def _adapters_of(model: nn.Module, name: str, experts: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that peft has put around the experts of this name."""
    outermost = model.get_submodule(name.partition(_WRAPPED)[0])
    return [
        module
        for module in outermost.modules()
        if module is not experts and any(True for _ in module.parameters(recurse=False))
    ]


def _replicate_adapter(adapter: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate an adapter over ``mesh``: peft adds its product to weights that are DTensors."""
    replicate_parameters(adapter, mesh)
    for parameter in adapter.parameters(recurse=False):
        if parameter.requires_grad:
            # A rank has the gradient of its own experts only (Partial): sum it over the ranks.
            parameter.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))


def _check_adapters(layers: Sequence[str], model: nn.Module, _: object) -> None:
    """Raise an `ExpertConfigError` where peft has added adapters to experts that were spread."""
    for name in layers:
        try:
            outermost = model.get_submodule(name.partition(_WRAPPED)[0])
        except AttributeError:  # a layer that was removed since
            continue
        for path, parameter in outermost.named_parameters():
            if not isinstance(parameter, DTensor):
                raise ExpertConfigError(
                    f"{path} was added to the experts of this {type(model).__name__} after "
                    "parallelize_experts; call peft's get_peft_model with target_parameters first, "
                    "then parallelize_experts(peft_model.get_base_model(), ...)"
                )


def _bias_of(model: nn.Module, name: str, num_experts: int) -> dict[str, Any]:
    """Return the module that has the bias of these experts' router, and the bias's name."""
    layer = model.get_submodule(name.partition(_WRAPPED)[0].rpartition(".")[0])
    for module in layer.modules():
        for bias in _ROUTER_BIASES:
            found = getattr(module, bias, None)
            if isinstance(found, Tensor) and found.numel() == num_experts:
                return {"owner": module, "name": bias}
    return {"owner": None, "name": ""}


def _forward(module: nn.Module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Return the tokens' results ``[tokens, dim]``, as the library calls its experts functions."""
    dispatch = getattr(module, _ATTRIBUTE, None)
    if not isinstance(dispatch, _Dispatch):
        raise ExpertConfigError(
            f"this {type(module).__name__} belongs to no model given to parallelize_experts, but "
            "shares its config; make it with a config of its own"
        )
    if module.training and torch.is_grad_enabled():
        add = getattr(module, COUNTED).add
        weights = attach(weights, weights.new_zeros(()), add, expert_ids)
    chunk = x, _merged(weights, expert_ids), expert_ids
    experts = partial(_compute, module)
    if isinstance(dispatch.dispatcher, Local):
        return run_here(dispatch.dispatcher, experts, chunk)
    return run_chunks(dispatch.dispatcher, experts, [chunk], lambda: None)[0]


def _merged(weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Merge a token's repeated choices of one expert; return weights ``[tokens, k]``.

    The first of these choices gets the sum of their weights, the others get 0. The result is the
    same, since the library adds repeated choices up, and dispatchers allow repeated experts only
    with weights of 0.
    """
    first = (expert_ids[:, :, None] == expert_ids[:, None]).to(torch.uint8).argmax(2)
    return torch.zeros_like(weights).scatter_add(1, first, weights)


def _compute(module: Any, rows: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    """Return each row's result, of the local experts; see `GroupedExperts.forward`."""
    names = [*_WEIGHTS, *(_BIASES if module.has_bias else ())]
    local = (local_weight(getattr(module, name)) for name in names)  # with what peft adds to it
    rows, gate_up, down, *biases = (as_autocast(tensor) for tensor in (rows, *local))
    if module.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    blocks = blocks_of(counts, rows, (gate_up, down))
    return feed_forward(rows, weights, blocks, module._apply_gate, gate_up, down, biases)


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """Write the library's files of a whole state dict; `ExpertConfigError` without one."""
    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, *args, **kwargs).arguments
    state = given.get("state_dict")
    parts = state is None or any(isinstance(value, DTensor) for value in state.values())
    if parts and not given.get("distributed_checkpoint"):
        raise ExpertConfigError(
            "save_pretrained got no state_dict of whole tensors, and this rank has its own experts "
            "alone; give state_dict=get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), which all ranks make"
        )
    save(model, *args, **kwargs)


def _takes_labels(model: Any) -> bool:
    return "labels" in inspect.signature(inspect.unwrap(type(model).forward)).parameters


def _refuse_router_logits(model: Any, _: object, kwargs: dict[str, Any]) -> None:
    """Raise an `ExpertConfigError` where a model around ``model`` would make its auxiliary loss."""
    if kwargs.get("output_router_logits"):
        raise ExpertConfigError(
            f"output_router_logits=True asks a {type(model).__name__} for what an auxiliary loss "
            "is made of, outside of it and of one rank's tokens; give parallelize_experts the "
            "model whose forward makes the loss, with token_axes"
        )


def _share_losses(
    model: Any, axes: tuple[Axis, ...] | None, collectives: Collectives, device: torch.device
) -> None:
    """Let the losses that ``model`` returns be this rank's shares of those of all tokens."""
    if not _takes_labels(model):
        model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
        return
    forward = inspect.unwrap(type(model).forward)
    used = forward.__code__.co_names
    signature = inspect.signature(forward)
    formula = forward.__globals__.get(_LOSS) if _LOSS in used else None

    def before(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = signature.bind_partial(model, *args).arguments | kwargs
        routed = given.get("output_router_logits")
        if routed is None:
            routed = getattr(model.config.get_text_config(), "output_router_logits", False)
        if formula is not None and routed:
            _check_balance(model, formula, given, axes)
            kwargs = {**kwargs, "output_router_logits": _Later()}
        if axes is None:
            return args, kwargs
        keywords = Keywords.NONE
        for keyword, is_given in (
            (Keywords.LABELS, given.get("labels") is not None),
            (Keywords.NUM_ITEMS, given.get("num_items_in_batch") is not None),
            (Keywords.ROUTER_LOGITS, formula is not None and bool(routed)),
        ):
            keywords |= keyword if is_given else Keywords.NONE
        if Keywords.LABELS in keywords and Keywords.NUM_ITEMS not in keywords:
            _check_loss(model, used)
            # Labels are counted once experts have compared keywords: here some ranks might wait.
            kwargs = {**kwargs, "num_items_in_batch": _Summed(1)}
        _note(keywords)
        return args, kwargs

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        later = isinstance(kwargs.get("output_router_logits"), _Later)
        return args, {**kwargs, "output_router_logits": True} if later else kwargs

    def after(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if axes is None:
            return None
        given, found = signature.bind_partial(model, *args).arguments | kwargs, {}
        if isinstance(given.get("num_items_in_batch"), _Summed):
            loss = output[0] if isinstance(output, tuple) else output.loss
            count = _count_labels(given, device, axes, collectives)
            found["loss"] = loss / count.to(loss.device)
        if isinstance(output, tuple):
            return (found["loss"], *output[1:]) if found else None
        if isinstance(given.get("output_router_logits"), _Later):
            loss = found.get("loss", output.loss)
            found |= _balanced(model, given, output, loss, axes, collectives)
        return type(output)(**{**output, **found}) if found else None

    def end(*_: object) -> None:
        _note(Keywords.NONE)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)
    if model.base_model is not model:
        model.base_model.register_forward_pre_hook(ask, with_kwargs=True)


@fenced
def _note(keywords: Keywords) -> None:
    KEYWORDS.set(keywords)


def _balanced(
    model: Any,
    given: dict[str, Any],
    output: Any,
    loss: Tensor | None,
    axes: Sequence[Axis],
    collectives: Collectives,
) -> dict[str, Tensor]:
    """Return this rank's share of the auxiliary loss, and ``loss`` with it if there is one."""
    if not output.router_logits:
        raise ExpertConfigError(
            f"{type(model).__name__} returned no router logits, of which its auxiliary loss is "
            "made: transformers knows models by their classes, which FSDP changes; shard "
            "its layers and the model, not the one without a head between them"
        )
    mask, tokens = given.get("attention_mask"), output.router_logits[0].shape[0]
    if mask is not None and mask.numel() != tokens:
        if loss is None:  # generation: a cache has the tokens before
            return {}
        raise ExpertConfigError(
            f"attention_mask {tuple(mask.shape)} for {tokens} tokens, some of which the "
            "auxiliary loss leaves out; give one of shape [batch, sequence], or none"
        )
    share = _balance_share(output.router_logits, model.num_experts_per_tok, mask, axes, collectives)
    if loss is None:
        return {"aux_loss": share}
    return {"aux_loss": share, "loss": loss + model.router_aux_loss_coef * share.to(loss.device)}


def _check_balance(
    model: Any, formula: Any, given: dict[str, Any], axes: tuple[Axis, ...] | None
) -> None:
    """Raise an `ExpertConfigError` unless the auxiliary loss of a call can be made a share."""
    kind = type(model).__name__
    if axes is None:
        raise ExpertConfigError(
            f"output_router_logits=True lets {kind} compute an auxiliary loss of all tokens; say "
            "which axes split them: token_axes=mesh for all of a mesh, or token_axes=() for none"
        )
    as_dict = given.get("return_dict")
    if not (model.config.return_dict if as_dict is None else as_dict):
        raise ExpertConfigError(
            "output_router_logits=True with return_dict=False is not supported; take the losses "
            "from the output by their names"
        )
    known = import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    same = formula.__code__.co_code == known.__code__.co_code
    if not same or not hasattr(model, "router_aux_loss_coef") or model.base_model is model:
        raise ExpertConfigError(
            f"the auxiliary loss of {kind} is not computed as Mixtral's is, and of one rank's "
            "tokens it would be another one; set output_router_logits=False"
        )


def _check_loss(model: Any, used: Sequence[str]) -> None:
    """Raise an `ExpertConfigError` unless ``model`` divides its loss by ``num_items_in_batch``."""
    taken = inspect.signature(model.loss_function).parameters
    if "loss_function" not in used or not {"shift_labels", "num_items_in_batch"} <= taken.keys():
        raise ExpertConfigError(
            f"the loss of {type(model).__name__} takes no shift_labels and num_items_in_batch, so "
            "that it is no share of a mean over all ranks; call the model without labels, or leave "
            "token_axes out and scale its loss yourself"
        )


@fenced
def _count_labels(
    given: dict[str, Any], device: torch.device, axes: Sequence[Axis], collectives: Collectives
) -> Tensor:
    """Return how many labels count, on all ranks of ``axes``, at least 1."""
    shifted = given.get("shift_labels")
    labels = given["labels"][..., 1:] if shifted is None else shifted
    count: Tensor = (labels != given.get("ignore_index", _IGNORED)).sum().to(device)
    for axis in axes:
        if axis.size > 1:
            (count,) = collectives.all_reduce(axis, [count]).wait()
    return count.clamp(min=1)


@fenced
def _balance_share(
    logits: Sequence[Tensor],
    top_k: int,
    mask: Tensor | None,
    axes: Sequence[Axis],
    collectives: Collectives,
) -> Tensor:
    """Return this rank's share of the auxiliary loss, a scalar.

    That is transformers' ``load_balancing_loss_func`` of all ranks' ``logits [tokens, experts]``,
    one for each layer: ``E * sum over e of (C_e / N) * (S_e / N)`` as in `BalanceLoss`. Tokens
    where ``mask [batch, sequence]`` is 0 are left out.
    """
    first = logits[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    seen = first.new_ones(first.shape[0], dtype=wide) if mask is None else mask.reshape(-1)
    seen = seen.to(first.device, wide)
    counts = first.new_zeros(first.shape[1], dtype=torch.float64)
    sums = first.new_zeros(first.shape[1], dtype=wide)
    for layer in logits:
        probabilities = layer.to(first.device).softmax(-1)
        chosen = probabilities.detach().topk(top_k).indices
        counts.index_add_(0, chosen.reshape(-1), seen.double().repeat_interleave(top_k))
        sums = sums + (probabilities.to(wide) * seen[:, None]).sum(0)
    pairs = seen.double().sum()[None] * len(logits)
    return balance_shares(sums, counts, pairs, axes, collectives)[0]


__all__ = ["checkpoint_sources", "parallelize_experts"]
