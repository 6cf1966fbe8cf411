"""What another value of each field of a configuration does, for every family that `load` reads.

A field is read (the loaded model computes otherwise), refused (an error names it, or the weights
that it does not fit), or changes nothing for one of the reasons below: none is passed over.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedConfig,
)
from transformers.models.mpt.configuration_mpt import MptAttentionConfig

from linbias.models import load
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.decoder.config import LinbiasConfig, LinbiasSeq2SeqConfig
from linbias.models.decoder.linbias import LinbiasForCausalLM
from linbias.models.decoder.seq2seq import LinbiasForConditionalGeneration
from linbias.models.encoders import original
from linbias.models.encoders.bert import LinbiasBertForMaskedLM
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.families import families
from linbias.models.fused.mpt_model import (
    LinbiasMptAttentionConfig,
    LinbiasMptConfig,
    LinbiasMptForCausalLM,
)
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from small_models import write_folder
from test_transformers_encoders import original_config, original_weights

pytestmark = pytest.mark.usefixtures("same_start")

READ, REFUSED = "read", "refused"
# Why a field changes nothing of what a loaded model computes:
TRAINING = "acts in training alone"
FRESH = "of weights that nobody loaded"
TOLD = "what a call returns beside it, or what others are told"
TEXT = "read by generate, tokenizers and losses"
WAY = "how it is computed, not what"
LENGTH = "read by slope_scale='interpolate' alone"
OTHER = "of a part that a model with these fields does not have"
UNREAD = "not read by the original's code"
BESIDE = "layer_norm_epsilon, which stands beside it, is the same"
GIVEN = "said by load, or found in the weights"

Fields = dict[str, tuple[Any, str]]  # another value, and what it does


def each(names: str, value: Any, effect: str) -> Fields:
    return dict.fromkeys(names.split(), (value, effect))


# What changes nothing in any family, unless it says otherwise; some have not all of them.
COMMON: Fields = {
    **each("transformers_version", "1.0", TOLD),
    **each("architectures", ["Other"], UNREAD),
    **each("output_hidden_states is_encoder_decoder", True, TOLD),
    **each("return_dict use_cache", False, TOLD),
    **each("dtype torch_dtype", "bfloat16", GIVEN),
    **each("chunk_size_feed_forward", 2, WAY),
    **each("id2label", {"0": "a"}, TEXT),
    **each("label2id", {"a": 0}, TEXT),
    **each("problem_type", "regression", TEXT),
    **each("bos_token_id eos_token_id pad_token_id", 5, TEXT),
    **each("attention_implementation", "dense", WAY),
    **each("initializer_range", 0.5, FRESH),
    **each("attention_dropout hidden_dropout classifier_dropout", 0.5, TRAINING),
    **each("resid_pdrop embd_pdrop attn_pdrop emb_pdrop", 0.5, TRAINING),
    **each("gradient_checkpointing", True, WAY),
}
OURS: Fields = {
    **each("vocab_size hidden_size num_hidden_layers", 24, REFUSED),
    **each("num_attention_heads", 2, READ),
    **each("slope_schedule", "halving", READ),
    **each("slope_scale layer_norm_eps", 0.5, READ),
    **each("train_length", 4096, LENGTH),
}
METHODS: Fields = {
    **each("position", "rotary", READ),
    **each("rotary_base t5_num_buckets t5_max_distance", 64, OTHER),
}
NATIVE: Fields = {
    **OURS,
    **METHODS,
    **each("num_attention_heads", 2, REFUSED),
    **each("num_key_value_heads head_size intermediate_size", 16, REFUSED),
    **each("encoder_position", "none", READ),
    **each("window", 64, OTHER),
    **each("block", "parallel", REFUSED),
    **each("tie_word_embeddings", False, REFUSED),
}
SEQ2SEQ: Fields = {
    **NATIVE,
    **each("decoder_layers", 1, REFUSED),
    **each("is_encoder_decoder", False, REFUSED),
    **each("decoder_start_token_id bos_token_id", 5, TEXT),
}
PAPER: Fields = {
    **OURS,
    **METHODS,
    **each("intermediate_size adaptive_factor", 24, REFUSED),
    **each("cutoffs", [30], REFUSED),
    **each("dropout activation_dropout softmax_dropout", 0.5, TRAINING),
    **each("final_norm", True, REFUSED),
    **each("ignore_tail_pad", False, TEXT),
}
BLOOM: Fields = {
    **each("vocab_size hidden_size n_layer", 24, REFUSED),
    **each("n_head", 2, READ),
    **each("layer_norm_epsilon", 0.5, READ),
    **each("apply_residual_connection_post_layernorm", True, READ),
    **each("pretraining_tp", 2, WAY),
    **each("slow_but_exact", True, WAY),
    **each("tie_word_embeddings", False, REFUSED),
    # Of the released folders; Transformers' class, which is the original, reads none.
    **each("attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion", False, UNREAD),
    **each("skip_bias_add skip_bias_add_qkv", False, UNREAD),
    **each("offset_alibi n_inner unk_token_id", 3, UNREAD),
    **each("seq_length", 3, LENGTH),
}
FALCON: Fields = {
    **each("vocab_size hidden_size num_hidden_layers ffn_hidden_size", 24, REFUSED),
    **each("num_attention_heads", 2, READ),
    **each("num_kv_heads", 2, OTHER),
    **each("num_ln_in_parallel_attn", 1, OTHER),
    **each("layer_norm_epsilon", 0.5, READ),
    **each("alibi", False, READ),
    **each("new_decoder_architecture multi_query parallel_attn", True, REFUSED),
    **each("bias tie_word_embeddings", False, REFUSED),
    **each("max_position_embeddings", 64, LENGTH),
    **each("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}, OTHER),
    **each("activation", "relu", READ),
}
MPT: Fields = {
    **each("d_model n_layers vocab_size", 24, REFUSED),
    **each("n_heads", 2, READ),
    **each("expansion_ratio", 2, REFUSED),
    **each("max_seq_len", 64, LENGTH),
    **each("embedding_fraction attn_config.attn_pdrop", 0.5, TRAINING),
    **each("layer_norm_epsilon logit_scale attn_config.softmax_scale", 0.5, READ),
    **each("learned_pos_emb", True, OTHER),
    **each("init_device", "meta", FRESH),
    **each("no_bias tie_word_embeddings attn_config.alibi attn_config.fused_qkv", False, REFUSED),
    **each("norm_type", "rmsnorm", REFUSED),
    **each("attn_config", {"alibi": False}, REFUSED),
    **each("attn_config.attn_type", "multiquery_attention", REFUSED),
    **each("attn_config.attn_impl", "flash", WAY),
    **each("attn_config.clip_qkv", 1, READ),
    **each("attn_config.prefix_lm attn_config.qk_ln attn_config.qk_gn", True, REFUSED),
    **each("attn_config.attn_uses_sequence_id", True, "read where a call gives sequence_id"),
    **each("attn_config.alibi_bias_max", 4, READ),
    # Of llm-foundry.
    **each("attn_config.rope attn_config.nope", True, REFUSED),
    **each("attn_config.sliding_window_size attn_config.attn_logit_softcapping", 4, REFUSED),
    **each("attn_config.kv_dim", 4, REFUSED),
    **each("ffn_config", {"ffn_type": "mptglu"}, REFUSED),
    **each("norm_eps", 0.5, BESIDE),
    **each("block_overrides", {"order": []}, REFUSED),
    **each("final_logit_softcapping", 30.0, REFUSED),
    **each("verbose", 2, TOLD),
    **each("use_pad_tok_in_ffn", False, WAY),
}
LLM_FOUNDRY: Fields = {
    **MPT,
    **each("norm_eps", 0.5, READ),
    **each("attn_config.kv_n_heads", 2, OTHER),
}
BAICHUAN: Fields = {
    **each("vocab_size hidden_size num_hidden_layers intermediate_size", 24, REFUSED),
    **each("num_attention_heads", 2, READ),
    **each("hidden_act", "relu", READ),
    **each("model_max_length", 64, LENGTH),
    **each("rms_norm_eps slope_scale", 0.5, READ),
    **each("normalize_head", True, READ),
    **each("tie_word_embeddings", True, REFUSED),
    **each("max_position_embeddings", 64, REFUSED),
    **each("z_loss_weight", 0.1, REFUSED),
}
ENCODER: Fields = {
    **OURS,
    **each("intermediate_size", 24, REFUSED),
    **each("type_vocab_size", 4, REFUSED),
    **each("hidden_act feed_forward_act", "relu", READ),
    **each("gate_first", False, READ),
    **each("query_key_norm residual_norm", True, REFUSED),
    **each("pooler", True, GIVEN),
    **each("head_norm_eps", 0.5, READ),
    **each("tie_word_embeddings", False, REFUSED),
}
ORIGINAL: Fields = {
    **each("vocab_size hidden_size num_hidden_layers intermediate_size", 24, REFUSED),
    **each("type_vocab_size", 4, REFUSED),
    **each("num_attention_heads", 2, READ),
    **each("hidden_act", "relu", READ),
    **each("layer_norm_eps", 0.5, READ),
    **each("hidden_dropout_prob attention_probs_dropout_prob", 0.5, TRAINING),
    **each("max_position_embeddings alibi_starting_size", 2048, LENGTH),
    **each("use_cache", True, WAY),
    **each("is_decoder add_cross_attention", True, REFUSED),
    **each("pruned_heads", {"0": [1]}, REFUSED),
    **each("tie_word_embeddings", False, GIVEN),
}
JINA: Fields = {
    **ORIGINAL,
    **each("position_embedding_type", "absolute", REFUSED),
    **each("feed_forward_type", "geglu", READ),
    **each("emb_pooler", "cls", "read by embed's pooling"),
    **each("attn_implementation", "torch", WAY),
}
MOSAIC = ORIGINAL | each("position_embedding_type", "alibi", UNREAD)

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 48}
PLAIN = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OF_FALCON = {**SIZES, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
OF_MPT = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4}
OF_FOUNDRY = {**OF_MPT, "no_bias": True, "logit_scale": 2.0, "attn_config": {"alibi": True}}
OF_PAPER = {**WIDE, "cutoffs": (20,), "adaptive_factor": 2}

# By family: its configuration classes, a small model, and its fields.
SUBJECTS: dict[str, tuple[tuple[type[PreTrainedConfig], ...], Callable[[], Any], Fields]] = {
    "bloom": ((BloomConfig,), lambda: BloomForCausalLM(BloomConfig(**PLAIN)), BLOOM),
    "falcon": ((FalconConfig,), lambda: FalconForCausalLM(FalconConfig(**OF_FALCON)), FALCON),
    "mpt": ((MptConfig, MptAttentionConfig), lambda: MptForCausalLM(MptConfig(**OF_MPT)), MPT),
    "mpt of llm-foundry": (
        (LinbiasMptConfig, LinbiasMptAttentionConfig),
        lambda: LinbiasMptForCausalLM(LinbiasMptConfig(**OF_FOUNDRY)),
        LLM_FOUNDRY,
    ),
    "baichuan": ((BaichuanConfig,), lambda: BaichuanForCausalLM(BaichuanConfig(**WIDE)), BAICHUAN),
    "linbias": ((LinbiasConfig,), lambda: LinbiasForCausalLM(LinbiasConfig(**SIZES)), NATIVE),
    "linbias-seq2seq": (
        (LinbiasSeq2SeqConfig,),
        lambda: LinbiasForConditionalGeneration(LinbiasSeq2SeqConfig(**SIZES, bos_token_id=2)),
        SEQ2SEQ,
    ),
    "linbias-paper": ((PaperConfig,), lambda: PaperForCausalLM(PaperConfig(**OF_PAPER)), PAPER),
    "linbias_bert": (
        (LinbiasBertConfig,),
        lambda: LinbiasBertForMaskedLM(LinbiasBertConfig(**WIDE)),
        ENCODER,
    ),
    "jina-embeddings-v2": ((), lambda: "jina", JINA),
    "jina-embeddings-v2-code": ((), lambda: "jina-code", JINA),
    "MosaicBERT or DNABERT-2": ((), lambda: "mosaic", MOSAIC),
}


def write(family: str, folder: Path) -> dict[str, Any]:
    """A folder of a family, with large weights; the contents of its config.json."""
    made = SUBJECTS[family][1]()
    if isinstance(made, str):
        config = original_config(made)
        write_folder(folder, config, original_weights(made))
        return config
    for name, p in made.named_parameters():
        if "slopes" not in name:
            nn.init.normal_(p, std=0.3)
    made.save_pretrained(folder)
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


@torch.no_grad()
def answers(folder: Path, family: str) -> Tensor | None:
    """What a folder's model computes; None if it is refused."""
    is_encoder = "bert" in family.lower() or "jina" in family
    try:
        model: Any = load(folder, task="masked" if is_encoder else None, device="cpu")
        given = {"input_ids": torch.arange(22).view(2, 11)}
        if family == "linbias-seq2seq":
            given["decoder_input_ids"] = given["input_ids"]
        first: Tensor = model(**given)[0]
    except (ValueError, AttributeError):  # of a Falcon that Transformers builds and cannot run
        return None
    return first


def changed(settings: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    if inner:
        value = {**settings[outer], inner: value}
    return {**settings, outer: value}


@pytest.mark.thorough
@pytest.mark.parametrize("family", SUBJECTS)
def test_every_field_does_what_is_said_of_it(family: str, tmp_path: Path) -> None:
    settings = write(family, tmp_path)
    expected = answers(tmp_path, family)
    assert expected is not None
    wrong = {}
    for name, (value, effect) in (COMMON | SUBJECTS[family][2]).items():
        (tmp_path / "config.json").write_text(json.dumps(changed(settings, name, value)))
        found = answers(tmp_path, family)
        same = found is not None and torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        does = REFUSED if found is None else "nothing" if same else READ
        if does != (effect if effect in (READ, REFUSED) else "nothing"):
            wrong[name] = does, effect
    assert not wrong


# Numbers that nothing reads, or of which the tables above say that all but one are refused.
NOT_READ = {
    *("unk_token_id", "verbose", "chunk_size_feed_forward", "embedding_fraction"),
    *("attn_config.sliding_window_size", "attn_config.attn_logit_softcapping"),
}
# The names under which ours say it.
RENAMED = {
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "alibi_starting_size": "train_length",
    "layer_norm_epsilon": "norm_eps",
}


@pytest.mark.parametrize("family", SUBJECTS)
def test_numbers_of_which_no_number_can_come_are_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    settings, loaded = write(family, tmp_path), []
    kinds, _, fields = SUBJECTS[family]
    known = set(settings) | {field.name for kind in kinds for field in dataclasses.fields(kind)}
    common = {name: value for name, value in COMMON.items() if name in known}
    for name, (usual, effect) in (common | fields | each("num_labels", 5, TEXT)).items():
        is_number = isinstance(usual, int | float) and not isinstance(usual, bool)
        if not is_number or effect in (UNREAD, OTHER, BESIDE) or name in NOT_READ:
            continue
        if name == "max_position_embeddings" and not kinds:  # an original reads another field
            continue
        for wrong in (math.nan, math.inf, -1, 1e39, 2**200):
            text = json.dumps(changed(settings, name, wrong))
            (tmp_path / "config.json").write_text(text)
            try:
                load(tmp_path, device="cpu")
                loaded.append((name, wrong, ""))
            except ValueError as error:
                names = (name.rpartition(".")[2], RENAMED.get(name, name))
                if not any(short in str(error) for short in names):
                    loaded.append((name, wrong, str(error)))
    assert not loaded


def test_mosaicbert_has_gelu_between_its_layers_whatever_its_head_has() -> None:
    config = original.read_config(original_config("mosaic", hidden_act="relu"), "mosaic")
    assert (config.hidden_act, config.feed_forward_act) == ("relu", "gelu")


def test_no_field_and_no_family_is_left_out(tmp_path: Path) -> None:
    assert {family.name for family in families()} <= set(SUBJECTS)
    missing = {}
    for family, (kinds, _, fields) in SUBJECTS.items():
        listed = {name.rpartition(".")[2] for name in (COMMON | fields)}
        asked = set(write(family, tmp_path / family)) | {
            field.name for kind in kinds for field in dataclasses.fields(kind)
        }
        missing[family] = asked - listed - {"model_type", "_name_or_path"}
    assert not {family: names for family, names in missing.items() if names}
