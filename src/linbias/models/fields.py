"""How the fields of a configuration are checked: one rule per field, then rules between fields.

Errors read `LinbiasConfig: hidden_size must be a multiple of 4 heads, got 30`.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from linbias._request import LARGEST_DROPOUT
from linbias.methods import METHODS
from linbias.schedules import SCHEDULES


class Rule(NamedTuple):
    """What a field must be, in words for the error and as a test."""

    words: str
    holds: Callable[[Any], bool]


_FLOAT32 = torch.finfo(torch.float32)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and _FLOAT32.tiny <= value <= _FLOAT32.max


def one_of(names: tuple[str, ...]) -> Rule:
    return Rule(f"one of {names}", lambda value: isinstance(value, str) and value in names)


def optional(rule: Rule) -> Rule:
    """The rule of a field that may be None as well."""
    return Rule(f"None or {rule.words}", lambda value: value is None or rule.holds(value))


def _is_dtype(value: object) -> bool:
    named = getattr(torch, value, None) if isinstance(value, str) else value
    return value is None or isinstance(named, torch.dtype)


COUNT = Rule("an integer of at least 1", lambda value: is_integer(value) and value >= 1)
POSITIVE = Rule("a positive number of float32", _is_positive)
PROBABILITY = Rule("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)
# That of attention is drawn from 32 random bits.
ATTENTION_DROPOUT = Rule(
    "a number in [0, 1 - 2^-32]",
    lambda value: _is_number(value) and 0 <= value <= LARGEST_DROPOUT,
)
ACTIVATION = Rule(
    "the name of an activation of Transformers",
    lambda value: isinstance(value, str) and value in ACT2FN,
)
FLAG = Rule("True or False", lambda value: isinstance(value, bool))

# Building a model of absurd size takes minutes or all memory before anything fails.
MAXIMA: Mapping[str, int] = {
    "num_hidden_layers": 2**11,
    "decoder_layers": 2**11,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_kv_heads"), 2**12),
    "pretraining_tp": 2**12,
    "hidden_size": 2**17,
    "head_size": 2**14,
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size"), 2**20),
    "vocab_size": 2**24,
    "type_vocab_size": 2**16,
    **dict.fromkeys(("model_max_length", "train_length", "seq_length"), 2**30),
    **dict.fromkeys(("max_position_embeddings", "window", "t5_max_distance"), 2**30),
    "max_seq_len": 2**24,  # of MPT, whose code in Transformers makes a table of them
    "t5_num_buckets": 2**16,
}
_MOST_LABELS = 2**16

# The fields that mean the same in every family.
SHARED: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), COUNT
    ),
    **dict.fromkeys(("n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads"), COUNT),
    **dict.fromkeys(("train_length", "model_max_length", "seq_length", "n_positions"), COUNT),
    **dict.fromkeys(("max_seq_len", "window", "t5_num_buckets", "t5_max_distance"), COUNT),
    **dict.fromkeys(("type_vocab_size", "num_kv_heads", "ffn_hidden_size"), COUNT),
    "pretraining_tp": COUNT,
    **dict.fromkeys(("max_position_embeddings", "n_inner", "kv_n_heads"), optional(COUNT)),
    **dict.fromkeys(("attention_dropout", "attn_pdrop"), ATTENTION_DROPOUT),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "embd_pdrop", "emb_pdrop"), PROBABILITY),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"), POSITIVE),
    **dict.fromkeys(("norm_eps", "head_norm_eps", "initializer_range", "rotary_base"), POSITIVE),
    "classifier_dropout": optional(PROBABILITY),
    **dict.fromkeys(("clip_qkv", "softmax_scale"), optional(POSITIVE)),
    "alibi_bias_max": Rule(
        "in (0, 126], since the least slope, 2^-alibi_bias_max, is a float32",
        lambda value: _is_positive(value) and value <= 126,
    ),
    "slope_schedule": one_of(SCHEDULES),
    "slope_scale": Rule(
        f"None, 'interpolate' or {POSITIVE.words}",
        lambda value: value is None or value == "interpolate" or _is_positive(value),
    ),
    "attention_implementation": Rule(
        "the name of an implementation", lambda value: isinstance(value, str) and value != ""
    ),
    "use_cache": FLAG,
    # Transformers' own, which it reads without a look at them.
    "dtype": Rule("None or the name of a dtype of PyTorch", _is_dtype),
    "id2label": Rule(
        "None or a mapping", lambda value: value is None or isinstance(value, Mapping)
    ),
}


def shared_rules(family: type[PreTrainedConfig]) -> dict[str, Rule]:
    """Those of `SHARED` for the fields that a configuration has."""
    names = {*family.__annotations__, "dtype", "id2label"}
    return {name: rule for name, rule in SHARED.items() if name in names}


def own_fields(family: type[PreTrainedConfig]) -> set[str]:
    """The names of the fields that a configuration adds to those of Transformers."""
    ours = (kind for kind in family.__mro__ if not issubclass(PreTrainedConfig, kind))
    annotated = {name for kind in ours for name in kind.__annotations__}
    return {field.name for field in dataclasses.fields(family)} & annotated


class CheckedConfig(PreTrainedConfig):
    """A configuration that refuses unknown fields, but for those of a file."""

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        # TRL asks a model that is none of Transformers' own for its `auto_map`.
        return super().from_dict({"auto_map": {}, **config_dict, _OF_A_FILE: True}, **options)

    def to_dict(self) -> dict[str, Any]:
        return {name: x for name, x in super().to_dict().items() if (name, x) != ("auto_map", {})}

    def __post_init__(self, **others: Any) -> None:
        """Take the fields that are none of the family's, if Transformers knows them."""
        if not others.pop(_OF_A_FILE, False):
            for name in others:
                if not (hasattr(type(self), name) or name in _OF_TRANSFORMERS or name[0] == "_"):
                    known = sorted(own_fields(type(self)))
                    near = difflib.get_close_matches(name, known, n=1)
                    advice = (
                        f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                    )
                    raise TypeError(f"{type(self).__name__}: there is no field {name}; {advice}")
        check_num_labels(type(self).__name__, others)
        super().__post_init__(**others)
        check_tokens(self)


# What Transformers takes beside the fields that all configurations have.
_OF_TRANSFORMERS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "auto_map"),
    *("name_or_path", "torch_dtype", "output_attentions", "attn_implementation"),
    *("experts_implementation", "quantization_config", "per_layer_config"),
}
_OF_A_FILE = "_of_a_file"


def check_fields(config: PreTrainedConfig, rules: Mapping[str, Rule]) -> None:
    """Check each field by its own rule, in the order of `rules`, and the sizes."""
    for name, rule in rules.items():
        require(config, name, rule.holds(getattr(config, name)), rule.words)
    for name, most in MAXIMA.items():
        size = getattr(config, name, 0)
        require(config, name, not is_integer(size) or size <= most, f"at most {most}")


def check_numbers(config: PreTrainedConfig) -> None:
    """Check the numbers that a configuration of any family has under the names of `SHARED`."""
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        found = {name: getattr(part, name, None) for name in SHARED}
        check_fields(part, {name: SHARED[name] for name, x in found.items() if _is_number(x)})


def check_num_labels(caller: str, given: Mapping[str, Any]) -> None:
    """Check the number of labels before Transformers gives each of them a name."""
    n = given.get("num_labels")
    if not (n is None or (is_integer(n) and 1 <= n <= _MOST_LABELS)):
        words = f"an integer in [1, {_MOST_LABELS}]"
        raise ValueError(f"{caller}: num_labels must be {words}, got {_show(n)}")


def check_tokens(config: PreTrainedConfig) -> None:
    """Check that the special tokens are tokens of the vocabulary."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        given = getattr(config, name, None)
        ids = given if isinstance(given, list | tuple) else [given]
        inside = all(x is None or (is_integer(x) and 0 <= x < config.vocab_size) for x in ids)
        require(config, name, inside, f"None or in [0, {config.vocab_size})")


def check_shared_width(config: PreTrainedConfig, name: str = "hidden_size") -> None:
    """Check that the heads share the width of the model evenly."""
    heads = config.num_attention_heads
    require(config, name, getattr(config, name) % heads == 0, f"a multiple of {heads} heads")


def check_positions(config: PreTrainedConfig) -> None:
    """Check the fields of the position methods against each other."""
    check_even(config, "position")
    require(config, "t5_num_buckets", config.t5_num_buckets >= 2, "at least 2")
    half = config.t5_num_buckets // 2
    words = f"above half of t5_num_buckets, {half}"
    require(config, "t5_max_distance", config.t5_max_distance > half, words)


def check_even(config: PreTrainedConfig, field: str) -> None:
    """Check that the size is even which the position method in this field halves."""
    method = METHODS[getattr(config, field)]
    if method.even is not None:
        holds = getattr(config, method.even) % 2 == 0
        require(config, method.even, holds, f"even for {field}={method.name!r}")


def require(config: PreTrainedConfig, name: str, holds: bool, words: str) -> None:
    """Raise a ValueError about one field, by the family's own name, unless its rule holds."""
    if not holds:
        name, value = config.attribute_map.get(name, name), getattr(config, name)
        raise ValueError(f"{type(config).__name__}: {name} must be {words}, got {_show(value)}")


def _show(value: object) -> str:
    """A value for an error; Python refuses to write out integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "an integer of 19 digits or more"
    return repr(value)
