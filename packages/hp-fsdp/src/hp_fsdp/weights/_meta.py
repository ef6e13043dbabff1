"""`parameters_on_meta`: build a model without memory for its parameters, to load them later."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are built in a ``with`` block on the meta device.

    Parameters on the meta device have a shape and a dtype, but no memory and no values.
    `load_safetensors` allocates and loads them. Buffers, such as the frequencies of rotary
    embeddings, are created as usual, because weight files may not contain them. Tied parameters
    stay tied.

    Yields:
        None.

    Examples:
        >>> with parameters_on_meta():
        ...     model = nn.Linear(1000, 1000)
        >>> model.weight.device
        device(type='meta')

    Note:
        ``with torch.device("meta")`` would put buffers on the meta device, too. Each parameter is
        created before it is moved, so the largest parameter must fit into memory.
    """

    moved: Any = WeakIdKeyDictionary()  # tied parameters must stay one object

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in moved:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            moved[parameter] = empty
        return cast(nn.Parameter, moved[parameter])

    hook = register_module_parameter_registration_hook(cast(Any, move))  # annotated to return None
    try:
        yield
    finally:
        hook.remove()
