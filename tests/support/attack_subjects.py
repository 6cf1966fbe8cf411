"""What the search for dropped mass calls: every near-to-far implementation, in every way it can be
called.

A subject takes a setting and its candidates, and gives `out` [C, T, columns], or dv of one row [C,
S].
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch

import linbias.jax
import linbias.near_to_far
import linbias.torch
from attack_mass import ONE, Chains, Setting, Subject, indicators, probed_row, random_setting
from linbias.jax.impl import blocked as jax_blocked
from linbias.kernels import core
from linbias.torch.impl import blocked, cpu

DTYPES = ("float32", "float64", "bfloat16", "float16")
MODES = ("forward", "gradients wanted", "backward", "decode", "decode, key_bound")


@dataclass(frozen=True)
class Attacked:
    """An implementation, a type and a way to call it."""

    implementation: str  # "cpu avx2", "torch blocked", ...
    mode: str
    dtype: str
    placed: bool = False  # with keys at given positions

    @property
    def way(self) -> str:
        """How it is called, in words."""
        return f"{self.mode}, positions" if self.placed else self.mode

    @property
    def subject(self) -> Subject:
        name, _, target = self.implementation.partition(" ")
        if name == "cpu":
            return functools.partial(_torch, "cpu", self.mode, target)
        if self.implementation == "torch blocked":
            return functools.partial(_torch, "blocked", self.mode, None)
        return _jax if name == "jax" else _near_to_far

    @property
    def takes_positions(self) -> bool:
        name = self.implementation.split()[0]
        modules = {"cpu": cpu, "torch": blocked, "jax": jax_blocked}
        return name == "near_to_far" or "positions" in modules[name].ABILITIES.has

    def setting(self, rng: np.random.Generator) -> Setting:
        """Sizes that this implementation leaves something of, and runs quickly."""
        decode = self.mode.startswith("decode")
        own_starts = self.implementation.startswith(("cpu", "near"))
        setting = random_setting(rng, self.dtype, decode=decode, own_starts=own_starts)
        setting = replace(setting, placed=self.placed)
        if "amx" in self.implementation and self.dtype == "float32" and not decode:
            # The matrix unit takes no smaller calls. At most other tolerances nothing shows of it.
            sizes = {"T": 192, "D": 32, "S": int(rng.choice([512, 1024])), "num_chains": 4}
            tolerance = float(rng.choice([2.0**-24, 2.0**-20]))
            return replace(setting, **sizes, tolerance=tolerance, coarse=True)
        if own_starts and not self.implementation.startswith("near"):
            return setting
        sizes = {"T": int(rng.choice([1, 3, 20])), "num_chains": 12}
        if not self.implementation.startswith("near"):  # blocks of 256 keys
            sizes["S"] = int(rng.choice([768, 1024]))
        return replace(setting, **sizes)


def everything() -> list[Attacked]:
    """All that this machine can run."""
    ways = [(f"cpu {target}", mode) for target in core.targets() for mode in MODES]
    ways += [
        ("torch blocked", "forward"),
        ("torch blocked", "backward"),
        ("jax blocked", "forward"),
    ]
    attacked = [Attacked(*way, dtype) for way in ways for dtype in DTYPES]
    attacked += [Attacked("near_to_far", "forward", "float64")]
    return attacked + [replace(a, placed=True) for a in attacked if a.takes_positions]


def _torch(
    implementation: str, mode: str, target: str | None, setting: Setting, chains: Chains
) -> np.ndarray:
    narrow = getattr(torch, setting.dtype)
    wide = torch.float64 if setting.dtype == "float64" else torch.float32
    one_each = setting.own_starts  # candidates are batch rows; otherwise heads of one row
    axis = 1 if one_each else 0
    q, k = (torch.tensor(x).to(narrow).unsqueeze(axis) for x in (chains.q, chains.k))
    v = torch.tensor(indicators(setting)).to(narrow).expand(*k.shape[:2], -1, -1)
    left, right = (
        torch.tensor(x, dtype=wide).unsqueeze(axis) for x in (chains.left, chains.right)
    )
    ranges = torch.tensor(np.stack([chains.first, chains.end], -1)).unsqueeze(axis)
    bound = None
    if mode == "decode, key_bound":
        norms = np.linalg.norm(chains.k, axis=-1).max(1) * (1 + 1e-12)
        bound = torch.tensor(norms).to(wide).nextafter(torch.tensor(torch.inf, dtype=wide))
        bound = bound.unsqueeze(axis)
    differentiated = mode in ("gradients wanted", "backward")
    if differentiated:
        v.requires_grad_()
    with _target(target):
        out = linbias.torch.attention(
            q,
            k,
            v,
            left,
            causal=setting.causal,
            right_slopes=None if setting.causal else right,
            scale=1.0,
            key_range=ranges,
            query_start=torch.tensor(chains.start if one_each else chains.start[:1]),
            positions=torch.tensor(chains.x).unsqueeze(axis) if setting.placed else None,
            key_bound=bound,
            tolerance=setting.tolerance,
            implementation=implementation,
        )
        if mode == "backward":
            dout = torch.zeros_like(out)
            dout[:, :, probed_row(setting), 0] = ONE
            (dv,) = torch.autograd.grad(out, v, dout)
            return dv.squeeze(axis)[..., 0].double().numpy()
    return out.detach().squeeze(axis).double().numpy()


@contextmanager
def _target(name: str | None):
    """Force a CPU target for the length of the block."""
    core.force_target(name)
    yield
    core.force_target(None)


@functools.partial(jax.jit, static_argnames=("causal", "tolerance"))
def _jax_blocked(q, k, v, left, **options):
    return linbias.jax.attention(q, k, v, left, **options, scale=1.0, implementation="blocked")


def _jax(setting: Setting, chains: Chains) -> np.ndarray:
    wide = "float64" if setting.dtype == "float64" else "float32"
    with jax.enable_x64(setting.dtype == "float64"):
        q, k = (jnp.asarray(x.swapaxes(0, 1)[None], setting.dtype) for x in (chains.q, chains.k))
        v = jnp.asarray(indicators(setting)[None, :, None], setting.dtype)
        v = jnp.broadcast_to(v, (*k.shape[:3], v.shape[3]))
        left, right = (jnp.asarray(x[None], wide) for x in (chains.left, chains.right))
        ranges = jnp.asarray(np.stack([chains.first, chains.end], -1)[None], jnp.int32)
        start = jnp.asarray(chains.start[:1], jnp.int32)
        # Counted from the last key: what float32 rounds off there is far below what counts as a
        # loss.
        x = jnp.asarray((chains.x - chains.x[:, -1:])[None], wide) if setting.placed else None
        options = {"causal": setting.causal, "tolerance": setting.tolerance}
        options |= {"right_slopes": None if setting.causal else right, "positions": x}
        out = _jax_blocked(q, k, v, left, key_range=ranges, query_start=start, **options)
    return np.asarray(out[0]).astype(np.float64).swapaxes(0, 1)


def _near_to_far(setting: Setting, chains: Chains) -> np.ndarray:
    v = indicators(setting)
    visit = linbias.near_to_far.attention(
        chains.q[:, None],
        chains.k[:, None],
        np.broadcast_to(v, (setting.num_chains, 1, *v.shape)),
        chains.left[:, None],
        causal=setting.causal,
        right_slopes=None if setting.causal else chains.right[:, None],
        scale=1.0,
        key_range=np.stack([chains.first, chains.end], -1),
        query_start=chains.start,
        positions=chains.x if setting.placed else None,
        tolerance=setting.tolerance,
    )
    return np.asarray(visit.out)[:, 0]
