import enum
from typing import overload

TILE_ROWS: int = 48

BLOCK_KEYS: int = 64

class DType(enum.Enum):
    float32 = 0

    float64 = 1

    float16 = 2

    bfloat16 = 3

class Array:
    def __init__(self, data: int, batch: int, head: int, row: int) -> None: ...

class Call:
    def __init__(
        self,
        *,
        dtype: DType,
        B: int,
        H: int,
        G: int,
        T: int,
        S: int,
        D: int,
        E: int,
        q: Array,
        k: Array,
        v: Array,
        left: int,
        right: int = 0,
        key_range: int = 0,
        query_start: int = 0,
        own_key: int = 0,
        query_range: int = 0,
        key_bound: int = 0,
        positions: Array = ...,
        query_positions: Array = ...,
        pages: int = 0,
        pages_row: int = 0,
        page_keys: int = 0,
        num_pages: int = 0,
        scale: float,
        dropout: float = 0.0,
        tolerance: float,
        seed: int = 0,
        first_query: int = 0,
        first_key: int = 0,
        num_threads: int = 1,
        team: int = 0,
        precise: bool = False,
    ) -> None: ...

class Forward:
    def __init__(
        self,
        *,
        out: int,
        row_max: int = 0,
        log_sum: int = 0,
        visited: int = 0,
        visited_tiles: int = 0,
        narrow: bool = False,
    ) -> None: ...

class NewTokens:
    def __init__(self, *, k: Array, v: Array, key_bound: int) -> None: ...

class Backward:
    def __init__(
        self,
        *,
        dout: int,
        dlse: int = 0,
        saved: Forward,
        dq: int,
        dk: int,
        dv: int,
        dleft: int = 0,
        dright: int = 0,
        dpositions: int = 0,
        dquery_positions: int = 0,
    ) -> None: ...

class Sequences:
    def __init__(
        self,
        *,
        count: int,
        query_offsets: int,
        key_offsets: int = 0,
        key_counts: int = 0,
        page_norms: int = 0,
    ) -> None: ...

class Points:
    def __init__(
        self, *, at: int, order: int, clouds: int, axes: int, global_tokens: int, manhattan: bool
    ) -> None: ...

@overload
def forward(call: Call, results: Forward) -> None: ...
@overload
def forward(call: Call, tokens: NewTokens, results: Forward) -> None: ...
@overload
def forward(call: Call, sequences: Sequences, results: Forward) -> None: ...
@overload
def forward(call: Call, points: Points, results: Forward) -> None: ...
def write(
    call: Call,
    tokens: NewTokens,
    slots: int,
    k: int,
    v: int,
    k_pages: int,
    v_pages: int,
    page_norms: int,
) -> None: ...
@overload
def backward(call: Call, results: Backward) -> None: ...
@overload
def backward(call: Call, sequences: Sequences, results: Backward) -> None: ...
@overload
def backward(call: Call, points: Points, results: Backward) -> None: ...
def forward_layer(
    call: Call,
    sequences: Sequences,
    results: Forward,
    q: int,
    k: int,
    v: int,
    left: int,
    page_norms: int,
    out: int,
) -> None: ...
def target() -> str: ...
def targets() -> str: ...
def force_target(name: str) -> bool: ...
