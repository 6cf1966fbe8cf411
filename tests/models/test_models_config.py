"""The configurations of all families: what is filled in, and every refusal."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from linbias.models import LinbiasConfig, LinbiasSeq2SeqConfig, install
from linbias.models.decoder.baichuan import BaichuanConfig
from linbias.paper.config import PaperConfig
from small_models import settings

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL: dict[Any, dict[str, Any]] = {
    LinbiasConfig: SIZES,
    LinbiasSeq2SeqConfig: {},
    PaperConfig: {},
    BaichuanConfig: {**SIZES, "intermediate_size": 64},
}
COUNT = "an integer of at least 1, got"
LIMIT = "a number in [0, 1 - 2^-32], got"
LAYERS = ("num_hidden_layers", 10**6, "at most 2048, got 1000000")
BANDS = "a factor that leaves 3 bands of 1024 a width, got"
LABELS = ("id2label", "x", "None or a mapping, got 'x'")
# By configuration: a field, a value, and what the error says that it must be.
REFUSED: dict[Any, list[tuple[str, Any, str]]] = {
    LinbiasConfig: [
        ("vocab_size", 0, f"{COUNT} 0"),
        ("num_hidden_layers", 2.0, f"{COUNT} 2.0"),
        ("num_attention_heads", True, f"{COUNT} True"),
        ("train_length", -1, f"{COUNT} -1"),
        ("intermediate_size", 0, f"{COUNT} 0"),
        ("head_size", 0, f"{COUNT} 0"),
        ("num_key_value_heads", 0, f"{COUNT} 0"),
        ("window", 0, f"{COUNT} 0"),
        ("hidden_size", 30, "a multiple of 4 heads, got 30"),
        ("head_size", 10**6, "at most 16384, got 1000000"),
        ("position", "rope", "one of ('alibi', "),
        ("encoder_position", "alibi", "None or one of "),
        ("block", "serial", "one of ('sequential', "),
        ("slope_schedule", "steep", "one of ('paper', "),
        ("slope_schedule", ["paper"], "one of "),
        ("slope_schedule", {}, "one of "),
        ("slope_scale", 0.0, "None, 'interpolate' or a positive number of float32, got 0"),
        ("slope_scale", "half", "None, 'interpolate' or a positive number of float32, got 'half'"),
        ("slope_scale", math.nan, "None, 'interpolate' or a positive number of float32, got nan"),
        ("rotary_base", -1.0, "a positive number of float32, got -1"),
        ("rotary_base", 10**400, "a positive number of float32, got an integer"),
        ("layer_norm_eps", 0.0, "a positive number of float32, got 0"),
        ("initializer_range", math.inf, "a positive number of float32, got inf"),
        ("hidden_dropout", 1.0, "a number in [0, 1), got 1"),
        ("attention_dropout", "a", f"{LIMIT} 'a'"),
        ("attention_dropout", 1 - 2.0**-33, f"{LIMIT} 0.99"),
        ("t5_num_buckets", 1, "at least 2, got 1"),
        ("t5_max_distance", 16, "above half of t5_num_buckets, 16, got 16"),
        ("use_cache", None, "True or False, got None"),
        ("tie_word_embeddings", "x", "True or False, got 'x'"),
        LAYERS,
        ("hidden_size", 2**30, "at most 131072, got 1073741824"),
        ("vocab_size", 2**40, "at most 16777216, got 1099511627776"),
        ("train_length", 10**5000, "at most 1073741824, got an integer"),
        LABELS,
        ("dtype", "os", "None or the name of a dtype of PyTorch, got 'os'"),
        ("dtype", 3, "None or the name of a dtype of PyTorch, got 3"),
        ("attention_implementation", "", "the name of an implementation, got ''"),
    ],
    LinbiasSeq2SeqConfig: [
        ("encoder_position", None, "one of "),
        ("block", "parallel", "'sequential' in a sequence-to-sequence model"),
        ("decoder_layers", 0, f"{COUNT} 0"),
        ("decoder_layers", 4096, "at most 2048, got 4096"),
        ("position", "symmetric", "one of "),
        ("is_encoder_decoder", False, "True for this model"),
    ],
    PaperConfig: [
        ("hidden_size", 20, "a multiple of 8 heads, got 20"),
        ("num_hidden_layers", 0, f"{COUNT} 0"),
        ("position", "learned", "one of "),
        ("cutoffs", (20000, 267743), "ids that cut [0, 267744) into bands"),
        ("cutoffs", "20000", "ids that cut "),
        (
            "cutoffs",
            (60000, 20000),
            "ids that cut [0, 267744) into bands of 2 or more, or [] for ",
        ),
        ("adaptive_factor", 0, "a positive number of float32, got 0"),
        ("adaptive_factor", 40.0, f"{BANDS} 40.0"),
        ("adaptive_factor", 1e30, f"{BANDS} 1e+30"),
        ("adaptive_factor", 1e-30, f"{BANDS} 1e-30"),
        ("adaptive_factor", 1e-3, f"{BANDS} 0.001"),
        ("pad_token_id", 20000, "in [0, 20000)"),
        ("pad_token_id", None, "in [0, 20000), the smallest band, got None"),
        ("use_cache", "no", "True or False, got 'no'"),
        ("dropout", 1.0, "a number in [0, 1), got 1.0"),
        ("softmax_dropout", "0", "a number in [0, 1), got '0'"),
        ("final_norm", 1, "True or False, got 1"),
        ("slope_schedule", "steep", "one of "),
        ("slope_scale", -1, "None, 'interpolate' or a positive number"),
        ("attention_implementation", None, "the name of an implementation, got None"),
        ("t5_max_distance", 16, "above half of t5_num_buckets, 16"),
        LAYERS,
        LABELS,
    ],
    BaichuanConfig: [
        ("max_position_embeddings", 4096, "absent: the models of 7B, which have it"),
        ("hidden_size", 50, "a multiple of 4 heads, got 50"),
        ("hidden_act", "exec", "the name of an activation"),
        LAYERS,
        ("normalize_head", 1, "None, True or False, got 1"),
    ],
}


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.__name__)
def test_a_bad_value_is_refused_by_the_name_of_its_field(family: Any) -> None:
    for name, value, rule in REFUSED[family]:
        with pytest.raises(ValueError) as error:
            family.from_dict({**SMALL[family], name: value})
        start = f"{family.__name__}: {name} must be {rule}"
        assert str(error.value).startswith(start), (start, str(error.value))
        shown = "an integer" if isinstance(value, int) and value > 10**18 else repr(value)
        assert f"got {shown}" in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (LinbiasConfig, {"num_key_value_heads": 3}, "num_attention_heads .* of 3 key.*, got 4"),
        (LinbiasConfig, {"hidden_size": 12, "position": "rotary"}, "head_size must be even .*3"),
        (
            LinbiasConfig,
            {"hidden_size": 5, "num_attention_heads": 1, "position": "sinusoidal"},
            "hidden_size must be even for position='sinusoidal', got 5",
        ),
        (
            LinbiasConfig,
            {"encoder_position": "directional", "num_attention_heads": 1},
            "num_attention_heads must be even for encoder_position='directional', got 1",
        ),
        (
            LinbiasConfig,
            {"encoder_position": "t5", "t5_num_buckets": 3},
            "t5_num_buckets must be at least 4 for encoder_position='t5', got 3",
        ),
        (PaperConfig, {"position": "rotary", "hidden_size": 24}, "head_size must be even .*got 3"),
        (
            PaperConfig,
            {"position": "sinusoidal", "hidden_size": 2, "num_attention_heads": 1},
            "at least 4",
        ),
        (
            PaperConfig,
            {"cutoffs": tuple(range(2, 200, 2)), "adaptive_factor": 1.0},
            "64 bands at most, got",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    family: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{family.__name__}: .*{message}"):
        family(**{**SMALL[family], **changes})


def test_unknown_fields_are_refused_in_python_and_kept_of_a_file(tmp_path) -> None:
    meant = "LinbiasConfig: there is no field num_layers; did you mean num_hidden_layers"
    with pytest.raises(TypeError, match=f"^{meant}"):
        settings(num_layers=2)
    with pytest.raises(TypeError, match=r"^PaperConfig: .* wings; there are activation_dr"):
        PaperConfig(wings=2)
    others = {"bos_token_id": 2, "torch_dtype": "float64", "attn_implementation": "sdpa"}
    config = settings(num_labels=3, **others)
    assert config.num_labels == 3 and config.bos_token_id == 2 and config.dtype == torch.float64
    config.written_by = "somebody else"
    config.save_pretrained(tmp_path)
    install()
    for family in (AutoConfig, LinbiasConfig):
        assert family.from_pretrained(tmp_path).written_by == "somebody else"
        assert "_of_a_file" not in family.from_pretrained(tmp_path).to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_settings_left_open_are_filled_in() -> None:
    assert settings().num_key_value_heads == 4 and settings().intermediate_size == 128
    for block in ("parallel", "parallel_fused"):
        assert settings(block=block).num_key_value_heads == 1
    assert settings(block="parallel", num_key_value_heads=2).num_key_value_heads == 2
    assert settings().head_size == 8 and settings(hidden_size=30, head_size=5).head_size == 5


def test_what_configurations_mean_without_saying_it() -> None:
    assert BaichuanConfig(vocab_size=125_696).normalize_head
    assert not BaichuanConfig(vocab_size=64_000).normalize_head
    assert BaichuanConfig(vocab_size=64_000, normalize_head=True).normalize_head
