"""Transformers: the Falcon model of the other adapter with `sdpa`."""

from adapters import transformers_falcon

NAME, PACKAGE, RUNS = (
    "Transformers, Falcon (sdpa)",
    "transformers",
    transformers_falcon.RUNS,
)
DTYPES = transformers_falcon.DTYPES


def attention(
    q, k, v, *, slopes, causal, scale, dtype, key_range=None, schedule="paper", max_bias=8.0
):
    return transformers_falcon.attention(
        q, k, v, slopes=slopes, causal=causal, scale=scale, dtype=dtype, key_range=key_range,
        schedule=schedule, max_bias=max_bias, implementation="sdpa",
    )  # fmt: skip
