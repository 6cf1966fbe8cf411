"""The code in README and docs, run in a folder where the models that they name lie."""

import ast
import io
import re
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@np.printoptions()  # those that a document sets are its own
def run_python(document: Path) -> int:
    """Run the blocks whose packages are installed, in the current folder; return how many these
    are.

    What a block prints must be what the page shows: the block of text that follows it at once, if
    one does.
    """
    names: dict[str, Any] = {}
    num_run = 0
    text = document.read_text(encoding="utf-8")
    pattern = r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?"
    for block, shown in re.findall(pattern, text, re.DOTALL | re.MULTILINE):
        tree = ast.parse(block)
        if all(find_spec(package) is not None for package in _packages(tree)):
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(tree, document.name, "exec"), names)
            actual = printed.getvalue()
            if shown and actual != shown:
                raise AssertionError(f"{document.name} shows\n{shown}but prints\n{actual}")
            num_run += 1
    return num_run


def _packages(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in _imports(tree)}


def _imports(tree: ast.AST) -> set[str]:
    """The names that are imported; of `from a import b` both a and a.b, which may be a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


# What brings the packages of a page. The extra `lm` holds `torch`.
_EXTRAS = {
    "lm": ("transformers", "datasets", "linbias.lm", "linbias.models", "linbias.data"),
    "torch": ("torch", "linbias.torch"),
    "jax": ("jax", "flax", "linbias.jax"),
}


def extras_needed(document: Path) -> list[str]:
    """The extras of linbias that the Python blocks of a page need."""
    imports = {name for block in blocks(document, "python") for name in _imports(ast.parse(block))}
    needed = {
        extra
        for extra, packages in _EXTRAS.items()
        for name in imports
        if name.startswith(tuple(f"{package}." for package in packages)) or name in packages
    }
    return sorted(needed - {"torch"} if "lm" in needed else needed)


def write_paper_model(folder: Path) -> None:
    """What `linbias paper convert` would have written to the folder of docs/paper.md."""
    from linbias.paper.checkpoint import add_words
    from linbias.paper.config import PaperConfig
    from linbias.paper.dictionary import Dictionary
    from linbias.paper.model import PaperForCausalLM

    config = PaperConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        cutoffs=[20],
    )
    PaperForCausalLM(config).save_pretrained(folder / "alibi-512")
    add_words(Dictionary.from_counts({f"w{i}": 1 for i in range(36)}), folder / "alibi-512")


def write_existing_models(folder: Path) -> None:
    """The models of docs/guides/existing-models.md, small and random."""
    from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

    from linbias.data.tokenizers import byte_tokenizer
    from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
    from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
    from small_models import write_folder
    from test_transformers_encoders import original_config, original_weights

    decoder = {"vocab_size": 256, "hidden_size": 32}
    bloom = BloomConfig(**decoder, n_head=4, n_layer=1)
    falcon = FalconConfig(**decoder, num_attention_heads=4, num_hidden_layers=1, alibi=True)
    storyteller = {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 6}
    mpt = LinbiasMptConfig(
        vocab_size=256, d_model=32, n_heads=4, n_layers=1, attn_config=storyteller
    )
    baichuan = BaichuanConfig(
        **decoder,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=1,
        normalize_head=True,
    )
    decoders = {
        "bigscience/bloom-560m": BloomForCausalLM(bloom),
        "tiiuae/falcon-rw-1b": FalconForCausalLM(falcon),
        "mosaicml/mpt-7b-storywriter": LinbiasMptForCausalLM(mpt),
        "baichuan-inc/Baichuan2-13B-Chat": BaichuanForCausalLM(baichuan),
    }
    for name, model in decoders.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save(folder / name)
    for name, family in (
        ("jinaai/jina-embeddings-v2-base-en", "jina"),
        ("mosaicml/mosaic-bert-base", "mosaic"),
        ("zhihan1996/DNABERT-2-117M", "mosaic"),
    ):
        weights = original_weights(family, prefix="" if family == "jina" else "bert.")
        if family == "jina":  # as released: the encoder alone
            weights = {key: x for key, x in weights.items() if not key.startswith("cls.")}
        write_folder(folder / name, original_config(family), weights)
        byte_tokenizer().save(folder / name)
