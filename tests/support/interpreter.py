"""What Triton's interpreter lacks: bfloat16 as the hardware rounds and multiplies it, and an error
where a kernel strays.

The interpreter stores bfloat16 as uint16, multiplies these as integers, and cuts off where a GPU
rounds to nearest. And it reads and writes through bare pointers: outside an
array it finds what happens to lie there. `repaired` mends both, and spares the interpreter's
search through all of `triton.language` at every call of a function inside a kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def repaired() -> Iterator[None]:
    """Run kernels with bfloat16 as on a GPU; IndexError for memory that no argument spans."""
    memory, arrays = interpreter._interpreter, Arrays()
    guarded = SimpleNamespace(
        **{name: getattr(memory, name) for name in dir(memory) if not name.startswith("_")}
    )
    guarded.load = lambda pointers, mask, *rest: (
        arrays.check(pointers, mask) or memory.load(pointers, mask, *rest)
    )
    guarded.store = lambda pointers, value, mask: (
        arrays.check(pointers, mask) or memory.store(pointers, value, mask)
    )
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    patch_lang = interpreter._patch_lang
    call, multiply, cast = executor.__call__, builder.create_dot, builder.cast_impl
    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch_lang_tensor(tensor, scope)
        # Triton 3.6 takes an array of one number for that number, which NumPy 2.5 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def run(self, *arguments, **options):
        arrays.take((*arguments, *options.values()))
        # What is replaced for one function stays replaced, for all of its module, until the kernel
        # ends.
        seen: set[str] = set()

        def patch_once(fn):
            if fn.__module__ not in seen:
                seen.add(fn.__module__)
                return patch_lang(fn)

        with mock.patch.object(interpreter, "_patch_lang", patch_once):
            return call(self, *arguments, **options)

    def create_dot(self, a, b, added, *rest):
        a, b = (cast_impl(self, x, tl.float32) for x in (a, b))
        if added.dtype.scalar != tl.float32:
            return multiply(self, a, b, added, *rest)
        # The sum of NumPy's float32 product depends on which side is transposed, on some
        # processors; a GPU's does not.
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + added.data, tl.float32)

    def cast_impl(self, source, to):
        if source.dtype.scalar == tl.bfloat16:
            data = torch.from_numpy(np.ascontiguousarray(source.data))
            wide = data.view(torch.bfloat16).float().numpy()
            source = interpreter.TensorHandle(wide, tl.float32)
        if to.scalar == tl.bfloat16:
            wide = torch.from_numpy(np.ascontiguousarray(source.data, np.float32))
            short = wide.bfloat16().view(torch.uint16).numpy()
            return interpreter.TensorHandle(short, tl.bfloat16)
        return cast(self, source, to)

    with (
        mock.patch.object(interpreter, "_interpreter", guarded),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch_tensor),
        mock.patch.object(executor, "__call__", run),
        mock.patch.multiple(
            builder,
            create_dot=create_dot,
            cast_impl=cast_impl,
            create_fp_ext=cast_impl,
            create_fp_trunc=cast_impl,
        ),
    ):
        yield


class Arrays:
    """The memory that a kernel's arguments span, from their first element to their last."""

    def take(self, arguments) -> None:
        spans = [span(x) for x in tensors(arguments) if x.numel()]
        self.first, self.end = np.array(spans, np.uint64).reshape(-1, 2).T

    def check(self, pointers, mask) -> None:
        touched = pointers[mask.astype(bool)].astype(np.uint64)[:, None]
        stray = touched[~((self.first <= touched) & (touched < self.end)).any(1)]
        if stray.size:
            raise IndexError(
                f"{stray.size} of {touched.size} addresses lie outside every argument"
            )


def tensors(arguments: tuple) -> Iterator[torch.Tensor]:
    """Those among the arguments, and in records of them."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors(x)


def span(x: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.element_size()
