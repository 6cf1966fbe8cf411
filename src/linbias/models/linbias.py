"""The language model: a pre-norm decoder that is given its sense of order by one `Position`.

Read from the bottom up to follow a token: `LinbiasForCausalLM` (logits and loss) calls
`LinbiasModel` (embedding, blocks, final norm), which calls `DecoderBlock`s, which call
`SelfAttention` and `FeedForward`.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from linbias.models.config import LinbiasConfig
from linbias.models.positions import METHODS, Position
from linbias.transformers import cache


class SelfAttention(nn.Module):
    """Project to queries, keys and values, let the position method attend, project back."""

    def __init__(self, config: LinbiasConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        q_width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_size
        self.widths = (q_width, kv_width, kv_width)
        self.qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        position: Position,
        positions: Tensor,
        key_range: Tensor | None,
        past_key_values: Cache | None,
    ) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.qkv(hidden).split(self.widths, dim=-1)
        )
        q, k = position.rotate(q, k, positions)
        key_bound = None
        if past_key_values is not None:
            new = k
            k, v = past_key_values.update(k, v, self.layer_index)
            if position.skips_far_keys:
                key_bound = cache.key_bound(past_key_values.layers[self.layer_index], new, k)
        dropout = self.dropout if self.training else 0.0
        out = position.attend(q, k, v, key_range, dropout, key_bound)
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Widen, GELU, narrow."""

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False),
            nn.GELU(),
            nn.Linear(config.intermediate_size, config.hidden_size, bias=False),
        )


class DecoderBlock(GradientCheckpointingLayer):
    """Add attention and feed-forward to the stream, one after the other or side by side."""

    def __init__(self, config: LinbiasConfig, layer_index: int) -> None:
        super().__init__()
        self.parallel = config.block == "parallel"
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = SelfAttention(config, layer_index)
        if not self.parallel:
            self.feed_forward_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: Tensor,
        position: Position,
        positions: Tensor,
        key_range: Tensor | None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        normed = self.norm(hidden)
        attended = self.attention(normed, position, positions, key_range, past_key_values)
        if self.parallel:
            return hidden + self.dropout(attended + self.feed_forward(normed))
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class LinbiasPreTrainedModel(PreTrainedModel):
    """What saving, sharding and gradient checkpointing need to know of the classes below."""

    config_class = LinbiasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]


class LinbiasModel(LinbiasPreTrainedModel):
    """Turn token ids into hidden states, one per token: embedding, blocks, final norm.

    Padding is allowed on the left (for generation) and, without a cache, on the right (for
    training; what the model says at padding tokens means nothing). Tokens are numbered from the
    first real token of their row, so a padded row and the same row alone give the same result.

    Example:
        >>> model = LinbiasModel(LinbiasConfig(hidden_size=32, num_attention_heads=2))
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = METHODS[config.position](config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            DecoderBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the decoder over new tokens, which follow those in the cache.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, S], S = cached + T; zero marks padding. The real tokens of a row
                stand together. None means no padding.
            past_key_values: A growing cache of earlier tokens. It is extended in place.
            inputs_embeds: [B, T, hidden_size] in place of input_ids.
            use_cache: Make and return a cache. None means config.use_cache, but never while
                training.
            output_hidden_states: Return the input of every block and the final output as well.

        Raises:
            ValueError: Not exactly one kind of input, a static cache, a mask of the wrong shape or
                with gaps, or more tokens than a learned position table has.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("LinbiasModel: give either input_ids or inputs_embeds, and not both")
        if isinstance(past_key_values, StaticCache):
            raise ValueError(
                "LinbiasModel: past_key_values must be a growing cache, got StaticCache"
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            cache.make_roomy(past_key_values)

        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        num_cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        positions, key_range = place(embedded, num_cached, attention_mask)

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: tuple[Tensor, ...] = ()
        hidden = self.dropout(self.position.embed(embedded, positions))
        for layer in self.layers:
            if output_hidden_states:
                states += (hidden,)
            hidden = layer(
                hidden, self.position, positions, key_range, past_key_values=past_key_values
            )
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if output_hidden_states else None,
        )


class LinbiasForCausalLM(LinbiasPreTrainedModel, GenerationMixin):
    """Predict the next token: `LinbiasModel`, then a linear layer tied to the embedding.

    It saves and loads (`save_pretrained`, `from_pretrained`, safetensors), generates and trains as
    any Transformers model does; importing `linbias.lm` makes it known to `AutoModelForCausalLM`.

    Example:
        >>> model = LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    # Tells Trainer to pass num_items_in_batch, so that accumulation weighs every token alike.
    accepts_loss_kwargs = True

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.model = LinbiasModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits in at least float32, and with labels the mean loss in nats.

        Arguments not listed here are those of `LinbiasModel.forward`.

        Args:
            labels: [B, T]; the logits at token t are scored on labels[:, t + 1]. -100 is not
                scored.
            logits_to_keep: Compute logits for the last so many tokens only; 0 means all.
            num_items_in_batch: Divide the summed loss by this instead of the number of scored
                tokens, so that the parts of a larger batch add up to its mean.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


def place(
    embedded: Tensor, num_cached: int, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the position of each new token, [1 or B, T], and key_range, [B, 2] or None."""
    B, T, _ = embedded.shape
    S = num_cached + T
    positions = torch.arange(num_cached, S, device=embedded.device)[None]
    if attention_mask is None:
        return positions, None
    if attention_mask.shape != (B, S):
        raise ValueError(
            f"LinbiasModel: attention_mask must have shape [B, S] = {[B, S]},"
            f" got {list(attention_mask.shape)}"
        )
    real = (attention_mask != 0).long()
    first = (real.cumsum(-1) == 0).sum(-1, keepdim=True)
    if not torch.compiler.is_compiling():  # These two read values, which would break the graph.
        starts = (real.diff(dim=-1, prepend=torch.zeros_like(first)) == 1).sum(-1)
        if (starts > 1).any():
            row = int(starts.argmax())
            raise ValueError(
                "LinbiasModel: attention_mask must mark one unbroken run of tokens per row"
                f" (pad prompts on the left), got {int(starts[row])} runs in row {row}"
            )
        if not first.any():
            return positions, None
    key_range = torch.cat([first, torch.full_like(first, S)], dim=-1)
    return (positions - first).clamp(min=0), key_range
