"""What decides between the kernels of a CUDA device, as plain data."""

from dataclasses import dataclass

import torch

Capability = tuple[int, int]

_CUDNN_SINCE = 91500  # before, sequences that 128 does not divide came out wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device's compute capability, the version of cuDNN, and who computes flash attention.

    Attributes:
        capability: Major and minor compute capability; ``None`` where it is unknown, as on devices
            of other makers, where nothing is ruled out.
        cudnn: Version number of cuDNN, 0 without it.
        flash: Implementation that replaces torch's own flash kernels (``"FA3"``), if any.
    """

    capability: Capability | None = None
    cudnn: int = 0
    flash: str | None = None

    @property
    def prefers_cudnn(self) -> bool:
        """Return whether cuDNN is the fastest, as torch's own choice has it: Hopper, Blackwell."""
        if self.capability is None or self.flash is not None:
            return False
        major, minor = self.capability
        return major in (9, 10) and minor in (0, 3) and self.cudnn > _CUDNN_SINCE


_UNKNOWN = Hardware()


def hardware_of(device: torch.device) -> Hardware:
    """Return what is known of a device; equal devices on all ranks give equal answers."""
    # A build for another maker's devices calls them cuda, too.
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.device_count() == 0:
        return _UNKNOWN
    return Hardware(
        capability=torch.cuda.get_device_capability(device),
        cudnn=torch.backends.cudnn.version() or 0,
        flash=torch.nn.attention.current_flash_attention_impl(),
    )
