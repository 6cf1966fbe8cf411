"""A cache of constant size for endless texts: each head keeps its nearest keys.

    cache = WindowCache.for_model(model)
    model.generate(ids, past_key_values=cache)  # or model(ids, past_key_values=cache), in parts

A ledger of constant size says for every row how much the dropped keys can weigh at most. Rows for
which that is more than the tolerance are never passed over in silence.
"""

import copy
import math
from typing import Any, Literal, Self

from transformers import Cache, PreTrainedModel

from linbias.models.window_cache.certificate import Settings
from linbias.models.window_cache.layer import WindowLayer
from linbias.models.window_cache.reach import (
    Reach,
    reach_of_weights,
    refuse_slopes_that_follow_the_length,
)
from linbias.torch.decoding import TOLERANCES as TOLERANCES

POLICIES = ("count", "raise")


class WindowCache(Cache):
    """A Transformers cache of constant size, exact up to a tolerance that every row is held to.

    `for_model` makes one, which is given to a model as `past_key_values`, with or without
    `generate`; reading a text in parts of any size gives what reading it at once gives, within
    rounding.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> config = LinbiasConfig(vocab_size=99, hidden_size=32, num_attention_heads=2)
        >>> model, ids = LinbiasForCausalLM(config).eval(), torch.randint(99, (1, 3000))
        >>> with torch.no_grad():
        ...     cache = WindowCache.for_model(model)
        ...     parts = [model(x, past_key_values=cache).logits for x in ids.split(500, dim=1)]
        ...     whole = model(ids).logits
        >>> bool((torch.cat(parts, 1) - whole).abs().max() < 1e-4), cache.uncertified
        (True, 0)
        >>> cache.windows[0][0] < 400
        True
    """

    layers: list[WindowLayer]

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        tolerance: float | None = None,
        windows: Literal["adaptive", "weights"] | int = "adaptive",
        on_uncertified: Literal["count", "raise"] = "count",
    ) -> Self:
        """Make a cache for a model with linear biases.

        Args:
            model: As `linbias.models.load` gives it; it runs without gradients.
            tolerance: Share of a row's weight that may be missing in a head; None takes that of
                `linbias.torch.attention`, below which rounding loses as much.
            windows: "adaptive": as few keys as the rows before needed, with a margin; "weights":
                as many as any text can need, from the weights alone; or a number for all heads.
            on_uncertified: Where a row may miss more than the tolerance: "count" counts it;
                "raise" raises `Uncertified`, after which the cache must be reset. Adaptive windows
                widen from there on in any case.

        Raises:
            ValueError: An option breaks a rule above; the model has no linear biases, or its
                slopes follow the length of the text; windows="weights" and a layer's weights do
                not say.
        """
        if on_uncertified not in POLICIES:
            got = f"must be one of {POLICIES}, got {on_uncertified!r}"
            raise ValueError(f"WindowCache: on_uncertified {got}")
        finest = TOLERANCES.get(model.dtype, 2.0**-24)
        if tolerance is not None and not finest <= tolerance < 1:
            got = f"must be in [{finest:.3g}, 1) for {model.dtype}, got {tolerance}"
            raise ValueError(f"WindowCache: tolerance {got}")
        refuse_slopes_that_follow_the_length(model, "WindowCache")
        weights = reach_of_weights(model)
        needed = weights.of_heads((finest if tolerance is None else tolerance) / 2)
        # The farthest of the query heads that read a key/value head.
        groups = [
            row.reshape(num, -1).max(1).tolist()
            for row, num in zip(needed, weights.key_heads, strict=True)
        ]
        chosen = _chosen(windows, groups, weights)
        how: Any = {"tolerance": tolerance, "on_uncertified": on_uncertified}
        both = zip(groups, chosen, strict=True)
        settings = (Settings(reach=reach, windows=fixed, **how) for reach, fixed in both)
        return cls(layers=[WindowLayer(of_layer) for of_layer in settings])

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    @property
    def windows(self) -> list[list[float]]:
        """[layers][G]: how many keys each key/value head keeps."""
        return [list(layer.windows) for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def uncertified(self) -> int:
        """How many rows of heads may have missed more than the tolerance."""
        return sum(layer.uncertified for layer in self.layers)

    @property
    def largest_dropped(self) -> float:
        """The most that any row may have missed, as a share of what it read; 0 for nothing."""
        return math.exp(min(700.0, max(layer.largest_dropped for layer in self.layers)))


def _chosen(windows: Any, groups: list[list[float]], found: Reach) -> list[list[float] | None]:
    """What each layer is told to keep; None to follow its ledger."""
    if windows == "adaptive":
        return [None] * len(groups)
    if windows == "weights":
        if found.why_not:
            index, reason = next(iter(found.why_not.items()))
            raise ValueError(
                "WindowCache: windows='weights' needs a window for every layer, and layer "
                f"{index} has none: {reason}"
            )
        return [list(reach) for reach in groups]
    if not isinstance(windows, int) or windows < 1:
        rule = "must be 'adaptive', 'weights' or an integer of at least 1"
        raise ValueError(f"WindowCache: windows {rule}, got {windows!r}")
    return [[float(windows)] * len(reach) for reach in groups]
