"""Which type of device meshes are on."""

import torch
import torch.distributed as dist

from ._errors import MeshError, join_words


def default_device_type() -> str:
    """Return the accelerator's type if this world has a backend for it, else the CPU's.

    A world that runs on gloo alone is on the CPU too.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return "cpu"
    return accelerator.type if accelerator.type in _backends() else "cpu"


def comparison_device_type() -> str:
    """Return where a tensor of the default group's own collectives may lie.

    Where gloo is at hand that is the CPU: no device is needed, and no communicator starts early.
    It does not depend on what a caller wants, which may differ between ranks.
    """
    return "cpu" if "gloo" in dist.get_backend_config() else default_device_type()


def checked_device_type(device_type: object) -> str:
    """Return a device type that this world has a backend for as it is, and the default for None.

    ``"meta"``, which has no data to communicate, needs no backend. Raises `MeshError` for anything
    else, a device with an index included.
    """
    if device_type is None:
        device_type = default_device_type()
    if isinstance(device_type, str):
        try:
            kind = torch.device(device_type).type
        except RuntimeError:
            raise _refused(device_type, "is no device type of torch") from None
        if kind != device_type:
            raise _refused(device_type, f"has an index; give {kind!r} without it")
        if kind not in (*_backends(), "meta"):
            raise _refused(device_type, "has no backend in this world")
        return kind
    raise _refused(device_type, "is no string")


def _backends() -> list[str]:
    """Return the device types that the default group has a backend for."""
    return [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]


def _refused(device_type: object, reason: str) -> MeshError:
    legal = join_words(sorted(map(repr, _backends())))
    return MeshError(
        f"device_type={device_type!r} {reason}; this world has backends for {legal}, "
        "and None takes the default"
    )
