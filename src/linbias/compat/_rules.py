"""What several of these modules ask of their arguments."""

import numbers


def check_count(function: str, name: str, value: object) -> int:
    """A number of heads, features or positions is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value}")
    return int(value)


def check_head_size(function: str, d_model: object, name: str, heads: object) -> int:
    """The size of a head; d_model is a multiple of the heads, whose number is called `name`."""
    width = check_count(function, "d_model", d_model)
    number = check_count(function, name, heads)
    if width % number:
        raise ValueError(
            f"{function}: d_model must be a multiple of {name} = {number}, got {width}"
        )
    return width // number
