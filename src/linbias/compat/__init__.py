"""Well-known ALiBi code under its own names, signatures and layouts, run by `linbias`.

A program that was written for one of these changes its import line and nothing else:

| module       | in the place of                                       |
|--------------|-------------------------------------------------------|
| `flash_attn` | the functions of flash-attn 2, on any device          |
| `labml`      | `labml_nn.transformers.alibi` of the annotated papers |
| `fairseq`    | mask and slopes of the paper's repository             |

Each module says what differs. New code is better off with `linbias.torch.attention`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_LOADED_WHEN_NAMED = ("fairseq", "flash_attn", "labml")

if not TYPE_CHECKING:  # a type checker asks for the import to be written out

    def __getattr__(name: str) -> object:
        if name in _LOADED_WHEN_NAMED:
            return import_module(f"linbias.compat.{name}")
        raise AttributeError(f"module 'linbias.compat' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(
            [*(name for name in globals() if name.startswith("__")), *_LOADED_WHEN_NAMED]
        )
