"""One style for all layers of a model: all of them, or none."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._errors import ExpertConfigError
from .._moe import MoE
from .._parameters import check_untied
from ._base import BaseExpertParallel


def parallelize_experts(model: nn.Module, mesh: DeviceMesh, style: BaseExpertParallel) -> list[str]:
    """Apply ``style`` to every `MoE` in ``model`` and return their names.

    Communicates nothing; only a placement is compared first, by one small all-gather over each axis
    of the split. `ExpertConfigError` that names the first layer for which the style is not legal,
    before any layer was changed, for a model without any, for layers that share experts or
    parameters of them with each other or anything else (one `MoE` in several places is fine), and
    on all ranks for a placement that they do not all give.
    """
    style.compare_placements(mesh)
    changes = {}
    replaced = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            try:
                changes[name] = style.prepare(module, mesh)
                replaced[name] = style.replaced(module)
            except ExpertConfigError as error:
                raise ExpertConfigError(f"layer {name!r}: {error}") from error
    if not changes:
        raise ExpertConfigError(
            f"{type(model).__name__} has no MoE; apply the style to the experts of your own layer"
        )
    check_untied(model, replaced)
    for change in changes.values():
        change()
    return list(changes)
