"""What an experiment's design can claim at all: levels and counts known before anything runs (no torch, no scipy)."""

from __future__ import annotations

import math

ALPHA = 0.05
SMALLEST_EFFECT = 0.02  # differences below this are of no interest, unless the configuration says otherwise


def minimum_rounds(arms: int, alpha: float = ALPHA) -> int:
    """Fewest rounds at which a signed-rank test can say anything under Holm: 1 + ⌈log2(arms / alpha)⌉."""
    if arms < 1:
        raise ValueError(f"arms: {arms} is not allowed; it must be 1 or more")
    return 1 + math.ceil(math.log2(arms / alpha) - 1e-12)
