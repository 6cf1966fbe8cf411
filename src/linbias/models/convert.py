"""`linbias convert`: original folders of encoders into ones of Transformers."""

import json
import shutil
from pathlib import Path

from linbias._run.files import write_json, write_whole
from linbias.models.encoders.bert_config import LinbiasBertConfig
from linbias.models.families import find_family
from linbias.models.files import Files, new_folder, refuse_model_in
from linbias.models.loading import load

# Without a number, SentenceTransformer cuts texts at max_position_embeddings, no limit here.
_NO_LIMIT = 2**31 - 1
_NAMES = ("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab")
_TOKENIZER_FILES = (
    *(f"{name}.json" for name in _NAMES),
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
)


def convert(folder: str | Path, output: str | Path) -> None:
    """Write an ALiBi encoder as a folder that Transformers loads alone.

    `load(output)` reads it; after `linbias.models.install()` the Auto classes do, and for jina-
    embeddings-v2 `sentence_transformers.SentenceTransformer(output)`, with the mean over all
    tokens, of texts of any length. Tokenizer files go along.

    Args:
        folder: A local folder as `load` reads it.
        output: The folder to make; refused where it holds config.json or safetensors already.

    Raises:
        ValueError: The folder holds no such model; output is not to be written.
        OSError: A file could not be written (disk full); output holds no model then.
    """
    folder, output = Path(folder), Path(output)
    refuse_model_in(output, "convert")
    files = Files.at("convert", folder)
    names = set(files.look_at_weights())
    family = find_family(files.settings, names)
    config = None if family is None else family.read_config(files.settings, names)
    if not isinstance(config, LinbiasBertConfig):
        raise ValueError(
            f"convert: {str(folder)!r} must hold an encoder, got model_type {files.model_type!r}"
        )
    with new_folder(output, "convert") as partial:
        load(files, task=_task(names), device="cpu").save_pretrained(partial)
        if family is not None and family.name.startswith("jina"):
            _write_sentence_transformer(folder, partial)
        _copy_tokenizer(folder, partial)


def _task(names: set[str]) -> str:
    """The one whose model holds most of a folder's weights."""
    if any("transform." in name for name in names):
        return "masked"
    if "classifier.weight" in names:
        return "sequence" if any("pooler." in name for name in names) else "token"
    return "base"


def _write_sentence_transformer(folder: Path, target: Path) -> None:
    """What SentenceTransformer reads: a transformer, then the mean over all tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = folder / "sentence_bert_config.json"
    settings = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else {}
    settings["max_seq_length"] = _NO_LIMIT
    modules = (("", "0", "models.Transformer"), ("1_Pooling", "1", "models.Pooling"))
    listed = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.{kind}"}
        for path, name, kind in modules
    ]
    pooling = {
        "word_embedding_dimension": config["hidden_size"],
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": False,
        "pooling_mode_max_tokens": False,
    }
    (target / "1_Pooling").mkdir()
    write_whole(target / "modules.json", (json.dumps(listed, indent=2) + "\n").encode())
    write_json(target / "1_Pooling" / "config.json", pooling)
    write_json(target / "sentence_bert_config.json", settings)


def _copy_tokenizer(folder: Path, target: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    if (config := target / "tokenizer_config.json").is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
        if settings.pop("auto_map", None) is not None:  # points to code that did not go along
            write_json(config, settings)
