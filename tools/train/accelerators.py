"""Peak arithmetic of known accelerators."""

import torch

# Dense bfloat16 operations per second, by a part of torch's name for the device, the more special
# name first. From NVIDIA's data sheets, halved if they count sparsity.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(dtype: str) -> float | None:
    """Return the peak of this process's GPU, or None if it or the dtype's peak is not known.

    Args:
        dtype: dtype of the computation; only ``bfloat16`` has a known peak.

    Returns:
        Operations per second, of which a multiplication with an addition is two.
    """
    if dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
