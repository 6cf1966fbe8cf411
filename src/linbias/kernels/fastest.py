"""At which lengths PyTorch's attention is faster than the compiled core: `python runs/fastest.py` writes this.

By CPU target, dtype, whether gradients are taken, and head size: the shortest number of queries, which is that of
keys, that was measured, and the longest up to which it is faster; 0 where it is at none.
"""

SDPA_IS_FASTER: dict[tuple[str, str, bool, int], tuple[int, int]] = {
    ("avx512_amx", "bfloat16", False, 32): (64, 0),
    ("avx512_amx", "bfloat16", False, 64): (64, 0),
    ("avx512_amx", "bfloat16", True, 32): (64, 0),
    ("avx512_amx", "bfloat16", True, 64): (64, 0),
    ("avx512_amx", "float32", False, 32): (64, 0),
    ("avx512_amx", "float32", False, 64): (64, 0),
    ("avx512_amx", "float32", True, 32): (64, 0),
    ("avx512_amx", "float32", True, 64): (64, 0),
}
