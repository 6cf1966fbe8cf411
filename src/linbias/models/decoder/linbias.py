"""The project's own language model: a pre-norm transformer with a choice of positions.

Read from the bottom up to follow a token: a model with a head calls `LinbiasModel`, which calls
`DecoderBlock`s, which call `SelfAttention` and `FeedForward` (or `FusedBlock`s, which do both).
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput
from transformers.utils import can_return_tuple

from linbias.models.decoder import bidirectional, decoder
from linbias.models.decoder.config import ENCODER_POSITIONS, LinbiasConfig
from linbias.models.decoder.positions import make_gate, make_position


class SelfAttention(decoder.SelfAttention):
    """Queries, keys and values come from one product; method None is the configuration's."""

    def __init__(self, config: LinbiasConfig, layer_index: int, method: str | None = None) -> None:
        super().__init__(config, layer_index)
        self.qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.gate = make_gate(method or config.method, config)
        self.out = nn.Linear(self.widths[0], config.hidden_size, bias=False)


class FeedForward(nn.Sequential):
    """Widen, GELU, narrow."""

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False),
            nn.GELU(),
            nn.Linear(config.intermediate_size, config.hidden_size, bias=False),
        )


class DecoderBlock(decoder.DecoderBlock):
    def __init__(self, config: LinbiasConfig, layer_index: int) -> None:
        super().__init__()
        self.parallel = config.block == "parallel"
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = SelfAttention(config, layer_index)
        if not self.parallel:
            self.feed_forward_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)


class SplitGate(nn.Module):
    """What is left of a gate whose product [..., H] is made already: where it lies, and bias."""

    def __init__(self, gate: nn.Linear, first: int) -> None:
        super().__init__()
        self.columns = slice(first, first + gate.out_features)
        self.bias = gate.bias

    def reset(self) -> None:
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        product = hidden[..., self.columns]
        return product if self.bias is None else product + self.bias


class SplitAttention(decoder.SelfAttention):
    """Attention over queries, keys, values and gates that lie side by side."""

    def __init__(self, config: LinbiasConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.width_in = sum(self.widths)
        if (gate := make_gate(config.method, config)) is not None:
            self.gate = SplitGate(gate, self.width_in)
            self.width_in += gate.out_features
        self.out = nn.Linear(self.widths[0], config.hidden_size, bias=False)

    def project_in(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden[..., : sum(self.widths)].split(self.widths, dim=-1)


class FusedBlock(decoder.DecoderBlock):
    """Attention and feed-forward side by side, from one product.

        q, k, v, wide, gate = split(fused(rms_norm(hidden)))
        hidden + out(attention(q, k, v)) + narrow(wide * silu(gate))

    Position methods with learned steps have their projection in the product as well, after v.

    Source: the parallel block in the discussions of the paper's repository.
    """

    names = ("project", "attention", "", "feed_forward")
    parallel = True

    def __init__(self, config: LinbiasConfig, layer_index: int) -> None:
        super().__init__()
        self.inner = config.intermediate_size
        self.norm = nn.RMSNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = SplitAttention(config, layer_index)
        width = self.attention.width_in + 2 * self.inner
        self.fused = nn.Linear(config.hidden_size, width, bias=False)
        self.narrow = nn.Linear(self.inner, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def project(self, hidden: Tensor) -> Tensor:
        return self.fused(self.norm(hidden))

    def feed_forward(self, projected: Tensor) -> Tensor:
        wide, gate = projected[..., -2 * self.inner :].chunk(2, dim=-1)
        return self.narrow(wide * silu(gate))


class LinbiasPreTrainedModel(decoder.DecoderPreTrainedModel):
    config_class = LinbiasConfig
    _no_split_modules: ClassVar[list[str]] = ["DecoderBlock", "FusedBlock"]
    # What slopes are made of: in 16 bits they would not be those of training.
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {
        *("position.log_left", "position.log_right"),
        *("position.left", "position.right", "position.first"),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, bidirectional.Sloped | SplitGate):
            module.reset()


class LinbiasModel(decoder.Decoder, LinbiasPreTrainedModel):
    """Token ids to hidden states; call, padding and cache are those of `decoder.Decoder`."""

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        causal = config.encoder_position is None
        self.position = make_position(config.method, config, causal=causal)
        self.dropout = nn.Dropout(config.hidden_dropout)
        fused = config.block == "parallel_fused"
        block, norm = (FusedBlock, nn.RMSNorm) if fused else (DecoderBlock, nn.LayerNorm)
        self.layers = nn.ModuleList(
            block(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = norm(config.hidden_size, config.layer_norm_eps)
        self.post_init()


class _WithHead(LinbiasPreTrainedModel):
    """A body, and a linear layer to logits that is tied to its embedding."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    accepts_loss_kwargs = True  # as of `decoder.GenerationMixin`

    def __init__(self, config: LinbiasConfig) -> None:
        super().__init__(config)
        self.model = LinbiasModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class LinbiasForCausalLM(_WithHead, decoder.CausalGenerationMixin):
    """Predict the next token: `LinbiasModel`, then a linear layer tied to the embedding.

    It saves and loads (`save_pretrained`, `from_pretrained`, safetensors), generates and trains as
    any Transformers model does; `linbias.models.install()` makes it known to the Auto classes.

    Example:
        >>> model = LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    def __init__(self, config: LinbiasConfig) -> None:
        if config.encoder_position is not None:
            raise ValueError(
                "LinbiasForCausalLM: encoder_position must be None, or tokens would see those to "
                f"predict, got {config.encoder_position!r} (LinbiasForMaskedLM reads so)"
            )
        super().__init__(config)

    @can_return_tuple
    @decoder.reads_as(decoder.Decoder.forward)
    def forward(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **named: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits in at least float32, and with labels the mean loss in nats.

        Arguments not listed here are those of `decoder.Decoder.forward`.

        Args:
            labels: [B, T]; the logits at token t are scored on labels[:, t + 1]. -100 is not
                scored.
            token_type_ids: Not used; some tokenizers make them.
            logits_to_keep: Compute logits for the last so many tokens only, or for those at
                indices [N]; 0 means all. Hidden states and attentions come for all tokens.
            num_items_in_batch: Divide the summed loss by this instead of the number of scored
                tokens, so that the parts of a larger batch add up to its mean.
        """
        how: Any = {"keep": logits_to_keep, "num_items_in_batch": num_items_in_batch}
        outputs = decoder.predict(self, inputs, named, labels, **how)
        return CausalLMOutputWithPast(**outputs)


class LinbiasForMaskedLM(_WithHead):
    """Predict masked tokens from those on both sides.

    As `LinbiasForCausalLM`, but that it generates nothing; `DataCollatorForLanguageModeling` makes
    its batches, and `config.encoder_position` names its position method.

    Example:
        >>> config = LinbiasConfig(
        ...     hidden_size=32, num_attention_heads=2, encoder_position="symmetric"
        ... )
        >>> LinbiasForMaskedLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 256])
    """

    def __init__(self, config: LinbiasConfig) -> None:
        if config.encoder_position is None:
            raise ValueError(
                "LinbiasForMaskedLM: encoder_position must be one of "
                f"{ENCODER_POSITIONS}, got None"
            )
        super().__init__(config)

    @can_return_tuple
    @decoder.reads_as(decoder.Decoder.forward)
    def forward(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **named: Any,
    ) -> MaskedLMOutput:
        """Return logits in at least float32, and with labels the mean loss in nats.

        Arguments not listed here are those of `LinbiasForCausalLM.forward`.

        Args:
            labels: [B, T]; the logits at token t are scored on labels[:, t]. -100 is not scored.
        """
        # Where Transformers does not know a subclass by its name, it would shift labels.
        how: Any = {"shift_labels": labels, "num_items_in_batch": num_items_in_batch}
        outputs = decoder.predict(self, inputs, named, labels, **how)
        return MaskedLMOutput(**outputs)
