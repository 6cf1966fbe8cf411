"""Sequence-to-sequence models: an encoder that reads in both directions, and a decoder that sees
it.

Source: the discussion "Modifying ALiBi for Encoder-Attention or Cross-Attention" in the paper's
repository: a bias in encoder and decoder, none in cross-attention, as in T5 (arXiv 1910.10683).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from linbias.models.decoder import decoder
from linbias.models.decoder.attend import How, attend
from linbias.models.decoder.cache import CACHE, takes_cache
from linbias.models.decoder.config import LinbiasSeq2SeqConfig
from linbias.models.decoder.layout import TokenLayout, read_attention_mask
from linbias.models.decoder.linbias import (
    FeedForward,
    LinbiasModel,
    LinbiasPreTrainedModel,
    SelfAttention,
)
from linbias.models.decoder.positions import AttendOptions, Biased, Position, make_position
from linbias.models.decoder.rows import Rows
from linbias.torch.constant import constant
from linbias.torch.operators.values import readable


class Everywhere(Biased):
    """All keys alike, wherever they stand."""

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        wide = torch.promote_types(q.dtype, torch.float32)
        return {"slopes": constant((0.0,) * q.shape[1], wide, q.device)}


class CrossAttention(nn.Module):
    """Attention from the decoder's tokens to all of the encoder's alike, without positions."""

    def __init__(self, config: LinbiasSeq2SeqConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.position = Everywhere(config, causal=False)
        width = config.num_attention_heads * config.head_size
        kv_width = config.num_key_value_heads * config.head_size
        self.q = nn.Linear(config.hidden_size, width, bias=False)
        self.kv = nn.Linear(config.hidden_size, 2 * kv_width, bias=False)
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        memory: Tensor,
        layout: TokenLayout,
        cache: EncoderDecoderCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what hidden [B, T, hidden_size] gathers, and weights [B, H, T, S], if asked."""
        k, v = self._keys_and_values(memory, cache)
        dropout = self.dropout if self.training else None
        how = How(self.position, layout, None, self.layer_index, dropout)
        gathered, weights = attend(self._heads(self.q(hidden)), k, v, how)
        return self.out(gathered), weights

    def _keys_and_values(
        self, memory: Tensor, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, Tensor]:
        """[B, G, S, D] each: those of a cache, which is filled where it has none."""
        index, num_keys = self.layer_index, memory.shape[1]
        if cache is not None and cache.is_updated.get(index):
            layer = cache.cross_attention_cache.layers[index]
            return layer.keys[:, :, :num_keys], layer.values[:, :, :num_keys]
        k, v = (self._heads(part) for part in self.kv(memory).chunk(2, dim=-1))
        if cache is not None:
            cache.cross_attention_cache.update(k, v, index)
            cache.is_updated[index] = True
        return k, v

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class CrossBlock(decoder.DecoderBlock):
    """Add self-attention, cross-attention and feed-forward to the stream, one after the other."""

    def __init__(self, config: LinbiasSeq2SeqConfig, layer_index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = SelfAttention(config, layer_index, config.position)
        self.cross_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.cross_attention = CrossAttention(config, layer_index)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position: Position,
        layout: TokenLayout,
        keep: int,
        memory: Tensor,
        memory_layout: TokenLayout,
        past_key_values: EncoderDecoderCache | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return hidden, and the weights of self- and cross-attention, if asked."""
        own = None if past_key_values is None else past_key_values.self_attention_cache
        attended, weights = self.attention(self.norm(hidden), position, layout, keep, own)
        hidden = hidden + self.dropout(attended)
        attended, cross_weights = self.cross_attention(
            self.cross_norm(hidden), memory, memory_layout, past_key_values
        )
        hidden = hidden + self.dropout(attended)
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.dropout(fed), weights, cross_weights


class LinbiasSeq2SeqPreTrainedModel(LinbiasPreTrainedModel):
    config_class = LinbiasSeq2SeqConfig
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock", "CrossBlock"]


class LinbiasDecoder(decoder.Decoder, LinbiasSeq2SeqPreTrainedModel):
    """Turn embedded tokens into hidden states, given those of an encoder: blocks, final norm."""

    def __init__(self, config: LinbiasSeq2SeqConfig) -> None:
        super().__init__(config)
        self.position = make_position(config.position, config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            CrossBlock(config, index) for index in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def forward(
        self,
        embedded: Tensor,
        memory: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        cache: EncoderDecoderCache | None,
        asked: tuple[bool, bool],
    ) -> Any:
        """Run the decoder over new tokens [B, T, hidden_size], given an encoder's states; the
        masks are those of both, and asked is for weights and states.
        """
        need_weights, need_states = asked
        own = None if cache is None else cache.self_attention_cache
        layout = self._read_mask(masks[0], None, embedded, own, use_cache=own is not None)
        layout = replace(layout, need_weights=need_weights)
        read = read_attention_mask(type(self).__name__, masks[1], memory, 0, allows_holes=True)
        read = replace(read, need_weights=need_weights, queries=(Rows(),))
        return self.run(embedded, layout, cache, need_states, 0, memory, read)


class LinbiasSeq2SeqModel(LinbiasSeq2SeqPreTrainedModel):
    """Turn the tokens of two texts into hidden states of the second, which sees the first."""

    def __init__(self, config: LinbiasSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder = LinbiasModel(config)
        self.decoder = LinbiasDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Seq2SeqModelOutput:
        """Run the encoder, unless its output is given, and the decoder over new tokens.

        Args:
            input_ids, attention_mask, inputs_embeds: What the encoder reads, as of
                `decoder.Decoder.forward`. A row of padding alone gives the decoder zeros.
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds: What the decoder
                reads, likewise: the mask is [B, cached + T].
            encoder_outputs: What the encoder said before, in the place of input_ids.
            past_key_values: An `EncoderDecoderCache` of earlier tokens. It is extended in place.
            use_cache, output_attentions, output_hidden_states: As of `decoder.Decoder.forward`.
        """
        name, (ids, embedded) = type(self).__name__, (decoder_input_ids, decoder_inputs_embeds)
        if (ids is None) == (embedded is None):
            raise ValueError(
                f"{name}: give either decoder_input_ids or decoder_inputs_embeds, and not both"
            )
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            raise ValueError(
                f"{name}: past_key_values must be an EncoderDecoderCache, got a "
                f"{type(past_key_values).__name__}"
            )
        asked = decoder.asked(self.config, output_attentions, output_hidden_states)
        encoded = encoder_outputs
        if encoded is None:
            shown = dict(zip(("output_attentions", "output_hidden_states"), asked, strict=True))
            given = {"inputs_embeds": inputs_embeds, **shown}
            encoded = self.encoder(input_ids, attention_mask, **given, return_dict=True)
        elif not isinstance(encoded, BaseModelOutput):
            encoded = BaseModelOutput(*encoded[:3])
        if embedded is None:
            embedded = self.encoder.embed_tokens(ids)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            both = (DynamicCache(config=self.config) for _ in range(2))
            past_key_values = EncoderDecoderCache(*both)
        memory, masks = encoded.last_hidden_state, (decoder_attention_mask, attention_mask)
        decoded = self.decoder(embedded, memory, masks, past_key_values, asked)
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            **{CACHE: past_key_values},
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class LinbiasForConditionalGeneration(LinbiasSeq2SeqPreTrainedModel, decoder.GenerationMixin):
    """Write one text, given another; the logits are those of a linear layer tied to the embedding.

    As `LinbiasForCausalLM`, with `DataCollatorForSeq2Seq` and `Seq2SeqTrainer`.

    Example:
        >>> config = LinbiasSeq2SeqConfig(hidden_size=32, num_attention_heads=2, bos_token_id=2)
        >>> model = LinbiasForConditionalGeneration(config)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 5])
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "lm_head.weight": "model.encoder.embed_tokens.weight"
    }

    def __init__(self, config: LinbiasSeq2SeqConfig) -> None:
        super().__init__(config)
        self.model = LinbiasSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to say labels [B, T]: these one token later, after the start.

        labels              5 6 7 -100       -100 5 6 7
        decoder_input_ids   start 5 6 7       pad start 5 6
        """
        name, start = type(self).__name__, self.config.decoder_start_token_id
        padding: Any = getattr(self.config, "pad_token_id", None)
        if start is None:
            raise ValueError(
                f"{name}: config.decoder_start_token_id must be an id to shift labels, got None"
            )
        is_scored = labels != -100
        if padding is None:
            if readable(is_scored) is not None and not is_scored.all():
                raise ValueError(
                    f"{name}: config.pad_token_id must be an id where labels hold -100, got None"
                )
            padding = start
        shifted = pad(labels.masked_fill(~is_scored, padding)[:, :-1], (1, 0), value=padding)
        at_start = is_scored & (is_scored.cumsum(-1) == 1)
        at_start[:, 0] |= ~is_scored.any(-1)
        return shifted.masked_fill(at_start, start)

    @takes_cache
    @can_return_tuple
    @decoder.reads_as(LinbiasSeq2SeqModel.forward)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **named: Any,
    ) -> Seq2SeqLMOutput:
        """Return logits in at least float32, and with labels the mean loss in nats.

        Other arguments are those of `LinbiasSeq2SeqModel.forward` and
        `LinbiasForCausalLM.forward`.

        Args:
            labels: [B, T]; the decoder's logits at token t are scored on labels[:, t], but for
                -100. Without decoder inputs they are also what it reads, one token later.
            decoder_attention_mask: Where there are labels, None hides the padding that a row
                begins with, as collators pad on the left.
        """
        if labels is not None:
            if decoder_input_ids is None and named.get("decoder_inputs_embeds") is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            if decoder_attention_mask is None and named.get("past_key_values") is None:
                decoder_attention_mask = self._from_start(decoder_input_ids)
        inputs = input_ids, attention_mask, decoder_input_ids, decoder_attention_mask
        # Labels are in place already.
        how: Any = {"shift_labels": labels, "num_items_in_batch": num_items_in_batch}
        return Seq2SeqLMOutput(**decoder.predict(self, inputs, named, labels, **how))

    def _from_start(self, decoder_input_ids: Tensor | None) -> Tensor | None:
        """[B, T], zero for the padding that a row begins with; None where no token is padding."""
        padding: Any = getattr(self.config, "pad_token_id", None)
        if decoder_input_ids is None or padding in (None, self.config.decoder_start_token_id):
            return None
        return (decoder_input_ids != padding).cumsum(-1) > 0
