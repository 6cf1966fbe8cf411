"""Compile every Triton kernel for a GPU that is not here: python -m triton_compile 90 64 (compute capability, head size)"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from linbias.triton import backward, certificate, decode, forward
from linbias.triton.sizes import Sizes, choose

SIZES = ("B", "H", "G", "T", "S")
NUMBERS = {name: "fp32" for name in ("scale", "log_share", "slack", "factor")} | {
    "threshold": "i64"
}
WIDE = (
    "LEFT_SLOPES",
    "RIGHT_SLOPES",
    "BOUND",
    "CENTER",
    "REACH",
    "RADIUS",
    "ROW_MAX",
    "LOG_SUM",
    "DLSE",
    "DELTA",
)
WIDE += ("DSLOPES", "PART_OUT", "PART_MAX", "PART_SUM")


def kernels(size: int, sizes: Sizes):
    """Each kernel with its constants and warps: everything switched on in one, everything off in the next."""
    heads = {
        "D": size,
        "E": size,
        "PADDED_D": certificate.padded(size),
        "PADDED_E": certificate.padded(size),
    }
    values = {"E": size, "PADDED_E": heads["PADDED_E"]}
    made_from = {"FORWARD_ROWS": sizes.forward.rows, "FORWARD_KEYS": sizes.forward.keys}
    for on in (False, True):
        flags = {"HAS_RIGHT": on, "HAS_RANGE": on}
        own = {**heads, **flags, "DROPOUT": on}
        yield (
            forward.forward_kernel,
            {**own, **shape(sizes.forward), "CERTIFY": not on},
            sizes.forward.num_warps,
        )
        yield (
            backward.dq_kernel,
            {**own, **made_from, **shape(sizes.dq), "SLOPES": on},
            sizes.dq.num_warps,
        )
        yield backward.dkv_kernel, {**own, **made_from, **shape(sizes.dkv)}, sizes.dkv.num_warps
        cut = {**heads, **flags, **shape(sizes.decode), "CERTIFY": True, "BOUNDED": on}
        yield decode.decode_kernel, cut, sizes.decode.num_warps
        measure = {
            **heads,
            "KEYS": sizes.forward.keys,
            "BLOCKS": 4,
            "SAMPLE": certificate.SAMPLE,
            "HAS_RANGE": on,
        }
        yield certificate.measure_kernel, measure, 4
    yield decode.merge_kernel, values, 1
    yield backward.delta_kernel, {**values, "ROWS": 64}, 4


def shape(tile):
    return {"ROWS": tile.rows, "KEYS": tile.keys, "STAGES": tile.num_stages}


def compile_kernel(kernel, constants, num_warps: int, capability: int, element: str):
    signature, divisible = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in SIZES:
            kind = "fp32" if name in WIDE else "i32" if name in ("RANGE", "VISITED") else element
            signature[name], divisible[(index,)] = f"*{kind}", [["tt.divisibility", 16]]
        else:
            signature[name] = NUMBERS.get(name, "i32")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=divisible)
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    capability, size = (int(argument) for argument in sys.argv[1:])
    limit = {80: 163, 86: 99, 89: 99, 90: 227}[capability] * 1024
    sizes = choose(size, size, 2, limit)
    for kernel, constants, num_warps in kernels(size, sizes):
        done = compile_kernel(kernel, constants, num_warps, capability, "bf16")
        assert done.metadata.shared <= limit, (kernel.__name__, size, done.metadata.shared)
        print(kernel.__name__, done.metadata.shared)


if __name__ == "__main__":
    main()
