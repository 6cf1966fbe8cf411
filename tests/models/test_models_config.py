"""The configurations of both families: what is filled in, and every refusal."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from linbias.models import LinbiasConfig, install
from linbias.paper.config import PaperConfig
from small_models import settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be an integer of at least 1, got 0"),
        (
            {"num_hidden_layers": 2.0},
            r"num_hidden_layers must be an integer of at least 1, got 2\.0",
        ),
        ({"num_attention_heads": True}, r"num_attention_heads must be an integer .* got True"),
        ({"train_length": -1}, r"train_length must be an integer of at least 1, got -1"),
        ({"intermediate_size": 0}, r"intermediate_size must be an integer of at least 1, got 0"),
        ({"hidden_size": 30}, r"hidden_size must be a multiple of 4 heads, got 30"),
        ({"head_size": 0}, r"head_size must be an integer of at least 1, got 0"),
        ({"head_size": 10**6}, r"head_size must be at most 16384, got 1000000"),
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads must be a multiple of 3 key/value heads, got 4",
        ),
        (
            {"num_key_value_heads": 0},
            r"num_key_value_heads must be an integer of at least 1, got 0",
        ),
        (
            {"hidden_size": 12, "position": "rotary"},
            r"head_size must be even for position='rotary', got 3",
        ),
        (
            {"hidden_size": 5, "num_attention_heads": 1, "position": "sinusoidal"},
            r"hidden_size must be even for position='sinusoidal', got 5",
        ),
        ({"position": "rope"}, r"position must be one of \('alibi', .* got 'rope'"),
        ({"block": "serial"}, r"block must be one of \('sequential', .*, got 'serial'"),
        ({"slope_schedule": "steep"}, r"slope_schedule must be one of \('paper', .* got 'steep'"),
        (
            {"slope_scale": 0.0},
            r"slope_scale must be None, 'interpolate' or a positive number, got 0",
        ),
        ({"slope_scale": "half"}, r"slope_scale must be None, .* got 'half'"),
        ({"slope_scale": math.nan}, r"slope_scale must be None, .* got nan"),
        ({"rotary_base": -1.0}, r"rotary_base must be a positive number, got -1"),
        ({"layer_norm_eps": 0.0}, r"layer_norm_eps must be a positive number, got 0"),
        ({"initializer_range": math.inf}, r"initializer_range must be a positive number, got inf"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout must be a number in \[0, 1\), got 1"),
        (
            {"attention_dropout": "a"},
            r"attention_dropout must be a number in \[0, 1 - 2\^-32\], got 'a'",
        ),
        (
            {"attention_dropout": 1 - 2.0**-33},
            r"attention_dropout must be a number in \[0, 1 - 2\^-32\], got 0.99",
        ),
        ({"t5_num_buckets": 1}, r"t5_num_buckets must be at least 2, got 1"),
        (
            {"t5_max_distance": 16},
            r"t5_max_distance must be above half of t5_num_buckets, 16, got 16",
        ),
        ({"use_cache": None}, r"use_cache must be True or False, got None"),
        ({"tie_word_embeddings": "x"}, r"tie_word_embeddings must be True or False, got 'x'"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers must be at most 2048, got 1000000"),
        ({"hidden_size": 2**30}, r"hidden_size must be at most 131072, got 1073741824"),
        ({"vocab_size": 2**40}, r"vocab_size must be at most 16777216, got 1099511627776"),
        ({"train_length": 10**5000}, r"train_length must be at most 1073741824, got an integer"),
        ({"rotary_base": 10**400}, r"rotary_base must be a positive number, got an integer"),
        ({"slope_schedule": ["paper"]}, r"slope_schedule must be one of .* got \['paper'\]"),
        ({"slope_schedule": {}}, r"slope_schedule must be one of .* got {}"),
        ({"id2label": "x"}, r"id2label must be None or a mapping, got 'x'"),
        ({"dtype": "os"}, r"dtype must be None or the name of a dtype of PyTorch, got 'os'"),
        ({"dtype": 3}, r"dtype must be None or the name of a dtype of PyTorch, got 3"),
        ({"attention_implementation": ""}, r"attention_implementation must be the name .* got ''"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="LinbiasConfig: " + message):
        settings(**changes)


def test_unknown_fields_are_refused_in_python_and_kept_of_a_file(tmp_path) -> None:
    with pytest.raises(
        TypeError,
        match=r"^LinbiasConfig: there is no field num_layers; did you mean num_hidden_layers\?",
    ):
        settings(num_layers=2)
    with pytest.raises(
        TypeError, match=r"^PaperConfig: there is no field wings; there are activation_dropout, "
    ):
        PaperConfig(wings=2)
    config = settings(
        num_labels=3, bos_token_id=2, torch_dtype="float64", attn_implementation="sdpa"
    )
    assert config.num_labels == 3 and config.bos_token_id == 2 and config.dtype == torch.float64
    config.written_by = "somebody else"
    config.save_pretrained(tmp_path)
    install()
    for family in (AutoConfig, LinbiasConfig):
        assert family.from_pretrained(tmp_path).written_by == "somebody else"
        assert "_of_a_file" not in family.from_pretrained(tmp_path).to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


def test_settings_left_open_are_filled_in() -> None:
    assert settings().num_key_value_heads == 4
    assert settings(block="parallel").num_key_value_heads == 1
    assert settings(block="parallel", num_key_value_heads=2).num_key_value_heads == 2
    assert settings().intermediate_size == 128
    assert settings(block="parallel_fused").num_key_value_heads == 1
    assert settings().head_size == 8 and settings(hidden_size=30, head_size=5).head_size == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 20}, "hidden_size must be a multiple of 8 heads, got 20"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"position": "learned"}, "position must be one of .*, got 'learned'"),
        (
            {"cutoffs": (60000, 20000)},
            "bands of 2 or more, or .. for one band, got .60000, 20000.",
        ),
        ({"cutoffs": (20000, 267743)}, "cutoffs must be ids that cut .0, 267744. into bands"),
        ({"cutoffs": "20000"}, "cutoffs must be ids that cut .* got '20000'"),
        ({"adaptive_factor": 0}, "adaptive_factor must be a positive number, got 0"),
        ({"adaptive_factor": 40.0}, "a factor that leaves 3 bands of 1024 a width, got 40.0"),
        ({"adaptive_factor": 1e200}, "a factor that leaves 3 bands of 1024 a width, got 1e.200"),
        ({"adaptive_factor": 1e-200}, "a factor that leaves 3 bands of 1024 a width, got 1e-200"),
        (
            {"pad_token_id": 20000, "cutoffs": (20000, 60000)},
            r"pad_token_id must be in \[0, 20000\)",
        ),
        (
            {"pad_token_id": None},
            r"pad_token_id must be in \[0, 20000\), the smallest band, got None",
        ),
        ({"use_cache": "no"}, "use_cache must be True or False, got 'no'"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"softmax_dropout": "0"}, r"softmax_dropout must be a number in \[0, 1\), got '0'"),
        ({"final_norm": 1}, "final_norm must be True or False, got 1"),
        ({"slope_schedule": "steep"}, "slope_schedule must be one of .*, got 'steep'"),
        ({"slope_scale": -1}, "slope_scale must be None, 'interpolate' or a positive number"),
        ({"attention_implementation": None}, "must be the name of an implementation, got None"),
        (
            {"position": "rotary", "hidden_size": 24},
            "head_size must be even for position='rotary', got 3",
        ),
        ({"position": "sinusoidal", "hidden_size": 2, "num_attention_heads": 1}, "at least 4"),
        ({"t5_max_distance": 16}, "t5_max_distance must be above half of t5_num_buckets, 16"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 2048, got 1000000"),
        ({"cutoffs": tuple(range(2, 200, 2)), "adaptive_factor": 1.0}, "64 bands at most, got"),
        ({"adaptive_factor": 1e-3}, "a factor that leaves 3 bands of 1024 a width, got 0.001"),
        ({"id2label": "x"}, "id2label must be None or a mapping, got 'x'"),
    ],
    ids=str,
)
def test_bad_settings_of_the_paper_are_named(changes, message):
    with pytest.raises(ValueError, match=f"PaperConfig: .*{message}"):
        PaperConfig(**changes)
