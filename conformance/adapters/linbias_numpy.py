"""linbias' own definition in NumPy: the vectors are made with it, so this checks the checker."""

import linbias
from adapters import parts

NAME, PACKAGE, RUNS = "linbias, NumPy", "linbias", "all"
DTYPES = ("float64",)


def attention(q, k, v, **arguments):
    return linbias.attention(q, k, v, **parts.for_linbias(q, k, **arguments))
