"""Models from GGUF files, held against llama.cpp.

Its numbers are those of llama-cpp-python 0.3.36 with float32 caches, for files of the writer here.
Its GELU reads a table in float16; without it (`jais`, `baichuan`) the rest is rounding.
"""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import BertTokenizer

import gguf_files
from gguf_files import LAYERS, VOCAB, Metadata, Tensors, rounded, write
from linbias.models import convert, embed, load, load_tokenizer

pytestmark = pytest.mark.usefixtures("same_start")

IDS = torch.tensor([[(7 * i * i + 3 * i + 1) % VOCAB for i in range(29)]])
# The first logits of the last token, or numbers of its vector, and the largest of all.
LLAMA_CPP = {
    "bloom": ([4.1466, -3.5213, 0.58951, -4.6857, -8.2094, 1.1191, -15.124, 4.5026], 37.3),
    "mpt": ([4.9584, 5.2696, -4.0391, -15.879, 3.726, 17.569, 6.6488, -19.268], 33.4),
    "mpt-grouped": (
        [-0.73777, -0.068564, -1.1796, -1.4818, -2.1366, 0.019657, -0.56803, 0.86182],
        4.1,
    ),
    "jais": ([-0.24249, 1.5202, 0.42222, 0.93467, 0.62225, 0.33483, -0.15464, -0.08325], 4.18),
    "baichuan": (
        [0.23254, 0.66504, 0.74656, 0.45145, -1.0442, 0.28624, -1.4032, -0.76642],
        2.87,
    ),
    "jina-bert-v2": (
        [0.50569, -0.11728, -0.23746, 0.93157, 0.24138, -0.023086, 1.0305, 1.4466],
        3.45,
    ),
    "jina-bert-v2-code": (
        [-0.38292, 0.77414, 1.2671, -0.74247, -0.46872, -0.17032, 0.60249, -0.078056],
        6.02,
    ),
}


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    """Logits, or hidden states, of a text [T, N]."""
    return model(IDS)[0][0]


def read(path: Path, dtype: Any = None) -> Any:
    return load(path, device="cpu", dtype=dtype)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_outputs_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    found = outputs(read(write(tmp_path / "model.gguf", *gguf_files.model(name))))
    expected, largest = LLAMA_CPP[name]
    most = 1e-5 if name in ("jais", "baichuan") else 1e-3
    assert (found[-1, :8] - torch.tensor(expected)).abs().max() < most * largest


@pytest.mark.parametrize("matrices", ["F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", ["bloom", "jais", "jina-bert-v2"])
def test_every_type_is_read_to_the_last_bit(name: str, matrices: str, tmp_path: Path) -> None:
    metadata, tensors = gguf_files.model(name)
    model = read(write(tmp_path / "a.gguf", metadata, tensors, matrices), torch.float32)
    for key, tensor in tensors.items():
        if tensor.dim() == 2 and key != "token_types.weight":
            tensors[key] = rounded(tensor, matrices)
    expected = read(write(tmp_path / "b.gguf", metadata, tensors)).state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float32}[matrices]
    assert read(tmp_path / "a.gguf").dtype == stored
    once = read(tmp_path / "a.gguf", "bfloat16").state_dict()
    for key, tensor in expected.items():
        kept = tensor if "slopes" in key else tensor.bfloat16()
        torch.testing.assert_close(once[key], kept, rtol=0, atol=0)


def test_an_output_that_is_written_twice_is_the_embedding(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.model("bloom")
    tensors["output.weight"] = tensors["token_embd.weight"].clone()
    twice = read(write(tmp_path / "twice.gguf", metadata, tensors))
    assert twice.lm_head.weight is twice.transformer.word_embeddings.weight
    tensors["output.weight"][0] *= 2
    apart = read(write(tmp_path / "apart.gguf", metadata, tensors))
    assert not apart.config.tie_word_embeddings
    expected = outputs(twice)
    expected[:, 0] *= 2
    torch.testing.assert_close(outputs(apart), expected)


@pytest.mark.parametrize("name", ["jina-bert-v2", "jina-bert-v2-code"])
def test_a_gate_in_one_tensor_lies_as_in_the_original_folder(name: str, tmp_path: Path) -> None:
    metadata, tensors = gguf_files.model(name)
    expected = outputs(read(write(tmp_path / "apart.gguf", metadata, tensors)))
    for layer in range(LAYERS):
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up"))
        parts = (up, gate) if name.endswith("code") else (gate, up)
        tensors[f"blk.{layer}.ffn_up.weight"] = torch.cat(parts)
    found = outputs(read(write(tmp_path / "together.gguf", metadata, tensors)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mpt-grouped", "jais", "jina-bert-v2-code"])
def test_what_was_loaded_can_be_saved_as_a_folder(name: str, tmp_path: Path) -> None:
    model = read(write(tmp_path / "model.gguf", *gguf_files.model(name)))
    model.save_pretrained(tmp_path / "folder")
    expected = outputs(read(tmp_path / "folder"))
    torch.testing.assert_close(outputs(model), expected, rtol=0, atol=0)


def test_options_of_load_act_on_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", *gguf_files.model("bloom"))
    halved = load(path, device="cpu", task="base", slope_scale=0.5)
    assert type(halved).__name__ == "BloomModel"
    whole = load(path, device="cpu", task="base")
    assert not torch.allclose(outputs(halved), outputs(whole), rtol=1e-3)


TEXTS = ["It's 12345, and   spaces\n\t(stop)... naïve 你好。सलाम।", " don't ", "a b a b a b c"]


def byte_pairs(pre: str, pre_tokenizer: Any) -> tuple[Tokenizer, Metadata]:
    """A tokenizer, and what a file says of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    return tokenizer, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
        "tokenizer.ggml.eos_token_id": 0,
    }


def bloom_words() -> Any:
    words = Regex(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), to_bytes])


def gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(("pre", "words"), [("bloom", bloom_words), ("mpt", gpt2_words)])
def test_byte_pairs_are_cut_as_in_the_original(
    pre: str, words: Callable[[], Any], tmp_path: Path
) -> None:
    original, metadata = byte_pairs(pre, words())
    path = write(tmp_path / "model.gguf", *gguf_files.model("bloom", **metadata))
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == original.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "</s>"


def test_a_file_of_an_encoder_embeds_texts(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "near", "##by", "far", "##ther", ","]
    marked = [f"▁{word}" if word[0] != "#" else word[2:] for word in words]
    metadata, tensors = gguf_files.model(
        "jina-bert-v2",
        **{
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": words[:5] + marked[5:],
            "tokenizer.ggml.token_type": [3] * 5 + [1] * 5,
        },
    )
    path = write(tmp_path / "model.gguf", metadata, tensors)
    original = BertTokenizer({word: number for number, word in enumerate(words)})
    texts = ["nearby", "Farther, near far", "unknown"]
    tokenizer = load_tokenizer(path)
    for text in texts:
        assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    model = read(path)
    with torch.no_grad():
        ids = torch.tensor([original(texts[1])["input_ids"]])
        expected = model(ids).last_hidden_state[0].mean(0)
    found = torch.tensor(embed(path, texts, device="cpu").vectors[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def changed(**changes: Any) -> Callable[[Path], None]:
    """A BLOOM with other metadata: `__` stands for a dot; None takes a value out."""
    kind = changes.pop("name", "bloom")

    def make(path: Path) -> None:
        metadata, tensors = gguf_files.model(kind)
        for name, value in changes.items():
            key = f"{metadata['general.architecture']}.{name.replace('__', '.')}"
            metadata.pop(key, None)
            metadata |= {} if value is None else {key: value}
        write(path, metadata, tensors)

    return make


def with_values(**values: Any) -> Callable[[Path], None]:
    named = {name.replace("__", "."): value for name, value in values.items()}
    return lambda path: write(path, *gguf_files.model("bloom", **named))


def with_tensors(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        metadata, tensors = gguf_files.model("bloom")
        change(tensors)
        write(path, metadata, tensors)

    return make


def with_type(number: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write(path, *gguf_files.model("bloom"))
        before = b"blk.0.attn_qkv.weight" + struct.pack("<IQQI", 2, 96, 288, 0)
        content = path.read_bytes()
        assert content.count(before) == 1
        path.write_bytes(content.replace(before, before[:-4] + struct.pack("<I", number)))

    return make


def cut(path: Path) -> None:
    write(path, *gguf_files.model("bloom"))
    path.write_bytes(path.read_bytes()[:-1000])


REFUSED = [
    (
        with_values(general__architecture="llama"),
        "general.architecture must be one with ALiBi that is known (bloom, mpt, jais, baichuan, "
        "jina-bert-v2), got 'llama'",
    ),
    (
        with_values(general__architecture="falcon"),
        "got 'falcon' (in GGUF files it has rotary positions only)",
    ),
    (with_values(general__architecture=["bloom"]), "general.architecture must be"),
    (with_values(split__count=3), "split.count must be 1, got 3: `llama-gguf-split --merge`"),
    (with_type(2), "blk.0.attn_qkv.weight must be F32, F16, BF16 or Q8_0, got Q4_0"),
    (with_type(14), "blk.0.attn_qkv.weight must be F32, F16, BF16 or Q8_0, got Q6_K"),
    (with_type(6), "tensors must be F32, F16, BF16 or Q8_0, got Q5_0"),
    (with_type(99), "tensors must be F32, F16, BF16 or Q8_0, got type 99"),
    (cut, "the file is cut short: it must have "),
    (lambda path: path.write_bytes(b""), "cannot mmap an empty file"),
    (lambda path: path.write_bytes(b"PK" * 99), "does not start with the GGUF magic bytes"),
    (changed(block_count=None), "bloom.block_count must be a positive whole number, got nothing"),
    (changed(block_count=2.0), "bloom.block_count must be a positive whole number, got 2.0"),
    (
        changed(attention__layer_norm_epsilon=None),
        "bloom.attention.layer_norm_epsilon must be a number, got nothing",
    ),
    (
        changed(attention__head_count_kv=2),
        "bloom.attention.head_count_kv must be attention.head_count = 6, got 2",
    ),
    (
        changed(name="baichuan", block_count=32),
        "baichuan.block_count must be 40, as in the models with ALiBi, got 32",
    ),
    (
        changed(name="mpt", attention__max_alibi_bias=None),
        "an MPT model must have attn_config.alibi = True, got False",
    ),
    (
        changed(name="jais", attention__max_alibi_bias=None),
        "jais.attention.max_alibi_bias must be a number, got nothing",
    ),
    (
        with_tensors(lambda tensors: tensors.pop("token_embd.weight")),
        "the file must hold token_embd.weight, which it lacks",
    ),
    (
        with_tensors(lambda tensors: tensors.pop("blk.1.ffn_up.bias")),
        "must fit its metadata, but lacks transformer.h.1.mlp.dense_h_to_4h.bias (1 in all)",
    ),
    (
        with_tensors(lambda tensors: tensors.update({"blk.0.more.weight": torch.ones(3)})),
        "must fit its metadata, but has unknown weights: blk.0.more.weight (1 in all)",
    ),
    (
        with_tensors(lambda tensors: tensors["output_norm.bias"].fill_(torch.nan)),
        "transformer.ln_f.bias must hold finite numbers, got NaN",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_bad_files_are_refused_in_words(
    make: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(tmp_path / "model.gguf", device="cpu")
    assert str(caught.value).startswith("load: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", *gguf_files.model("bloom"))
    content = path.read_bytes()
    for length in [*range(0, 1200, 17), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"load: cannot read a model at .*model\.gguf"):
            load(path, device="cpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "model must be 'gpt2' or 'bert', got 'llama'"),
        ({"tokenizer.ggml.model": "no_vocab"}, "must be 'gpt2' or 'bert', got 'no_vocab'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "jina-v2-code"},
            "pre must be one of ('gpt-2', 'mpt', 'jais', 'bloom'), got 'jina-v2-code'; the",
        ),
        ({"tokenizer.ggml.model": "gpt2"}, "('gpt-2', 'mpt', 'jais', 'bloom'), got None; the"),
    ],
)
def test_tokenizers_that_would_cut_elsewhere_are_refused(
    values: Metadata, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", *gguf_files.model("bloom", **values))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith("load_tokenizer: ")


def test_a_path_without_a_file_and_a_file_to_convert_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"load: folder must be a folder or a file, got '.*gguf'"):
        load(path)
    write(path, *gguf_files.model("jina-bert-v2"))
    with pytest.raises(ValueError, match=r"with a config.json, got '.*' \(name one of its GGUF"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"convert: folder must be a folder, got the file"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
