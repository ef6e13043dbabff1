"""`parameters_on_meta`: build a model whose weights are loaded later, without memory for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are built in a ``with`` block on the meta device.

    Such parameters have a shape and a dtype, but no memory and no values. `load_safetensors` gives
    them both. Buffers, such as the frequencies of rotary embeddings, get memory and values as
    usual, because weight files do not have them. Tied parameters stay tied.

    Yields:
        None.

    Examples:
        >>> with parameters_on_meta():
        ...     model = nn.Linear(1000, 1000)
        >>> model.weight.device
        device(type='meta')

    Note:
        ``torch.device("meta")`` puts buffers on the meta device, too, so they would have to be
        computed again. Each parameter is created before it is moved, so the largest one must fit
        into memory.
    """

    moved: Any = WeakIdKeyDictionary()  # a tied parameter must become one object

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        if parameter not in moved:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(empty).update(vars(parameter))
            moved[parameter] = empty
        return cast(nn.Parameter, moved[parameter])

    hook = register_module_parameter_registration_hook(cast(Any, move))  # torch says: returns None
    try:
        yield
    finally:
        hook.remove()
