"""Compare the loss and the gradients of a parallelized model with one process."""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .collectives._c10d import TorchCollectives
from .collectives._interface import Axis, AxisMesh
from .ragged._tensor import RaggedTensor

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # names that wrapper modules insert
_SHOWN = 20  # largest number of differences that a report lists
# A gradient is a rounding error if its norm is below this fraction of the norm of all gradients.
_FLOOR = 1e-6
_LARGEST = 64  # largest integer factor for which a report names the usual cause
_LOSS = "the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of `compare_with_one_process`.

    Attributes:
        loss: Loss of the parallel run, summed over the ranks of ``loss_mesh``.
        expected_loss: Loss of the run in one process.
        largest_error: Largest relative error of the loss and of the gradient of any parameter.
        parameters: Number of parameters with a gradient.

    Examples:
        >>> Comparison(loss=2.5, expected_loss=2.5, largest_error=0.0, parameters=7).loss
        2.5
    """

    loss: float
    expected_loss: float
    largest_error: float
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Difference between the parallel run and one process, for the loss or one gradient.

    Attributes:
        name: Name of the parameter, or ``_LOSS``.
        error: Relative error.
        factor: The parallel value divided by the value of one process. None if they are not
            multiples of each other.
        details: Text for the report, or an empty string.
    """

    name: str
    error: float
    factor: float | None
    details: str = ""


def compare_with_one_process(
    model: nn.Module,
    parallelize: Callable[[nn.Module], object],
    loss: Callable[[nn.Module], Tensor],
    share: Callable[[nn.Module], Tensor],
    loss_mesh: AxisMesh,
    *,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-10,
) -> Comparison:
    """Compare the loss and all gradients of a parallelized model with one process.

    Every rank runs two copies of the model. One copy is not parallelized and gets the whole batch.
    The other copy is parallelized and gets this rank's part of the batch. The losses that ``share``
    returns are summed over ``loss_mesh``. The gradient of each parameter is compared unsharded. All
    ranks of the default process group have to call this function.

    In float64, rounding errors are about 1e-15, so any larger difference is a mistake in the
    script. If ``dtype`` is float64, casts to float32 inside the model give float64 during the call;
    see `keep_float64`.

    Args:
        model: Plain model with equal values on all ranks, without dropout. It is not changed.
        parallelize: Parallelizes a copy of the model, in place, or returns the parallel module.
        loss: Returns the loss of the whole batch, from a copy of the model in one process.
        share: Returns this rank's share of the loss, from the parallelized model. If the result of
            ``loss`` or ``share`` requires gradients, `compare_with_one_process` calls ``backward``
            on it. Otherwise the function must have called ``backward`` itself, for example for each
            microbatch.
        loss_mesh: Mesh of all ranks that hold different tokens. In hp-mesh this is
            ``mesh["loss"]``.
        dtype: Dtype of the copies. Defaults to float64.
        rtol: Largest relative error of the loss, and of the gradient of each parameter. Defaults to
            1e-10.

    Returns:
        The losses and the largest error.

    Raises:
        AssertionError: Raised on all ranks in these cases:

            - The loss or a gradient differs. The message names the parameters, the factor between
              the gradients, and the usual cause of this factor.
            - Ranks get different losses from ``loss``.
            - ``parallelize`` changes parameter names, or fails on another rank.
            - A parameter has a gradient on some ranks only.
        TypeError: ``loss`` or ``share`` does not return a tensor of one element.

    Examples:
        On 4 ranks:

        >>> mesh, x = init_device_mesh("cpu", (4,)), torch.ones(8, 3, dtype=torch.float64)
        >>> def sum_gradients(model):
        ...     for p in model.parameters():
        ...         p.register_post_accumulate_grad_hook(
        ...             lambda p: torch.distributed.all_reduce(p.grad)
        ...         )
        >>> compared = compare_with_one_process(
        ...     nn.Linear(3, 1, bias=False),
        ...     sum_gradients,
        ...     lambda model: model(x).square().sum() / 8,
        ...     lambda model: model(x.chunk(4)[mesh.get_local_rank()]).square().sum() / 8,
        ...     mesh,
        ... )
        >>> compared.largest_error < 1e-10
        True
    """
    alone = copy.deepcopy(model).to(dtype)
    parallel = copy.deepcopy(model).to(dtype)
    with keep_float64() if dtype is torch.float64 else nullcontext():
        expected = _run(alone, loss).item()
        _check_equal_references(expected)
        references = dict(_parameters_of(alone))
        parallel, parameters = _parallelized(parallel, parallelize, references)
        total = _run(parallel, share).double()
    _check_equal_presence({name for name, p in parameters.items() if p.grad is not None})
    for position in range(loss_mesh.ndim):
        TorchCollectives().all_reduce(Axis.of(loss_mesh, position), [total]).wait()
    differences = [_difference(_LOSS, total, torch.tensor(expected, dtype=torch.float64), 0.0)]
    squares = [x.grad.double().square().sum() for x in references.values() if x.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item() if squares else 0.0
    for name, reference in references.items():
        found, wanted = parameters[name].grad, reference.grad
        if found is None and wanted is None:
            continue
        found = torch.zeros_like(reference) if found is None else found
        wanted = torch.zeros_like(reference) if wanted is None else wanted
        if isinstance(found, DTensor | RaggedTensor):
            found = found.full_tensor()
        differences.append(_difference(name, found, wanted, _FLOOR * norm))
    worst = _worst_of_ranks(differences)
    if wrong := [x for x in worst if not x.error <= rtol]:
        raise AssertionError(_report(wrong, worst, dtype, rtol))
    return Comparison(
        loss=total.item(),
        expected_loss=expected,
        largest_error=max(x.error for x in worst),
        parameters=len(differences) - 1,
    )


# Functions that models call with ``dtype=torch.float32``. `keep_float64` replaces these functions.
_CASTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Tensor, ("to", "type", "softmax", "sum", "mean", "new_zeros", "new_ones", "new_full")),
    (torch, ("arange", "empty", "full", "linspace", "ones", "softmax", "sum", "tensor", "zeros")),
    (torch, ("empty_like", "full_like", "ones_like", "zeros_like")),
    (nn.functional, ("log_softmax", "softmax")),
)


@contextmanager
def keep_float64() -> Iterator[None]:
    """Compute in float64 inside the block, even in models that cast to float32.

    The default dtype is float64, and casts to float32 give float64 instead. Models of the
    transformers library compute norms and losses in float32. Inside the block they compute them in
    float64, so that results can be compared with a tolerance of 1e-12.

    For tests only: functions of torch are replaced in all threads.

    Yields:
        None.

    Examples:
        >>> with keep_float64():
        ...     print(torch.zeros(2).float().dtype)
        torch.float64
    """
    before = torch.get_default_dtype()
    # torch memoizes its functions when `torch.device` is entered for the first time. Enter it now,
    # while the functions are the original ones.
    with torch.device("cpu"):
        torch.empty(0)
    with ExitStack() as stack:
        for owner, names in _CASTS:
            for name in names:
                stack.enter_context(_replaced(owner, name, _widened(getattr(owner, name))))
        stack.enter_context(_replaced(Tensor, "float", Tensor.double))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        found = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if x is torch.float32 else x for k, x in kwargs.items()}
        return function(*found, **named)

    return wide


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # The original is inherited.
            delattr(owner, name)


def _run(model: nn.Module, function: Callable[[nn.Module], Tensor]) -> Tensor:
    """Call ``function(model)``, and return the loss as a detached scalar tensor.

    Runs backward if the loss requires gradients. Raises TypeError if the result is not a tensor of
    one element.
    """
    value: object = function(model)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError(
            f"loss and share must return a tensor of one element, got {type(value).__name__}"
        )
    if value.requires_grad:
        value.backward()
    return value.detach().clone().reshape(())


def _check_equal_references(expected: float) -> None:
    found = _gathered_objects(expected)
    if others := [rank for rank, x in enumerate(found) if repr(x) != repr(found[0])]:
        raise AssertionError(
            f"the loss of one process is {found[0]} on rank 0 and other numbers on ranks "
            f"{', '.join(map(str, others))}; give equal models and equal whole batches on all "
            "ranks: call torch.manual_seed before the model and the batch are made, and turn "
            "dropout off"
        )


def _parallelized(
    model: nn.Module, parallelize: Callable[[nn.Module], object], references: Mapping[str, object]
) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Call ``parallelize``. Return the parallel model, and a dict from names to its parameters.

    The names must be the keys of ``references``. If ``parallelize`` fails on one rank, all ranks
    raise an error.
    """
    failure = None
    try:
        made = parallelize(model)
        model = made if isinstance(made, nn.Module) else model
        parameters = dict(_parameters_of(model))
        if others := sorted(references.keys() ^ parameters.keys()):
            raise AssertionError(
                f"parameters have other names than in one process: {', '.join(others[:_SHOWN])}; "
                "parallelize must keep names, and return the whole model or nothing"
            )
    except Exception as error:  # noqa: BLE001 - reported to all ranks, so that none waits
        failure = error
    texts = _gathered_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise AssertionError(f"parallelize failed on rank {rank}: {text}")
    return model, parameters


def _check_equal_presence(present: set[str]) -> None:
    """Raise on all ranks if a parameter has a gradient on some ranks only."""
    found = _gathered_objects(sorted(present))
    for name in sorted(set().union(*found)):
        having = [rank for rank, names in enumerate(found) if name in names]
        if len(having) < len(found):
            raise AssertionError(
                f"{name} has a gradient on ranks {', '.join(map(str, having))} only; all ranks "
                "must use the same parameters, or reduce their gradients"
            )


def _gathered_objects(value: Any) -> list[Any]:
    """All-gather a Python object over the default process group. Return one object per rank.

    Without a default process group, the list has only ``value``.
    """
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), parameter


def _difference(name: str, found: Tensor, wanted: Tensor, floor: float) -> _Difference:
    """Compare the loss or gradient ``found`` of the parallel run with ``wanted`` of one process.

    The error is the norm of the difference, divided by the norm of ``wanted`` or by ``floor``,
    whichever is larger. The error is infinite if the shapes differ or a value is not finite.
    """
    if found.shape != wanted.shape:
        details = f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        return _Difference(name=name, error=math.inf, factor=None, details=details)
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size, distance = wanted.norm().item(), (found - wanted).norm().item()
    if not math.isfinite(distance):
        return _Difference(name=name, error=math.inf, factor=None, details="not finite")
    error = distance / max(size, floor, 1e-300)
    factor = None
    if size > floor:
        ratio = ((found * wanted).sum() / size**2).item()
        if (found - ratio * wanted).norm().item() <= 1e-6 * max(found.norm().item(), 1e-6 * size):
            factor = ratio
    details = f"{found.item():.6g} instead of {wanted.item():.6g}" if name == _LOSS else ""
    return _Difference(name=name, error=error, factor=factor, details=details)


def _worst_of_ranks(differences: list[_Difference]) -> list[_Difference]:
    """Return, for the loss and each gradient, the `_Difference` of the rank with the largest error.

    The result is the same on all ranks.
    """
    by_value = zip(*_gathered_objects(differences), strict=True)
    return [max(each, key=lambda x: x.error) for each in by_value]


def _report(
    wrong: Sequence[_Difference], compared: Sequence[_Difference], dtype: torch.dtype, rtol: float
) -> str:
    gradients = [x for x in wrong if x.name != _LOSS]
    lines = [
        f"{len(gradients)} of {len(compared) - 1} gradients"
        f"{' and the loss differ' if len(gradients) < len(wrong) else ' differ'} from one process "
        f"({dtype}, rtol={rtol:g}):"
    ]
    for x in wrong[:_SHOWN]:
        near = x.factor is None or abs(x.factor - 1) < 1e-5
        kind = f"relative error {x.error:.2g}" if near else f"{x.factor:.6g} times"
        lines.append(f"  {x.name}: {kind}{f', {x.details}' if x.details else ''}")
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    causes = [_cause(x.factor) for x in gradients]
    if len(gradients) < len(wrong):
        causes.insert(0, _cause_of_loss(wrong[0].factor))
    lines.extend(cause for cause in dict.fromkeys(causes) if cause)
    return "\n".join(lines)


def _cause_of_loss(factor: float | None) -> str:
    """Return the usual cause if the loss is nearly, but not exactly, 2, 3, ... times too large.

    ``factor`` is the loss divided by the expected loss, or None. Returns an empty string for other
    factors, also for integers (up to a relative error of 1e-6).
    """
    whole = 0 if factor is None else round(factor)
    if factor is None or whole < 2 or not 1e-6 < abs(factor - whole) / whole < 0.05:
        return ""
    return (
        f"the loss about {whole} times: each of {whole} ranks or microbatches divides by its own "
        "number of labels"
    )


def _cause(factor: float | None) -> str:
    """Return the usual cause if the parallel gradient is ``factor`` times the expected gradient.

    ``factor`` is None if the two gradients are not multiples of each other. Returns an empty string
    if ``factor`` is 1 up to a relative error of 1e-3.
    """
    if factor is None:
        return (
            "no common factor: ranks compute with other data, positions, labels or initial values, "
            "or attention does not span the ranks"
        )
    if abs(factor) < 1e-6:
        return "0 times: no gradient arrives, or gradients are not reduced"
    whole, inverse = round(factor), round(1 / factor)
    if 2 <= whole <= _LARGEST and abs(factor - whole) < 1e-6 * whole:
        return (
            f"{whole} times: labels are counted for one of {whole} microbatches or ranks only, or "
            f"{whole} ranks sum a loss that each of them computes whole"
        )
    if 2 <= inverse <= _LARGEST and abs(factor * inverse - 1) < 1e-6:
        return (
            f"1/{inverse} times: a mean over {inverse} ranks or microbatches where a sum is "
            "needed, such as fully_shard without gradient_reduction='sum'"
        )
    if abs(factor - 1) < 1e-3:
        return ""
    return (
        f"{factor:.4g} times: the loss is divided by another number of labels than in one process"
    )
