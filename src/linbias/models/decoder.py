"""What the decoders of all families share: everything but embedding, blocks, norms and their names.

A family's model is a `Decoder` with a few attributes and two methods of its own; each of its blocks has a
`SelfAttention` that projects in the family's way. `linbias.py` and `paper.py` are the two families.
"""

from typing import ClassVar

from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from linbias.models.positions import AttendOptions, Position
from linbias.transformers import Padding, key_bound, read_attention_mask, use_growing_layers


class SelfAttention(nn.Module):
    """Project to queries, keys and values, let the position method attend, project back.

    A family makes the weights and says how they project: `project_in` and `project_out`.
    """

    def __init__(self, config: PreTrainedConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_size
        self.dropout = config.attention_dropout

    def project_in(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, T, H * D] and k, v [B, T, G * D] for hidden [B, T, hidden_size]."""
        raise NotImplementedError

    def project_out(self, gathered: Tensor) -> Tensor:
        """Return [B, T, hidden_size] for what the heads gathered, [B, T, H * D]."""
        raise NotImplementedError

    def forward(
        self,
        hidden: Tensor,
        position: Position,
        padding: Padding,
        keep: int,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Return [B, keep, hidden_size]: what the last `keep` of the new tokens gather."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.project_in(hidden)
        )
        q, k = position.rotate(q, k, padding.positions)
        bound = None
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_index)
            if position.uses_key_bound:
                bound = key_bound(past_key_values.layers[self.layer_index])
        kept = padding.last_queries(keep)
        options = AttendOptions(
            key_range=kept.key_range,
            query_start=kept.query_start,
            key_bound=bound,
            dropout=self.dropout if self.training else 0.0,
        )
        gathered = position.attend(q[:, :, q.shape[2] - keep :], k, v, options)
        return self.project_out(gathered.transpose(1, 2).flatten(2))


class DecoderPreTrainedModel(PreTrainedModel):
    """What saving, sharding and gradient checkpointing need to know of the models of all families."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]


class Decoder(DecoderPreTrainedModel):
    """Turn token ids into hidden states, one per token.

    A family's constructor makes the modules below and ends with `self.post_init()`. A block is called as
    `block(hidden, position, padding, keep, past_key_values=...)` and returns the last `keep` tokens.

    Padding is allowed on the left (for generation) and, where no more tokens follow, on the right (for
    training); what the model says at padding tokens means nothing. Tokens are numbered from the first of
    their row that is no padding, so a padded row and the same row alone give the same result.
    """

    embed_tokens: nn.Module
    position: Position
    dropout: nn.Dropout
    layers: nn.ModuleList

    gradient_checkpointing = False

    def before_layers(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """What the first block reads, given the embedded tokens."""
        return self.dropout(self.position.embed(embedded, positions))

    def after_layers(self, hidden: Tensor) -> Tensor:
        """The final norm, if there is one."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        keep: int = 0,
    ) -> BaseModelOutputWithPast:
        """Run the decoder over new tokens, which follow those in the cache.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, S], S = cached + T; zero marks padding. The tokens of a row that are
                no padding stand together. None means no padding.
            past_key_values: A growing cache of earlier tokens. It is extended in place.
            inputs_embeds: [B, T, hidden_size], what `embed_tokens` would return, in place of
                input_ids.
            use_cache: Make and return a cache. None means config.use_cache, but never while
                training.
            output_hidden_states: Return the input of every block and the final output as well.
            keep: Return the states of the last so many tokens only, which saves work in the last
                block; 0 means all.

        Raises:
            ValueError: Not exactly one kind of input, a static cache, a mask of the wrong shape or
                with gaps, or more tokens than a learned position table has.
            IndexError: An id beyond the vocabulary.
        """
        name = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name}: give either input_ids or inputs_embeds, and not both")
        if isinstance(past_key_values, StaticCache):
            raise ValueError(f"{name}: past_key_values must be a growing cache, got StaticCache")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        num_cached = 0
        if past_key_values is not None:
            use_growing_layers(past_key_values)
            num_cached = past_key_values.get_seq_length()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        padding = read_attention_mask(name, attention_mask, embedded, num_cached)
        hidden = self.before_layers(embedded, padding.positions)
        num_tokens = hidden.shape[1]
        keep = min(keep or num_tokens, num_tokens)
        states: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layers, 1):
            if output_hidden_states:
                states += (hidden,)
            hidden = layer(
                hidden,
                self.position,
                padding,
                keep if index == len(self.layers) else num_tokens,
                past_key_values=past_key_values,
            )
        hidden = self.after_layers(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )
