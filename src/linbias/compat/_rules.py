"""What several of these modules ask of their arguments."""

import numbers


def check_count(function: str, name: str, value: object) -> int:
    """A number of heads, features or positions is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value}")
    return int(value)
