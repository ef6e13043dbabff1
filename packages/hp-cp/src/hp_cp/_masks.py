"""Which keys a query sees."""

from dataclasses import dataclass

from ._errors import LayoutError, described


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The attention mask as a rule on global positions, the same for every batch row and head.

    Causal: query ``i`` sees key ``j`` where ``j <= i``. Otherwise every query sees every key.
    """

    causal: bool


def check_mask(mask: object) -> None:
    """Raise `LayoutError` unless ``mask`` is a `MaskSpec`."""
    if not isinstance(mask, MaskSpec):
        raise LayoutError(
            f"mask must be a MaskSpec, got {described(mask)}; use MaskSpec(causal=True) or "
            f"MaskSpec(causal=False)"
        )
