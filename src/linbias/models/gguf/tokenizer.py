"""The tokenizers of GGUF files that are rebuilt to the last token; all others are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf.reader import read_gguf_metadata

# By `tokenizer.ggml.pre`, where words begin; None: as in GPT-2. Others would be cut elsewhere.
_WORDS = {
    **dict.fromkeys(("gpt-2", "mpt", "jais")),
    "bloom": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
}
_INSTEAD = "; the tokenizer of the original model's folder is the same"


def read_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    kind, words = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "bert":
        return _read_word_pieces(path)
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' or 'bert', got {kind!r}{_INSTEAD}")
    if words not in _WORDS:
        known = tuple(_WORDS)
        raise ValueError(f"tokenizer.ggml.pre must be one of {known}, got {words!r}{_INSTEAD}")
    return _read_byte_pairs(path, _WORDS[words])


def _read_byte_pairs(path: Path, words: str | None) -> PreTrainedTokenizerBase:
    # Brings the tokenizers of several models along.
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, settings = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if words is not None:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _read_word_pieces(path: Path) -> PreTrainedTokenizerBase:
    """Pieces that begin a word are marked in the file, and those that go on in a BERT."""
    listed = "tokenizer.ggml.tokens"
    metadata, _ = read_gguf_metadata(str(path), (listed,))
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    vocabulary = {}
    for number, (token, kind) in enumerate(zip(metadata[listed], kinds, strict=True)):
        if kind != 3:  # a control token, which is written as it is
            token = token[1:] if token.startswith("\u2581") else f"##{token}"
        vocabulary[token] = number
    return BertTokenizer(vocabulary)
