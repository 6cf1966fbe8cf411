"""The slope schedules and variants: how fast each head's scores fall with distance."""

import math

import numpy as np
import numpy.typing as npt

SCHEDULES = ("paper", "geometric", "halving", "mpt")
# Of DESIGN section 1: a name for slopes of both sides.
VARIANTS = ("causal", "symmetric", "directional", "asymmetric", "none", "none_causal")


def in_words(left: float, right: float = math.inf) -> str:
    """Label a head by its slopes: fractions where they are some, and a right one only where it
    differs.

    Example:
        >>> in_words(0.5), in_words(2**-0.5), in_words(0.25, 0.1), in_words(math.inf, 0.25)
        ('slope 1/2', 'slope 0.7071', 'slopes 1/4, 1/10', 'slope 1/4 to the right')
    """
    if left == right or math.isinf(right):
        return f"slope {written(left)}"
    if math.isinf(left):
        return f"slope {written(right)} to the right"
    return f"slopes {written(left)}, {written(right)}"


def written(slope: float) -> str:
    """Write 1/256 for 0.00390625, and four digits of what is one over no whole number."""
    inverse = 1 / float(slope) if 0 < slope < 1 else 0.0
    is_whole = 0 < inverse < math.inf and abs(inverse - round(inverse)) < 1e-9
    return f"1/{round(inverse)}" if is_whole else f"{slope:.4g}"


def slopes(
    num_heads: int, schedule: str = "paper", max_bias: float = 8.0
) -> npt.NDArray[np.float64]:
    """Give each head its slope, the score it loses per token of distance.

    | schedule    | slope of head h = 0 .. H-1                    | used by                       |
    |-------------|-----------------------------------------------|-------------------------------|
    | `paper`     | 2^(-max_bias (h+1) / H) where H is a power of | the paper, BLOOM, Falcon; by  |
    |             | two; else the largest such list below H, then | distance in a plane CROMA and |
    |             | every second slope of the next larger one     | TITAN                         |
    | `geometric` | 2^(-max_bias (h+1) / H) for every H           | the Flax exercise             |
    | `halving`   | 2^-(h+1)                                      | the book chapter              |
    | `mpt`       | the list of the next power of two, every      | MPT (which comes to the same  |
    |             | second one first, cut to H                    | slopes as `paper`)            |

    Args:
        num_heads: Number of query heads H, at least 1.
        schedule: One of the names above.
        max_bias: Exponent of the flattest slope, 2^-max_bias; positive. `halving` does not have
            one.

    Returns:
        [H], float64, all positive.

    Raises:
        TypeError: num_heads is not an integer.
        ValueError: num_heads, schedule or max_bias breaks a rule above.

    Example:
        >>> slopes(8).tolist()
        [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]

    Source: Press, Smith and Lewis, "Train Short, Test Long", ICLR 2022, section 3, and the code of
    its authors for head counts that are no power of two.
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int | np.integer):
        raise TypeError(f"slopes: num_heads must be an integer, got {num_heads!r}")
    if num_heads < 1:
        raise ValueError(f"slopes: num_heads must be at least 1, got {num_heads}")
    if schedule not in SCHEDULES:
        raise ValueError(f"slopes: schedule must be one of {SCHEDULES}, got {schedule!r}")
    if not 0 < max_bias < math.inf:
        raise ValueError(f"slopes: max_bias must be positive and finite, got {max_bias}")
    if schedule == "halving":
        if max_bias != 8.0:
            raise ValueError(f"slopes: schedule 'halving' has no max_bias, got {max_bias}")
        return np.exp2(-np.arange(1.0, num_heads + 1))
    if schedule == "geometric":
        return _geometric(num_heads, max_bias)
    below = 1 << (int(num_heads).bit_length() - 1)
    if below == num_heads:
        return _geometric(num_heads, max_bias)
    twice = _geometric(2 * below, max_bias)
    if schedule == "mpt":
        return np.concatenate([twice[1::2], twice[::2]])[:num_heads]
    return np.concatenate([_geometric(below, max_bias), twice[::2][: num_heads - below]])


def _geometric(num_heads: int, max_bias: float) -> npt.NDArray[np.float64]:
    return np.exp2(-max_bias * np.arange(1.0, num_heads + 1) / num_heads)


def is_causal(variant: str) -> bool:
    """Whether the variant hides the keys after the query."""
    return variant in ("causal", "none_causal")


def variant_slopes(
    function: str, variant: str, num_heads: int, schedule: str = "paper", max_bias: float = 8.0
) -> tuple[list[float], list[float]]:
    """Return left and right slopes, [H] each; a causal variant hides the right side in any case.

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
