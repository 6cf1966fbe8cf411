"""x"""

SDPA_UP_TO: dict[tuple[str, str, bool, int], int] = {}
