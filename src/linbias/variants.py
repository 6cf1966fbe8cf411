"""The variants of DESIGN section 1 as slopes for both sides: the only place where a name turns into numbers."""

import math

from linbias.schedules import slopes

VARIANTS = ("causal", "symmetric", "directional", "asymmetric", "none", "none_causal")


def is_causal(variant: str) -> bool:
    """Whether the variant hides the keys after the query."""
    return variant in ("causal", "none_causal")


def variant_slopes(
    function: str, variant: str, num_heads: int, schedule: str = "paper", max_bias: float = 8.0
) -> tuple[list[float], list[float]]:
    """Return left and right slopes, [H] each; a causal variant hides the right side whatever they say.

    Raises:
        ValueError: The variant is unknown, or splits an odd number of heads.
    """
    if variant not in VARIANTS:
        raise ValueError(f"{function}: variant must be one of {VARIANTS}, got {variant!r}")
    if variant == "directional" and num_heads % 2:
        raise ValueError(
            f"{function}: variant 'directional' needs an even num_heads, got {num_heads}"
        )
    if variant.startswith("none"):
        flat = [0.0] * num_heads
        return flat, flat
    if variant == "directional":
        half = slopes(num_heads // 2, schedule, max_bias).tolist()
        hidden = [math.inf] * (num_heads // 2)
        return half + hidden, hidden + half
    own = slopes(num_heads, schedule, max_bias).tolist()
    return own, own
