"""The paper's language model: a pre-norm decoder with adaptive input and a tied adaptive softmax.

Modules are named as the original names its tensors. Positions are those of
`linbias.models.decoder.positions`, but for the sinusoids, which have other wavelengths and another
start; the original scales the embedding in every model.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from linbias.models.decoder import decoder
from linbias.models.decoder.cache import CACHE
from linbias.models.decoder.positions import T5, Position, make_position
from linbias.paper.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from linbias.paper.config import PaperConfig


class Sinusoidal(Position):
    """Add all sin(n r_i), then all cos(n r_i), n = 2, 3, ..., as the original does, from <pad>'s
    id + 1, and r_i = 10000^(-i / (hidden_size/2 - 1)).
    """

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        count = hidden.shape[-1] // 2
        steps = torch.arange(count, device=hidden.device, dtype=torch.float32)
        rates = torch.exp(steps * (-math.log(10000.0) / (count - 1)))
        angles = (positions + 2)[..., None] * rates
        return hidden + torch.cat([angles.sin(), angles.cos()], dim=-1).to(hidden.dtype)


class SelfAttention(decoder.SelfAttention):
    """Attention with a product, and a bias, for each of queries, keys and values."""

    names = ("", "out_proj")

    def __init__(self, config: PaperConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        width = config.hidden_size
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for project in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(project.weight, gain=0.5**0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def project_in(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)


class DecoderBlock(decoder.DecoderBlock):
    """Attention, then feed-forward, each behind a layer norm."""

    names = ("self_attn_layer_norm", "self_attn", "final_layer_norm", "feed_forward")

    def __init__(self, config: PaperConfig, layer_index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = SelfAttention(config, layer_index)
        self.self_attn_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)
        self.final_layer_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout(self.fc1(normed).relu_()))


class PaperPreTrainedModel(decoder.DecoderPreTrainedModel):
    """What the two models below share."""

    config_class = PaperConfig

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as `reset_parameters` of their modules drew them."""


class PaperModel(decoder.Decoder, PaperPreTrainedModel):
    """Turn token ids into hidden states, as `decoder.Decoder` does."""

    embed_tokens: AdaptiveEmbedding

    def __init__(self, config: PaperConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveEmbedding(config)
        if config.position == "sinusoidal":
            self.position = Sinusoidal(config)
        else:
            self.position = make_position(config.position, config)
        self.reset_parameters()
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DecoderBlock(config, index) for index in range(config.num_hidden_layers)
        )
        if config.final_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def reset_parameters(self) -> None:
        if isinstance(self.position, T5):
            nn.init.normal_(self.position.bias.weight, std=self.config.hidden_size**-0.5)

    def before_layers(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return super().before_layers(embedded * math.sqrt(self.config.hidden_size), positions)

    def after_layers(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(hidden) if self.config.final_norm else hidden


class PaperForCausalLM(PaperPreTrainedModel, decoder.CausalGenerationMixin):
    """Predict the next token; a model of Transformers whose logits are log-probabilities."""

    def __init__(self, config: PaperConfig) -> None:
        super().__init__(config)
        self.model = PaperModel(config)
        self.adaptive_softmax = AdaptiveSoftmax(config)
        self.post_init()

    def resize_token_embeddings(self, *_: Any, **__: Any) -> nn.Module:
        """Refuse: ids are frequency ranks in bands, and <pad> is one of them."""
        raise NotImplementedError(
            "PaperForCausalLM: the vocabulary cannot be resized: its ids are frequency ranks "
            "(the tokenizer has <pad>)"
        )

    @can_return_tuple
    @decoder.reads_as(decoder.Decoder.forward)
    def forward(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **named: Any,
    ) -> CausalLMOutputWithPast:
        """Return log-probabilities or, given labels[:, t + 1] or the original's targets[:, t] to
        score tokens [:, t] on, the mean loss in nats.
        """
        if labels is not None and targets is not None:
            raise ValueError("PaperForCausalLM: give either labels or targets, and not both")
        if labels is not None:
            targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        decoder.refuse_keep(self, named)
        wanted = (named.get(name) for name in ("output_attentions", "output_hidden_states"))
        is_whole = targets is not None or any(decoder.asked(self.config, *wanted))
        some = isinstance(logits_to_keep, Tensor)
        named["keep"] = 0 if is_whole or some else logits_to_keep
        outputs = self.model(*inputs, **named, return_dict=True)
        loss, logits = None, None
        if targets is None:
            hidden = decoder.kept(outputs.last_hidden_state, logits_to_keep)
            logits = self.adaptive_softmax(hidden, self.model.embed_tokens)
        else:
            loss = self._loss(outputs.last_hidden_state, targets, num_items_in_batch)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def log_probs(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Return log p of the targets [B, K], which follow the last K of input_ids [B, T]."""
        outputs = self.model(input_ids, use_cache=False, keep=targets.shape[1], return_dict=True)
        hidden, table = outputs.last_hidden_state.flatten(0, 1), self.model.embed_tokens
        log_probs = self.adaptive_softmax.log_probs(hidden, targets.flatten(), table)
        return log_probs.view(targets.shape)

    def _loss(self, hidden: Tensor, targets: Tensor, count: Tensor | int | None) -> Tensor:
        """The loss, divided by a number of tokens or, if None, by that of the scored ones."""
        total = self.adaptive_softmax.loss(hidden, targets, self.model.embed_tokens)
        if count is None:
            count = ((targets != -100) & (targets != self.config.pad_token_id)).sum()
        if isinstance(count, Tensor):  # Trainer may count on another device
            count = count.to(total.device)
        return total / count
