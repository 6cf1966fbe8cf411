"""One layer of a `WindowCache`, as Transformers knows layers: what it asks of one, and refuses."""

import copy
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from linbias.models.decoder.cache import AttendingLayer
from linbias.models.decoder.layout import TokenLayout
from linbias.models.window_cache.certificate import Settings
from linbias.models.window_cache.near_keys import NearKeys
from linbias.models.window_cache.pool import CHUNK, Pool, Scores
from linbias.torch.decoding import TOLERANCES
from linbias.torch.shard import refuse_shard


class WindowLayer(NearKeys, AttendingLayer):
    """For each key/value head the nearest keys, and a ledger of the others."""

    is_sliding = True
    is_croppable = True

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        self.record_past = self.is_initialized = False
        self.forget()

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take type, device and sizes from the first tokens."""
        G, made_for = key_states.shape[1], len(self.settings.reach)
        if made_for != G:
            raise ValueError(
                f"WindowCache: it was made for layers of {made_for} key/value heads, got {G}: "
                "WindowCache.for_model(model) fits the model it is given"
            )
        if self.settings.tolerance is None:
            self.settings = replace(self.settings, tolerance=TOLERANCES[key_states.dtype])
        self.pool, self.is_initialized = Pool(key_states, value_states), True

    # Outside of inference mode: what is kept may be written to in whatever mode a later call has.
    @torch.inference_mode(False)
    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        scale: float | None,
        layout: TokenLayout,
    ) -> Tensor:
        self._check(q, k, layout)
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if (span := layout.keys[0].span) is not None:
            self.first = span[:, 0]
        scale, tolerance = q.shape[-1] ** -0.5 if scale is None else scale, self.settings.tolerance
        assert tolerance is not None
        scores = Scores(slopes=slopes, scale=scale, tolerance=tolerance / 2)
        may_drop = not self.record_past
        if q.shape[2] <= CHUNK:
            return self.read(q, k, v, scores, may_drop)
        chunks = zip(*(x.split(CHUNK, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([self.read(q, k, v, scores, may_drop) for q, k, v in chunks], dim=2)

    def _check(self, q: Tensor, k: Tensor, layout: TokenLayout) -> None:
        refuse_shard("WindowCache")
        if torch.compiler.is_compiling():
            raise ValueError(
                "WindowCache: the model must not be compiled: what is kept depends on the keys' "
                "values"
            )
        if k.requires_grad:
            raise ValueError(
                "WindowCache: gradients must be off (torch.no_grad()), "
                "since dropped keys have none"
            )
        if layout.need_weights:
            raise ValueError(
                "WindowCache: output_attentions must be off: "
                "the weights of dropped keys are not kept"
            )
        if self.is_initialized and len(q) != (size := len(self.pool.keys)):
            raise ValueError(f"WindowCache: batch must have {size} rows as before, got {len(q)}")
        rows, end = layout.keys[0], self.seen + q.shape[2]
        if rows.places is not None:
            raise ValueError(
                "WindowCache: attention_mask must mark one unbroken run of tokens per row, got a "
                "row with a hole"
            )
        if rows.span is not None and (rows.span[:, 1] < end).any():
            raise ValueError("WindowCache: padding must come before each text, got some after one")

    @property
    def counts(self) -> list[int]:
        """[G], the keys that are kept; none before there are tokens."""
        return self.pool.counts

    @property
    def num_bytes(self) -> int:
        """Of keys, values and ledger."""
        ledger = 0 if self.ledger is None else self.ledger.num_bytes
        return self.pool.keys.nbytes + self.pool.values.nbytes + ledger

    # What Transformers asks of a layer

    def get_seq_length(self) -> int:
        return self.seen

    def activate_past_recording(self) -> None:
        """Until `reset` drop keys in `crop` alone, which may take back tokens first."""
        self.record_past = True

    @torch.inference_mode(False)
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: -n removes n of them, which must not have been dropped."""
        if tokens_to_remove > 0:
            raise ValueError(f"WindowCache: crop takes back -n tokens, got {tokens_to_remove}")
        n, most = -tokens_to_remove, min(self.counts, default=0)
        if n > most:
            raise ValueError(f"WindowCache: crop must take back at most {most} tokens, got {n}")
        self.take_back(n)
        if self.record_past:
            self.drop_all_but(self.choose(range(len(self.counts))))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take batch rows over from others, in beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(len(self.pool.keys), device=self.pool.keys.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    @torch.inference_mode(False)
    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.select(torch.as_tensor(indices, device=self.pool.keys.device))

    def offload(self) -> None:
        raise ValueError("WindowCache: the cache must not be offloaded: it is of constant size")
