"""Transformers: the Falcon model of the other adapter with `sdpa`."""

from functools import partial

from adapters import transformers_falcon

NAME, PACKAGE = "Transformers, Falcon (sdpa)", "transformers"
RUNS, DTYPES = transformers_falcon.RUNS, transformers_falcon.DTYPES
attention = partial(transformers_falcon.attention, implementation="sdpa")
