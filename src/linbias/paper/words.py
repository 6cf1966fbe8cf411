"""The dictionary of a paper model as a tokenizer of Transformers."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from linbias.paper.dictionary import Dictionary


def save_word_tokenizer(words: Dictionary, folder: str | Path) -> None:
    """Writes the two files that `AutoTokenizer` reads, of a tokenizer like `encode_line`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words.symbols[words.BOS],
        "pad_token": words.symbols[words.PAD],
        "eos_token": words.symbols[words.EOS],
        "padding_side": "left",  # generation goes on from the last token of each row
        "split_special_tokens": True,  # white space alone makes "<pad>" a word of a text
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    Path(folder, "tokenizer.json").write_text(_backend(words).to_str(), encoding="utf-8")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _backend(words: Dictionary) -> tokenizers.Tokenizer:
    regex = tokenizers.Regex
    begin, pad, end, unknown = words.symbols[:4]
    backend = tokenizers.Tokenizer(models.WordLevel(dict(words.ids), unk_token=unknown))
    backend.normalizer = normalizers.Replace(regex(r"\r\n|\r|\n"), f" {end} ")
    # Python's white space includes four control characters that \s leaves out.
    backend.pre_tokenizer = pre_tokenizers.Split(regex(r"[\s\x1c-\x1f]+"), "removed")
    backend.decoder = decoders.Sequence(
        [
            # It puts spaces between words. No word has the prefix, which would join it.
            decoders.WordPiece(prefix="\n", cleanup=False),
            decoders.Replace(regex(f"^ ?{end}$"), "\n"),
        ]
    )
    backend.add_special_tokens([begin, pad, end])
    return backend
