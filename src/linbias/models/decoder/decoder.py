"""What the decoders of all families share: all but embedding, feed-forward parts, norms and names.

A family's model is a `Decoder` of `DecoderBlock`s with a `SelfAttention` each, which name their
modules as the family's weights are named: `linbias.py`, `baichuan.py`,
`paper/model.py`.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from linbias.models.decoder.attend import How, Steps, attend
from linbias.models.decoder.cache import CACHE, attending_layer, takes_cache, use_growing_layers
from linbias.models.decoder.layout import (
    TokenLayout,
    check_room,
    fill_room,
    read_attention_mask,
    takes_marks,
)
from linbias.models.decoder.pages import init_continuous_batching, refuse_pages, take_pages
from linbias.models.decoder.positions import Position, Stepped


class SelfAttention(nn.Module):
    """Project to queries, keys and values, let the position method attend, project back."""

    names = ("qkv", "out")
    gate: nn.Module | None

    def __init__(self, config: PreTrainedConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        # In a cache: behind the layers of keys.
        self.index_beside = layer_index + max(
            config.num_hidden_layers, getattr(config, "decoder_layers", 0)
        )
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", heads)
        self.widths = tuple(count * config.head_size for count in (heads, shared, shared))
        self.head_size = config.head_size
        self.dropout = config.attention_dropout

    def project_in(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H * D] and k, v [B, T, G * D] for hidden [B, T, hidden_size]."""
        projected = getattr(self, self.names[0])(hidden)
        if projected.shape[-1] != sum(self.widths):
            raise ValueError(
                f"{type(self).__name__}: {self.names[0]} must give {sum(self.widths)} numbers, "
                f"got {projected.shape[-1]}: queries, keys and values lie side by side, so that "
                "processes cannot share them (linbias.torch.MultiheadAttention has a projection "
                "for each)"
            )
        return projected.split(self.widths, dim=-1)

    def forward(
        self,
        hidden: Tensor,
        position: Position,
        layout: TokenLayout,
        keep: int,
        past_key_values: Cache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the last `keep` tokens gather, [B, keep, hidden_size], and weights."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.project_in(hidden)
        )
        q, k = position.rotate(q, k, layout.positions)
        steps = None
        if isinstance(position, Stepped):
            assert self.gate is not None
            lengths = position.steps(self.gate(hidden)).transpose(1, 2)[..., None]
            steps = Steps(lengths=lengths, layer=self.index_beside)
        how = How(
            method=position,
            layout=layout,
            cache=past_key_values,
            layer=self.layer_index,
            dropout=self.dropout if self.training else None,
            keep=keep,
            steps=steps,
        )
        gathered, weights = attend(q, k, v, how)
        return getattr(self, self.names[1])(gathered), weights


class DecoderBlock(GradientCheckpointingLayer):
    """Add attention and feed-forward to the stream, one after the other or side by side.

    A family makes `dropout` and the four parts of `names`; side by side, both read the first norm.
    """

    names = ("norm", "attention", "feed_forward_norm", "feed_forward")
    parallel = False

    def forward(
        self,
        hidden: Tensor,
        position: Position,
        layout: TokenLayout,
        keep: int,
        past_key_values: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last `keep` tokens of hidden [B, T, hidden_size], and weights or None."""
        parts: list[Any] = [getattr(self, name, None) for name in self.names]
        norm, attention, feed_forward_norm, feed_forward = parts
        skipped = hidden.shape[1] - keep
        normed = norm(hidden)
        attended, weights = attention(normed, position, layout, keep, past_key_values)
        hidden = hidden[:, skipped:]
        if self.parallel:
            return hidden + self.dropout(attended + feed_forward(normed[:, skipped:])), weights
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(feed_forward(feed_forward_norm(hidden))), weights


def use_given_cache(caller: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate`, which otherwise, where a configuration says use_cache=False,
    appends the whole text to a given cache at every step.
    """
    if any(kwargs.get(name) is not None for name in ("past_key_values", CACHE)):
        if kwargs.get("use_cache") is False:
            raise ValueError(f"{caller}: use_cache must be True where a cache is given, got False")
        kwargs["use_cache"] = True
    return kwargs


class GenerationMixin(transformers.GenerationMixin):
    """`generate` of Transformers, which asks for this name; a cache that is given is used."""

    # Tells Trainer to pass num_items_in_batch, so that accumulation weighs every token alike.
    accepts_loss_kwargs = True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **use_given_cache(type(self).__name__, kwargs))

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        refuse_pages(self, "the model must be a decoder alone, got one with an encoder")

    @wraps(transformers.GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # `generate` hands on the tokenizers that it was given for stop strings.
        rest = {name: x for name, x in kwargs.items() if not name.endswith("tokenizer")}
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(*args, **rest)
        return prepared


class DecoderPreTrainedModel(PreTrainedModel):
    """What saving, sharding and gradient checkpointing need to know of all families."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values", "cache"]

    def post_init(self) -> None:
        """What Transformers does, and the kinds of blocks that sharding may not split."""
        super().post_init()
        # Sharding takes it amiss if one of these is not there.
        there = {type(module).__name__ for module in self.modules()}
        kept: Any = there.intersection(self._no_split_modules)
        self._no_split_modules = kept  # type: ignore[misc]

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **given: Any) -> Tensor | None:
        """Keep the mask [B, S]: `generate` would make one of [B, 1, T, S] for a static cache."""
        return fill_room(attention_mask, given[CACHE])

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor | None:
        """None for a cache that attends itself: `generate` would carry all numbers along."""
        if attending_layer(model_kwargs.get(CACHE), 0) is not None:
            return None
        numbers: Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return numbers


def takes_pages(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward take what Transformers' engine gives for `generate_batch`: a layout of it."""

    @wraps(forward)
    def with_pages(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (pages := take_pages(kwargs)) is not None:
            kwargs["attention_mask"] = TokenLayout(pages.positions, pages=pages)
        return forward(self, *args, **kwargs)

    return with_pages


class Decoder(DecoderPreTrainedModel):
    """Turn token ids into hidden states, one per token; a family makes the modules below.

    Padding is allowed anywhere in a row. A padded row and its tokens alone give the same result;
    what the model says at padding means nothing.
    """

    embed_tokens: nn.Module
    position: Position
    dropout: nn.Module
    layers: nn.ModuleList
    norm: nn.Module

    gradient_checkpointing = False

    def before_layers(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """What the first block reads, given the embedded tokens."""
        return self.dropout(self.position.embed(embedded, positions))

    def after_layers(self, hidden: Tensor) -> Tensor:
        """The final norm, if there is one."""
        return self.norm(hidden)

    @takes_pages
    @takes_marks
    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | TokenLayout | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        keep: int = 0,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder over new tokens, which follow those in the cache.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, S], S = cached + T; zero marks padding, also between tokens (a
                hole), where it takes up no distance, but in Baichuan, whose own code
                counts it. None means no padding.
            position_ids: [1 or B, T], the number of each token in its text. Numbers that start
                anew mark several texts in one row, as `DataCollatorWithFlattening` packs them:
                none sees another, and there is no cache. None: counted from the first token. What
                marks texts beside it, such as cu_seq_lens_q, is not read.
            past_key_values: A growing or static cache of earlier tokens. It is extended in place.
            inputs_embeds: [B, T, hidden_size], what `embed_tokens` would return, in place of ids.
            use_cache: Make and return a cache. None means config.use_cache, but never while
                training, nor for several texts in a row.
            output_attentions: Return the weights of every block, [B, H, T, S] before dropout.
            output_hidden_states: Return the input of every block and the final output as well.
            keep: Return the states of the last so many tokens only, which saves work in the last
                block; 0 means all.
        """
        name = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name}: give either input_ids or inputs_embeds, and not both")
        if not self.position.causal:
            if use_cache or past_key_values is not None:
                raise ValueError(
                    f"{name}: a model that reads in both directions has no cache; "
                    "use_cache must be False and past_key_values None"
                )
            use_cache = False
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        layout = self._read_mask(
            attention_mask, position_ids, embedded, past_key_values, bool(use_cache)
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not layout.is_packed
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
            use_growing_layers(past_key_values)
        output_attentions, output_hidden_states = asked(
            self.config, output_attentions, output_hidden_states
        )
        layout = replace(layout, need_weights=output_attentions)
        return self.run(embedded, layout, past_key_values, output_hidden_states, keep)

    def run(
        self,
        embedded: Tensor,
        layout: TokenLayout,
        cache: Cache | None,
        output_hidden_states: bool,
        keep: int,
        *memory: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Let all layers read embedded tokens; memory is what those with cross-attention see."""
        hidden = self.before_layers(embedded, layout.positions)
        num_tokens, last = hidden.shape[1], self.layers[-1]
        states: tuple[Tensor, ...] = ()
        weights: list[tuple[Tensor, ...]] = []  # of each layer's attention, if asked
        for layer in self.layers:
            states += (hidden,) if output_hidden_states else ()
            kept = min(keep or num_tokens, num_tokens) if layer is last else num_tokens
            given = (hidden, self.position, layout, kept, *memory)
            hidden, *found = layer(*given, past_key_values=cache)
            weights.append(tuple(found))
        hidden = self.after_layers(hidden)
        own, *cross = zip(*weights, strict=True) if layout.need_weights else (None,)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden,
            **{CACHE: cache},
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=own,
            cross_attentions=cross[0] if cross else None,
        )

    def _read_mask(
        self,
        attention_mask: Tensor | TokenLayout | None,
        position_ids: Tensor | None,
        embedded: Tensor,
        past_key_values: Cache | None,
        use_cache: bool,
    ) -> TokenLayout:
        """Where the new tokens stand, after those of a cache."""
        if isinstance(attention_mask, TokenLayout):
            return attention_mask
        name, cache, num_cached, has_room = type(self).__name__, past_key_values, 0, False
        if cache is not None:
            use_growing_layers(cache)
            num_cached, has_room = cache.get_seq_length(), cache.is_compileable
        if cache is not None and has_room and not torch.compiler.is_compiling():
            room = cache.layers[0].get_max_length()
            check_room(name, int(num_cached) + embedded.shape[1], room)
        return read_attention_mask(
            name,
            attention_mask,
            embedded,
            num_cached,
            position_ids=position_ids,
            has_cache=use_cache or cache is not None,
            has_room=has_room,
            allows_holes=True,
        )


class CausalGenerationMixin(GenerationMixin):
    """A model whose head predicts the next token."""

    model: Any

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Trainer's label smoothing shifts labels for classes that are named here, and no others.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__
        return super().__new__(cls)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        return init_continuous_batching(self, [self.model.position], *args, **kwargs)


def asked(
    config: PreTrainedConfig, attentions: bool | None, hidden_states: bool | None
) -> tuple[bool, bool]:
    """Whether a call wants weights and hidden states; None: what the configuration says."""
    return (
        config.output_attentions if attentions is None else attentions,
        config.output_hidden_states if hidden_states is None else hidden_states,
    )


Forward = Callable[..., Any]


def reads_as(body: Forward) -> Callable[[Forward], Forward]:
    """Show the arguments of a body's forward in that of a model with a head, which passes
    *inputs and **named on: Trainer and `generate` look there for what a model takes.
    """

    def with_arguments(forward: Forward) -> Forward:
        taken = inspect.signature(body).parameters | inspect.signature(forward).parameters
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        shown = [x for x in taken.values() if x.kind in kinds and x.name != "keep"]
        shown.sort(key=lambda parameter: parameter.kind)
        forward.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        return forward

    return with_arguments


def refuse_keep(model: Any, named: dict[str, Any]) -> None:
    """That argument is between a head and its body."""
    if "keep" in named:
        name = type(model).__name__
        raise TypeError(f"{name}: there is no argument keep; say logits_to_keep")


def kept(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """The last `keep` tokens of hidden [B, T, ...], all for 0; or those at indices [N]."""
    return hidden[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]


def predict(
    model: Any,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    labels: Tensor | None,
    keep: int | Tensor = 0,
    **how: Any,
) -> dict[str, Any]:
    """What a model with a head returns: loss, logits of the last `keep` tokens, and what its body
    does with inputs and named ones.

    Logits are at least float32; `how` goes to the loss function; `keep` = 0 means all, and indices
    [N] mean those tokens.
    """
    refuse_keep(model, named)
    wanted = (named.get(name) for name in ("output_attentions", "output_hidden_states"))
    if (
        not isinstance(keep, Tensor) and keep and not any(asked(model.config, *wanted))
    ):  # which come for all tokens
        named["keep"] = keep
    outputs = dict(model.model(*inputs, **named, return_dict=True).items())
    logits = model.lm_head(kept(outputs.pop("last_hidden_state"), keep))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = None
    if labels is not None:
        loss = model.loss_function(logits, labels, vocab_size=model.config.vocab_size, **how)
    return {"loss": loss, "logits": logits, **outputs}
