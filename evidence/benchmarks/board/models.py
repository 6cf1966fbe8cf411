"""The models of the board: shapes, random weights in folders as Transformers writes them, and what
they answer in float64.

    python evidence/benchmarks/board/models.py build/board bloom-560m --dtypes float32 --lengths
    512 2048

Weights are seeded. Those that make queries, keys and values have a standard deviation of 1 /
sqrt(width), so that queries and keys are near N(0, 1) in each of their numbers, and scores differ
by some units before the bias; all others have 0.02. The vocabulary is cut to 8,192 for all engines
alike, so that logits of long texts fit. bfloat16 folders hold the float32 weights, rounded.

A reference is the logits at the last token of a text, or the vector of it (the mean over tokens,
not normalized), computed by linbias in float64 from the weights of the folder. At up to 512 tokens
it is compared with `plain.py` in float64, and with Transformers' own code for BLOOM and MPT.
"""

import argparse
import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 8192
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")  # token ids 0 to 3, which no text has
ROOM = 32  # for what is generated after the longest text


@dataclass(frozen=True)
class Shape:
    """Of a model: its family names the architecture of Transformers, or jina."""

    family: str
    layers: int
    width: int
    heads: int

    @property
    def task(self) -> str:
        return "embed" if self.family == "jina" else "generate"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that are measured unless others are asked for."""
        return (512, 2048, 8192, 32768) if self.family == "bloom" else (512, 8192)


SHAPES = {
    "bloom-560m": Shape("bloom", 24, 1024, 16),
    "jina-base": Shape("jina", 12, 768, 12),
    "jina-small": Shape("jina", 4, 512, 8),
    "mpt": Shape("mpt", 12, 1024, 16),
    "falcon-alibi": Shape("falcon", 12, 1024, 16),
    # For trials, where everything takes seconds.
    **{
        f"tiny-{family}": Shape(family, 2, 256, 4) for family in ("bloom", "mpt", "falcon", "jina")
    },
}


def text(length: int) -> list[int]:
    """The token ids of the text of a length, the same for all engines."""
    return np.random.default_rng(length).integers(len(SPECIAL), VOCABULARY, length).tolist()


def words(ids: Sequence[int]) -> list[str]:
    """The tokens of these ids, as the tokenizer of every folder knows them."""
    return [f"t{i}" for i in ids]


def model_folder(board: Path, name: str, dtype: str) -> Path:
    return board / "models" / f"{name}-{dtype}"


def reference_path(board: Path, name: str, dtype: str, length: int) -> Path:
    return board / "references" / f"{name}-{dtype}-{length}.npy"


def make_model(board: Path, name: str, dtype: str) -> Path:
    """The folder of a model, written if it is not there yet."""
    import torch

    folder = model_folder(board, name, dtype)
    if folder.exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(0)
    model = build(SHAPES[name])
    with torch.no_grad():
        for path, weight in model.named_parameters():
            makes_qkv = any(part in path for part in ("query_key_value", "Wqkv", "qkv"))
            deviation = SHAPES[name].width ** -0.5 if makes_qkv and weight.dim() == 2 else 0.02
            is_norm = weight.dim() == 1 and path.endswith("weight")
            weight.normal_(float(is_norm), deviation)
    model.to(getattr(torch, dtype)).save_pretrained(partial)
    save_tokenizer(partial)
    partial.rename(folder)
    return folder


def build(shape: Shape) -> Any:
    """A model of this shape; its weights are not those of the board yet."""
    import transformers

    from linbias.models import LinbiasBertConfig, LinbiasBertModel

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    values = (shape.width, shape.layers, shape.heads, VOCABULARY)
    sizes: dict[str, Any] = {**dict(zip(names, values, strict=True)), "pad_token_id": 3}
    if shape.family == "jina":
        more = {"intermediate_size": 4 * shape.width, "train_length": 8192}
        return LinbiasBertModel(LinbiasBertConfig(**sizes, **more))
    whole = {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False}
    more = {
        "bloom": {},
        "mpt": {"max_seq_len": 32768 + ROOM},
        "falcon": {**whole, "max_position_embeddings": 32768 + ROOM},
    }[shape.family]
    family, ends = shape.family.capitalize(), {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, **ends, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def save_tokenizer(folder: Path) -> None:
    """One that splits at spaces: the text "t4 t5" is the ids 4 and 5."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate([*SPECIAL, *words(range(len(SPECIAL), VOCABULARY))])}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token=SPECIAL[0]))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=splitter, model_max_length=32768 + ROOM, **names
    ).save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps(names))


def load(folder: Path, dtype: str) -> Any:
    """A model as Transformers loads it, or for jina as linbias does, in this type."""
    import torch
    import transformers

    from linbias.models import LinbiasBertModel

    family = json.loads((folder / "config.json").read_text())["model_type"]
    kind = LinbiasBertModel if family == "linbias_bert" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def make_reference(board: Path, name: str, dtype: str, length: int) -> Path:
    """The float64 answer to the text of a length, computed if it is not there yet."""
    import torch

    from linbias.models import fuse

    path = reference_path(board, name, dtype, length)
    if path.exists():
        return path
    shape, ids = SHAPES[name], torch.tensor([text(length)])
    model = load(make_model(board, name, dtype), "float64")
    with torch.inference_mode():
        found = answer(model if shape.task == "embed" else fuse(model), ids)
        if length <= 512:
            check(found, make_model(board, name, dtype), shape.family, ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npy")
    np.save(partial, found)
    partial.rename(path)
    return path


def answer(model: Any, ids: Any) -> Any:
    """Logits at the last token, or the mean of all vectors, as NumPy's numbers."""
    if hasattr(model, "lm_head"):
        return model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].double().numpy()
    return model(ids).last_hidden_state[0].double().mean(0).numpy()


def check(found: Any, folder: Path, family: str, ids: Any) -> None:
    """Hold linbias' float64 answer against others' code in float64."""
    import plain

    # BLOOM writes sqrt(2 / pi) with 8 digits.
    others = {"plain.py": (plain.load(folder, "float64")(ids)[0][0].numpy(), 1e-7)}
    if family in ("bloom", "mpt"):  # Falcon's own code rounds slopes to bfloat16 in every type
        # Its softmax is float32 in every type.
        others["Transformers"] = (answer(load(folder, "float64"), ids), 1e-5)
    for other, (says, allowed) in others.items():
        difference = np.abs(found - says).max()
        if not difference < allowed:
            differ = f"linbias and {other} differ by {difference:.1e} in float64"
            raise SystemExit(f"models: {differ} ({folder.name})")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("board", type=Path, help="where models and references go")
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, help="default: what the board measures")
    options = parser.parse_args()
    for name in options.names:
        for dtype in options.dtypes:
            print(make_model(options.board, name, dtype), flush=True)
            for length in options.lengths or SHAPES[name].lengths:
                print(make_reference(options.board, name, dtype, length), flush=True)
                gc.collect()  # a fused model refers to itself


if __name__ == "__main__":
    main()
