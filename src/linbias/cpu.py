"""The compiled CPU core, called with addresses: the one place in Python that knows its calling convention.

`forward` and `backward` take anything with `.shape`, strides in elements and an address, described as `Operand`, so that
NumPy arrays and tensors of any framework come through alike. `attention` is the core for NumPy.
"""

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linbias import _checks
from linbias.schedules import slopes

try:
    _cpu: Any = import_module("linbias._cpu")
except ImportError as error:  # not compiled here, or for another Python
    _cpu = None
    _REASON = f"the compiled core cannot be imported ({error}); reinstall with a C++20 compiler"

NAME = "cpu"
LARGEST_HEAD = 256
# Below so many multiply-adds per thread, a second one gains less than it disturbs PyTorch's own threads, which spin
# for a while after each operation: training on 128 tokens ran 7.7k tokens/s with one, 6.8k with two (2 cores).
_WORK_PER_THREAD = 1 << 26
_DTYPES = ("float32", "float64", "float16", "bfloat16")  # in the order of the core's enum


class Operand(NamedTuple):
    """An array [B, heads, length, size]: its address and its strides of batch, head and row, in elements."""

    address: int
    batch: int
    head: int
    row: int


class Arguments(NamedTuple):
    """What forward and backward are both told. Addresses of 0 stand for None."""

    dtype: str
    sizes: tuple[int, int, int, int, int, int, int]  # B H G T S D E
    q: Operand
    k: Operand
    v: Operand
    left: int  # [B, H], wide, contiguous, like all below
    right: int  # [B, H]
    key_range: int  # [B, 2], int64
    key_bound: int  # [B, G], wide
    scale: float
    dropout: float
    tolerance: float
    seed: int
    num_threads: int
    precise: bool  # the result will be differentiated


def why_not(call: _checks.Problem) -> str | None:
    """Say why the core cannot run a call, or None if it can."""
    if _cpu is None:
        return _REASON
    if call.device != "cpu":
        return f"it runs on the CPU, and the arrays are on {call.device}"
    if max(call.D, call.E) > LARGEST_HEAD:
        return f"head sizes go up to {LARGEST_HEAD}, got {max(call.D, call.E)}"
    return None


def num_threads(sizes: tuple[int, int, int, int, int, int, int], available: int) -> int:
    """Threads that a call of these sizes (B H G T S D E) is worth, of those available."""
    B, H, _, T, S, D, E = sizes
    return max(1, min(available, 1 + B * H * T * min(T, S) * (D + E) // _WORK_PER_THREAD))


def num_tiles(T: int) -> int:
    """Tiles that T queries are cut into: the third axis of `visited`."""
    return -(-T // TILE_ROWS)


TILE_ROWS: int = 48 if _cpu is None else _cpu.TILE_ROWS
BLOCK_KEYS: int = 64 if _cpu is None else _cpu.BLOCK_KEYS


def target() -> str | None:
    """The CPU target that the core runs on here, such as "avx2"; None where it is not compiled."""
    return None if _cpu is None else str(_cpu.target())


def targets() -> list[str]:
    """The CPU targets that were compiled and run on this machine, best first."""
    return [] if _cpu is None else str(_cpu.targets()).split(",")


def force_target(name: str | None) -> None:
    """Run on this target instead of the best one (for tests and measurements); None goes back.

    Raises:
        ValueError: It is not one of `targets()`.
    """
    if _cpu is None or not _cpu.force_target(name or ""):
        raise ValueError(f"force_target: name must be one of {targets()}, got {name!r}")


def forward(call: Arguments, visited_tiles: int, results: tuple[int, ...]) -> None:
    """Write out, row_max, log_sum (wide) and visited (int32) to the four addresses given.

    visited is [B, H, visited_tiles, 2], of which the first `num_tiles(T)` tiles are written.
    """
    _cpu.forward(*_numbers(call), call.precise, visited_tiles, results)


def backward(
    call: Arguments,
    dout: int,
    dlse: int,
    visited_tiles: int,
    saved: tuple[int, ...],
    gradients: tuple[int, ...],
) -> None:
    """Write dq, dk, dv, dleft, dright (wide; dk and dv come zeroed) to the five addresses given."""
    numbers = _numbers(call._replace(key_bound=0))
    _cpu.backward(*numbers, dout, dlse, visited_tiles, saved, gradients)


def _numbers(call: Arguments) -> tuple[Any, ...]:
    return (_DTYPES.index(call.dtype), *call[1:14])


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    left: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    right: npt.ArrayLike | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    num_threads: int = 1,
    return_lse: bool = False,
) -> Any:
    """Run the compiled core on NumPy arrays: `linbias.attention` at full speed.

    The formula, the alignment and the corner cases are those of `linbias.attention`; scores and sums are in the
    dtype of q, float32 for float16.

    Args:
        q: [B, H, T, D], float16, float32 or float64, any strides (copied if the last is not 1).
        k: [B, G, S, D], dtype of q.
        v: [B, G, S, E], dtype of q.
        left, causal, right, scale, return_lse: As for `linbias.attention`.
        tolerance: Largest share of a row's probability that far keys, never read, may hold together; None means
            that of the dtype, 0 reads every key.
        num_threads: Threads to use, at least 1.

    Returns:
        [B, H, T, E] in the dtype of q; with return_lse also lse [B, H, T], float32 or float64.

    Raises:
        TypeError, ValueError: A shape, dtype or value breaks a rule above.
        NotImplementedError: The core is not compiled, or the head size is above 256.
        MemoryError: There is no room for the packed keys and values.

    Example:
        >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
        >>> attention(q, k, v).shape
        (1, 2, 3, 4)
    """
    q, k, v = (np.asarray(array) for array in (q, k, v))
    described = [_checks.Described(array.shape, array.dtype.name) for array in (q, k, v)]
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    given_left = None if left is None else np.asarray(left, dtype=wide)
    given_right = None if right is None else np.asarray(right, dtype=wide)
    call = _checks.check(
        "attention",
        described[0],
        described[1],
        described[2],
        None if given_left is None else _checks.Described(given_left.shape, wide.name),
        None if given_right is None else _checks.Described(given_right.shape, wide.name),
        causal=causal,
        scale=scale,
        tolerance=tolerance,
    )
    reason = why_not(call)
    if reason is not None:
        raise NotImplementedError(f"attention: cpu cannot run this call: {reason}")
    for name, slope in (("left", given_left), ("right", given_right)):
        if slope is not None:
            _checks.check_slope_values("attention", name, slope)
    if given_left is None:
        given_left = slopes(call.H).astype(wide) if call.H else np.zeros(0, wide)
    if given_right is None and not causal:
        given_right = given_left
    sides = [
        None if s is None else np.ascontiguousarray(np.broadcast_to(s, (call.B, call.H)))
        for s in (given_left, given_right)
    ]
    arrays = [a if _is_plain(a) else np.ascontiguousarray(a) for a in (q, k, v)]
    out = np.empty((call.B, call.H, call.T, call.E), wide)
    row_max, log_sum = np.empty(out.shape[:3], wide), np.empty(out.shape[:3], wide)
    visited = np.empty((call.B, call.H, num_tiles(call.T), 2), np.int32)
    q_operand, k_operand, v_operand = (
        Operand(a.ctypes.data, *(stride // a.itemsize for stride in a.strides[:3])) for a in arrays
    )
    left_address, right_address = (0 if side is None else side.ctypes.data for side in sides)
    arguments = Arguments(
        call.dtype,
        (call.B, call.H, call.G, call.T, call.S, call.D, call.E),
        q_operand,
        k_operand,
        v_operand,
        left_address,
        right_address,
        key_range=0,
        key_bound=0,
        scale=call.scale,
        dropout=0.0,
        tolerance=call.tolerance,
        seed=0,
        num_threads=max(1, num_threads),
        precise=False,
    )
    results = (out.ctypes.data, row_max.ctypes.data, log_sum.ctypes.data, visited.ctypes.data)
    forward(arguments, visited.shape[2], results)
    out = out.astype(q.dtype, copy=False)
    return (out, row_max + log_sum) if return_lse else out


def _is_plain(array: npt.NDArray[Any]) -> bool:
    """Strides are whole elements, the last one 1, and the address is aligned: the core reads it as it is."""
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    return whole and array.strides[-1] == array.itemsize and bool(array.flags.aligned)
