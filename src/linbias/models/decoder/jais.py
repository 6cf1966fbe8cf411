"""JAIS: GPT-2 with ALiBi, a gated feed-forward part and the scales of muP, without the code of its
folders.

Written from what is public: configurations, names of weights, and the logits of llama.cpp. Modules
are named as the original names its weights, and the slopes are those that lie among the weights.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from linbias.models import fields
from linbias.models.decoder import decoder
from linbias.models.decoder.linbias import LinbiasForCausalLM
from linbias.models.decoder.positions import AttendOptions, Biased
from linbias.models.decoder.slopes import ModelSlopes
from linbias.schedules import slopes


class JaisConfig(fields.CheckedConfig):
    """Describe a JAIS model, in the fields of the original config.json that matter."""

    model_type = "jais"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }

    # As our other configurations call them.
    head_size = property(lambda self: self.n_embd // self.n_head)
    attention_dropout = property(lambda self: self.attn_pdrop)

    vocab_size: int = 84_992
    n_embd: int = 5120
    n_layer: int = 40
    n_head: int = 40
    n_inner: int | None = None  # 4 * n_embd
    n_positions: int = 2048
    activation_function: str = "swiglu"  # or the name of an activation without a gate
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    position_embedding_type: str = "alibi"
    mup_embeddings_scale: float = 1.0
    mup_output_alpha: float = 1.0  # its product with mup_width_scale is the factor on the logits
    mup_width_scale: float = 1.0
    mup_scale_qk_dot_by_d: bool = False  # else by sqrt(D)
    # {"factor": f} divides slopes by f, {"train_seq_len": n} by S / n where a row has S > n keys.
    alibi_scaling: dict[str, Any] | None = None
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    attention_implementation: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # The first models name these otherwise; their width_scale is all of the factor.
        for name, older in _OLDER_NAMES.items():
            if older in kwargs:
                setattr(self, name, kwargs.pop(older))
        fields.check_fields(self, _RULES)
        fields.check_shared_width(self, "n_embd")
        for name, value in _NOT_BUILT.items():
            if kwargs.get(name, value) != value:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be {value}, got {kwargs[name]!r}"
                )
        super().__post_init__(**kwargs)


_NOT_BUILT = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_OLDER_NAMES = {
    "mup_embeddings_scale": "embeddings_scale",
    "mup_width_scale": "width_scale",
    "mup_scale_qk_dot_by_d": "scale_qk_dot_by_d",
}


def _is_scaling(value: object) -> bool:
    if not isinstance(value, dict) or value.get("type", "linear") != "linear":
        return False
    given = [value[name] for name in ("factor", "train_seq_len") if value.get(name) is not None]
    return len(given) > 0 and all(fields.POSITIVE.holds(number) for number in given)


_RULES = {
    **fields.shared_rules(JaisConfig),
    **dict.fromkeys(("n_embd", "n_layer", "n_head", "n_positions"), fields.COUNT),
    "n_inner": fields.optional(fields.COUNT),
    "activation_function": fields.Rule(
        "'swiglu' or the name of an activation of Transformers",
        lambda value: value == "swiglu" or fields.ACTIVATION.holds(value),
    ),
    "position_embedding_type": fields.one_of(("alibi",)),
    **dict.fromkeys(("layer_norm_epsilon", "initializer_range"), fields.POSITIVE),
    **dict.fromkeys(
        ("mup_embeddings_scale", "mup_output_alpha", "mup_width_scale"), fields.POSITIVE
    ),
    **dict.fromkeys(("mup_scale_qk_dot_by_d", "tie_word_embeddings"), fields.FLAG),
    **dict.fromkeys(("embd_pdrop", "resid_pdrop"), fields.PROBABILITY),
    "attn_pdrop": fields.ATTENTION_DROPOUT,
    "alibi_scaling": fields.optional(
        fields.Rule("a mapping with a positive factor or train_seq_len", _is_scaling)
    ),
}


class StoredSlopes(Biased):
    counts_hidden = True

    def __init__(self, config: JaisConfig) -> None:
        super().__init__(config)
        values = torch.tensor(slopes(config.n_head), dtype=torch.float32)
        self.slopes = nn.Parameter(values[:, None], requires_grad=False)
        self._scale = 1.0 / config.head_size if config.mup_scale_qk_dot_by_d else None
        self._scaling = _scaling(config.alibi_scaling or {})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredSlopes":
        """Move to another device with the model, but stay in float32 where it goes to 16 bits."""
        before = self.slopes.data
        super()._apply(fn, recurse)
        if self.slopes.itemsize < 4:
            self.slopes.data = before.to(self.slopes.device)
        return self

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        stored = self.slopes[:, 0].to(torch.promote_types(q.dtype, torch.float32))
        scaled = self._scaling.apply_scale(stored, num_keys, options.key_range)
        return {"slopes": scaled, "scale": self._scale}


def _scaling(asked: dict[str, Any]) -> ModelSlopes:
    """What `alibi_scaling` asks for; the slopes themselves are stored elsewhere."""
    if asked.get("factor") is not None:
        return ModelSlopes((), 1.0 / asked["factor"])
    if asked.get("train_seq_len") is not None:
        return ModelSlopes((), "interpolate", asked["train_seq_len"])
    return ModelSlopes(())


class SelfAttention(decoder.SelfAttention):
    names = ("c_attn", "c_proj")

    def __init__(self, config: JaisConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)


class FeedForward(nn.Module):
    """c_proj(c_fc * silu(c_fc2)), or c_proj(act(c_fc)) without a gate."""

    def __init__(self, config: JaisConfig) -> None:
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, inner)
        gated = config.activation_function == "swiglu"
        self.c_fc2 = Conv1D(inner, config.n_embd) if gated else None
        self.act = nn.SiLU() if gated else ACT2FN[config.activation_function]

    def forward(self, hidden: Tensor) -> Tensor:
        value = self.c_fc(hidden)
        if self.c_fc2 is None:
            return self.c_proj(self.act(value))
        return self.c_proj(value * self.act(self.c_fc2(hidden)))


class DecoderBlock(decoder.DecoderBlock):
    names = ("ln_1", "attn", "ln_2", "mlp")

    def __init__(self, config: JaisConfig, layer_index: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = SelfAttention(config, layer_index)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.resid_pdrop)


class JaisPreTrainedModel(decoder.DecoderPreTrainedModel):
    config_class = JaisConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    # Buffers with the causal mask, which older versions of Transformers saved.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"\.attn\.(masked_)?bias$"]


class JaisModel(decoder.Decoder, JaisPreTrainedModel):
    """Token ids to hidden states; call, padding and cache are those of `decoder.Decoder`."""

    embed_tokens = property(lambda self: self.wte)
    position = property(lambda self: self.relative_pe)
    layers = property(lambda self: self.h)
    norm = property(lambda self: self.ln_f)

    def __init__(self, config: JaisConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.relative_pe = StoredSlopes(config)
        self.dropout = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(DecoderBlock(config, index) for index in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.post_init()

    def before_layers(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return super().before_layers(embedded * self.config.mup_embeddings_scale, positions)


class ScaledLinear(nn.Linear):
    def __init__(self, size: int, out: int, factor: float) -> None:
        super().__init__(size, out, bias=False)
        self.factor = factor

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.factor


class JaisForCausalLM(JaisPreTrainedModel, decoder.CausalGenerationMixin):
    """Predict the next token. Call, loss and logits are those of `LinbiasForCausalLM`."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "transformer.wte.weight"}
    forward = LinbiasForCausalLM.forward
    model = property(lambda self: self.transformer)

    def __init__(self, config: JaisConfig) -> None:
        super().__init__(config)
        self.transformer = JaisModel(config)
        factor = config.mup_output_alpha * config.mup_width_scale
        self.lm_head = ScaledLinear(config.n_embd, config.vocab_size, factor)
        self.post_init()
