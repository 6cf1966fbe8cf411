"""BERT with ALiBi: one encoder for jina-embeddings-v2, MosaicBERT and DNABERT-2, and its heads.

What they disagree on is in bert_config.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForSequenceClassificationLoss, fixed_cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from linbias.models.decoder.attend import How, attend
from linbias.models.decoder.decoder import asked, reads_as
from linbias.models.decoder.layout import TokenLayout, read_attention_mask, takes_marks
from linbias.models.decoder.positions import Alibi, AttendOptions
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.torch import attention_varlen


class Embeddings(nn.Module):
    """Tokens and their types, added and normed. There is nothing to add for positions."""

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, words: Tensor, types: Tensor) -> Tensor:
        return self.dropout(self.norm(words + self.types(types)))


class Attention(nn.Module):
    """Project to queries, keys and values, let the texts attend to themselves, project back."""

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_size = config.head_size
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        normed = config.query_key_norm
        self.q_norm = nn.LayerNorm(size, config.layer_norm_eps) if normed else nn.Identity()
        self.k_norm = nn.LayerNorm(size, config.layer_norm_eps) if normed else nn.Identity()
        self.position = Alibi(config, causal=False)
        self.dropout = config.attention_dropout

    def forward(self, hidden: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor | None]:
        """As hidden, which `TokenLayout.pack` gave, and the weights [B, H, T, T] if asked."""
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_size)) for x in (q, k, v))
        position, dropout = self.position, self.dropout if self.training else 0.0
        queries, keys = layout.queries[0], layout.keys[0]
        out: Any
        weights = None
        if q.dim() == 4:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, weights = attend(q, k, v, How(position, layout, None, 0, dropout))
        else:
            assert keys.span is not None
            offsets = pad((keys.span[:, 1] - keys.span[:, 0]).cumsum(0), (1, 0))
            how: Any = {"dropout": dropout, "implementation": position.implementation}
            left = position.slopes.left(q, len(q), keys.span)
            out = attention_varlen(q, k, v, offsets, offsets, left, causal=False, **how)
            out = out.flatten(1)
            if layout.need_weights:
                q, k = (layout.unpack(x).transpose(1, 2) for x in (q, k))
                options = AttendOptions(keys.span, keys.start_of(queries))
                weights = position.weights(q, k, options)
        if weights is not None and keys.places is None:
            weights = weights * keys.is_token(q, weights.shape[2])[:, None, :, None]
        return self.out(out), weights


_TOKENS_AT_ONCE = 512  # as fast as 1,024 and with half of the memory


class FeedForward(nn.Module):
    """out(act(gate) * value), of the halves of one projection without bias."""

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__()
        self.gated = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.feed_forward_act]
        self.gate_first = config.gate_first
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        # What lies in between is eight times as wide as `hidden`: a chunk of tokens at a time,
        # where nothing is kept for gradients.
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._compute(hidden)
        out = torch.empty_like(hidden)
        chunks = (x.split(_TOKENS_AT_ONCE, dim=-2) for x in (hidden, out))
        for given, part in zip(*chunks, strict=True):
            part.copy_(self._compute(given))
        return out

    def _compute(self, hidden: Tensor) -> Tensor:
        first, second = self.gated(hidden).chunk(2, dim=-1)
        gate, value = (first, second) if self.gate_first else (second, first)
        return self.out(self.dropout(self.act(gate) * value))


class Layer(GradientCheckpointingLayer):
    """Attention, then feed-forward; each is added and the sum normed."""

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(size, eps)
        self.residual_norm = nn.LayerNorm(size, eps) if config.residual_norm else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(size, eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor | None]:
        attended, weights = self.attention(hidden, layout)
        normed = self.attention_norm(hidden + self.dropout(attended))
        del attended  # whose memory the feed-forward part may use
        if self.residual_norm is not None:
            normed = self.residual_norm(hidden + normed)
        return self.feed_forward_norm(normed + self.feed_forward(normed)), weights


class LinbiasBertPreTrainedModel(PreTrainedModel):
    """What the models below share."""

    config_class = LinbiasBertConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]


class LinbiasBertModel(LinbiasBertPreTrainedModel):
    """Turn token ids into hidden states, each of which has seen the whole text.

    Padded rows are run without their padding, on whichever side it is.
    """

    _input_embed_layer = "words"  # of `embeddings`, for Transformers

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if config.pooler else None
        self.post_init()

    @takes_marks
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        """Hidden states [B, T, hidden_size], zero at padding, and what was asked for beside them.

        ids, mask and types are [B, T]; inputs_embeds [B, T, hidden_size] takes the place of ids.
        position_ids that start anew mark texts as of `decoder.Decoder.forward`; with several in a
        row, padding is not zero, and nothing is pooled.
        """
        name = type(self).__name__
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name}: give either input_ids or inputs_embeds, and not both")
        given: Any = inputs_embeds if input_ids is None else input_ids
        layout = read_attention_mask(name, attention_mask, given, 0, position_ids=position_ids)
        packed = layout.pack(given)
        words = packed if input_ids is None else self.embeddings.words(packed)
        if token_type_ids is None:
            types = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
        else:
            types = layout.pack(token_type_ids).long()
        output_attentions, output_hidden_states = asked(
            self.config, output_attentions, output_hidden_states
        )
        layout = replace(layout, need_weights=output_attentions)
        hidden = self.embeddings(words, types)
        states: tuple[Tensor, ...] = ()
        attentions: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if output_hidden_states:
                states += (layout.unpack(hidden),)
            hidden, weights = layer(hidden, layout)
            if output_attentions:
                attentions += (weights,)
        last = layout.unpack(hidden)
        return BaseModelOutputWithPooling(
            last_hidden_state=last,
            pooler_output=self._pool(last, layout),
            hidden_states=(*states, last) if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )

    def _pool(self, last: Tensor, layout: TokenLayout) -> Tensor | None:
        """[B, hidden_size], of the first token of each row; None of rows of several texts."""
        if self.pooler is None or layout.is_packed:
            return None
        if (span := layout.keys[0].span) is None:
            first = last[:, 0]
        else:  # a row of padding alone has none: its zeros serve
            where = span[:, 0].clamp(max=last.shape[1] - 1)
            first = last[torch.arange(len(last), device=last.device), where]
        return self.pooler(first).tanh()


class LinbiasBertWithHead(LinbiasBertPreTrainedModel):
    """An encoder and what a task adds to it: `predict`, `loss` and the record that it returns."""

    accepts_loss_kwargs = True  # as of `LinbiasForCausalLM`
    output: ClassVar[Callable[..., Any]]
    predict: Callable[[BaseModelOutputWithPooling], Tensor]  # the logits

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """The mean where a label is not -100; or the sum, divided by count."""
        return fixed_cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), count)

    @can_return_tuple
    @reads_as(LinbiasBertModel.forward)
    def forward(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **named: Any,
    ) -> Any:
        """Logits, and the loss for labels [B, T], or [B] for whole texts.

        Other arguments are those of `LinbiasBertModel.forward` and `LinbiasForCausalLM.forward`.
        """
        outputs = self.encoder(*inputs, **named, return_dict=True)
        logits = self.predict(outputs)
        return type(self).output(
            loss=None if labels is None else self.loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LinbiasBertForMaskedLM(LinbiasBertWithHead):
    """Predict masked tokens: a dense layer, activation, norm and the tied embedding."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "decoder.weight": "encoder.embeddings.words.weight"
    }
    output = MaskedLMOutput

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__(config)
        self.encoder = LinbiasBertModel(config)
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, config.head_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def predict(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.decoder(self.norm(self.act(self.transform(outputs.last_hidden_state))))


class LinbiasBertForTokenClassification(LinbiasBertWithHead):
    """Classify each token, by a linear layer to config.num_labels."""

    output = TokenClassifierOutput

    def __init__(self, config: LinbiasBertConfig) -> None:
        super().__init__(config)
        self.encoder = LinbiasBertModel(config)
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def predict(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        return self.classifier(self.dropout(outputs.last_hidden_state))


class LinbiasBertForSequenceClassification(LinbiasBertForTokenClassification):
    """Classify texts by their pooled first token; the loss is what config.problem_type says."""

    output = SequenceClassifierOutput

    def __init__(self, config: LinbiasBertConfig) -> None:
        if not config.pooler:
            raise ValueError(f"{type(self).__name__}: pooler must be True, got False")
        super().__init__(config)

    def predict(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        if outputs.pooler_output is None:
            raise ValueError(
                f"{type(self).__name__}: position_ids must mark one text in each row, got several"
            )
        return self.classifier(self.dropout(outputs.pooler_output))

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        loss: Tensor = ForSequenceClassificationLoss(
            labels, logits, self.config, num_items_in_batch=count
        )
        if count is None or self.config.problem_type == "single_label_classification":
            return loss
        return loss * (labels.numel() / count)  # of numbers, Transformers takes the mean
