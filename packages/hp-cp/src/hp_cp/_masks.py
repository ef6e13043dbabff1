"""Which keys a query sees."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpec:
    """The attention mask as a rule on global positions, the same for every batch row and head.

    Causal: query ``i`` sees key ``j`` where ``j <= i``. Otherwise every query sees every key.
    """

    causal: bool
