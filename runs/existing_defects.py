"""What is wrong with ALiBi in existing implementations: the table of docs/guides/existing-models.md.

    python runs/existing_defects.py            # measures, writes records/existing_defects.json and the table
    python runs/existing_defects.py --table    # the table alone, from the record

Small random models (two layers, 16 heads of 8, float32 unless said otherwise) on the installed Transformers. The truth is
Transformers' own code in float64 with the defect mended: a Falcon whose bias is not rounded, an MPT that reads
alibi_bias_max; for an MPT with parts that Transformers does not have, ours in float64, which tests hold against
llm-foundry's attention and a plain restatement. An error is |logits - truth| / |truth|, Euclidean norms over the last 64 tokens of one text.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt.modeling_mpt import MptModel
from transformers.utils import logging

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from markers import fill  # noqa: E402

import linbias  # noqa: E402
import record  # noqa: E402
from linbias.models import (  # noqa: E402
    LinbiasBertConfig,
    LinbiasBertModel,
    fuse,
    load,
)
from linbias.models.encoders.original import to_original  # noqa: E402
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM  # noqa: E402

RECORD = ROOT / "records" / "existing_defects.json"
DOCUMENT = ROOT / "docs" / "guides" / "existing-models.md"
VOCABULARY, SIZE, HEADS, LAYERS = 97, 128, 16, 2
SHARED = {"vocab_size": VOCABULARY, "initializer_range": 0.2}


def bloom() -> BloomForCausalLM:
    return BloomForCausalLM(BloomConfig(hidden_size=SIZE, n_head=HEADS, n_layer=LAYERS, **SHARED))


def falcon() -> FalconForCausalLM:
    sizes = {"hidden_size": SIZE, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    released = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    return FalconForCausalLM(FalconConfig(**sizes, **released, **SHARED))


def mpt(max_bias: int = 8, max_seq_len: int = 4096) -> MptForCausalLM:
    attention = {"alibi": True, "alibi_bias_max": max_bias}
    sizes = {"d_model": SIZE, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": max_seq_len}
    return MptForCausalLM(MptConfig(**sizes, **SHARED, attn_config=attention))


@contextmanager
def mended() -> Iterator[None]:
    """Transformers without rounding in Falcon, and with alibi_bias_max in MPT."""

    def unrounded(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions = (attention_mask.cumsum(-1) - 1) * attention_mask
        bias = torch.tensor(linbias.slopes(num_heads))[:, None] * positions[:, None]
        return bias.flatten(0, 1)[:, None].to(dtype)

    own = MptModel.build_mpt_alibi_tensor

    def as_configured(self: Any, num_heads: int, length: int, device: Any = None) -> Tensor:
        return own(self, num_heads, length, self.config.attn_config.alibi_bias_max, device)

    with (
        mock.patch.object(modeling_falcon, "build_alibi_tensor", unrounded),
        mock.patch.object(MptModel, "build_mpt_alibi_tensor", as_configured),
    ):
        yield


def text(T: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def truth(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of the mended model in float64."""
    wide = copy.deepcopy(model).double()
    with mended():
        return wide(ids).logits


@torch.no_grad()
def error(model: PreTrainedModel, ids: Tensor, expected: Tensor, **options: Any) -> float:
    found = model(ids, **options).logits
    return norm_error(found[:, -64:], expected[:, -64:])


def norm_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def failure(compute: Callable[[], Any]) -> str | None:
    """The first line of the error of a computation; None if there is none."""
    try:
        compute()
    except Exception as error:
        return f"{type(error).__name__}: " + str(error).strip().partition("\n")[0]
    return None


def pair(make: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.manual_seed(0)
    model = make().eval()
    return model, fuse(copy.deepcopy(model))


def falcons() -> Iterator[dict[str, Any]]:
    model, fused = pair(falcon)
    eager = FalconForCausalLM._from_config(
        copy.deepcopy(model.config), attn_implementation="eager"
    ).eval()
    eager.load_state_dict(model.state_dict())
    for T in (129, 700):
        ids = text(T)
        expected = truth(model, ids)
        ours = error(fused, ids, expected)
        case = {"model": "Falcon", "tokens": T, "ours": ours}
        yield {**case, "defect": "rounds slope and bias to bfloat16, in a float32 model too",
               "theirs": error(model, ids, expected)}  # fmt: skip
        yield {**case, "defect": "sdpa with output_attentions=True adds the bias twice",
               "theirs": error(model, ids, expected, output_attentions=True),
               "ours": error(fused, ids, expected, output_attentions=True)}  # fmt: skip
        yield {
            **case,
            "defect": "eager adds the bias twice",
            "theirs": error(eager, ids, expected),
        }
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = text(17)
    growing = fused.generate(ids, **options)
    static = fused.generate(ids, cache_implementation="static", **options)
    assert torch.equal(growing, static)
    yield {
        "model": "Falcon", "defect": "generate with a static cache fails", "tokens": 17,
        "theirs": failure(lambda: model.generate(ids, cache_implementation="static", **options)),
        "ours": "the tokens of a growing cache",
    }  # fmt: skip


def mpts() -> Iterator[dict[str, Any]]:
    model, fused = pair(lambda: mpt(max_bias=16))
    for T in (129, 700):
        ids = text(T)
        expected = truth(model, ids)
        yield {"model": "MPT", "defect": "ignores alibi_bias_max (here 16)", "tokens": T,
               "theirs": error(model, ids, expected), "ours": error(fused, ids, expected)}  # fmt: skip
    model, fused = pair(lambda: mpt(max_seq_len=512))
    ids = text(700)
    with mock.patch.object(model.config, "max_seq_len", 700):
        expected = truth(model, ids)
    yield {"model": "MPT", "defect": "fails beyond max_seq_len (here 512)", "tokens": 700,
           "theirs": failure(lambda: model(ids)), "ours": error(fused, ids, expected)}  # fmt: skip
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 4}
    for what, attention in (
        ("leaves norms of queries and keys out (qk_ln), and a warning", {"qk_ln": True}),
        ("refuses grouped heads", grouped),
        ("refuses whole numbers, such as clip_qkv = 6", {"clip_qkv": 6}),
    ):
        yield {"model": "MPT", "defect": what, "tokens": 129} | other_mpt(attention)


def other_mpt(attention: dict[str, Any]) -> dict[str, Any]:
    """What becomes of the folder of an MPT with this attn_config."""
    torch.manual_seed(0)
    sizes = {"d_model": SIZE, "n_heads": HEADS, "n_layers": LAYERS, "no_bias": True}
    config = LinbiasMptConfig(**sizes, **SHARED, attn_config={"alibi": True, **attention})
    model = LinbiasMptForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "_ln" in name:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    ids = text(129)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        ours = load(folder)(ids).logits
        expected = model.double()(ids).logits
        try:
            theirs: float | str = error(MptForCausalLM.from_pretrained(folder), ids, expected)
        except Exception as refusal:
            theirs = f"{type(refusal).__name__}: " + " ".join(str(refusal).split())
    return {"theirs": theirs, "ours": norm_error(ours[:, -64:], expected[:, -64:])}


def blooms() -> Iterator[dict[str, Any]]:
    model, fused = pair(bloom)
    narrow, ours = (copy.deepcopy(m).bfloat16() for m in (model, fused))
    for T in (128, 700, 2048):
        ids = text(T)
        expected = truth(model, ids)
        yield {
            "model": "BLOOM, bfloat16", "tokens": T,
            "defect": "rounds slope * key position: its error grows with the position",
            "theirs": error(narrow, ids, expected), "ours": error(ours, ids, expected),
        }  # fmt: skip


def encoders() -> Iterator[dict[str, Any]]:
    """A folder as jina-embeddings-v2 are published, without the code that lies beside it."""
    torch.manual_seed(0)
    config = LinbiasBertConfig(
        vocab_size=VOCABULARY, hidden_size=SIZE, intermediate_size=SIZE, initializer_range=0.2,
        num_attention_heads=HEADS, num_hidden_layers=LAYERS, pooler=True,
    )  # fmt: skip
    source = LinbiasBertModel(config).eval()
    ids = text(129)
    with tempfile.TemporaryDirectory() as folder:
        named = {f"encoder.{name}": tensor for name, tensor in source.state_dict().items()}
        weights = to_original(named, "jina", "")
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        original = {
            **{"model_type": "bert", "position_embedding_type": "alibi"},
            **{"feed_forward_type": "geglu", "max_position_embeddings": 8192},
            **{"vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": SIZE},
            **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "type_vocab_size": 2},
            **{"hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        }
        Path(folder, "config.json").write_text(json.dumps(original))
        with torch.no_grad():
            expected = copy.deepcopy(source).double()(ids).last_hidden_state
            ours = load(folder)(ids).last_hidden_state
            plain, info = AutoModel.from_pretrained(folder, output_loading_info=True)
            theirs = plain.eval()(ids).last_hidden_state
    yield {
        "model": "jina-embeddings-v2", "tokens": 129,
        "defect": "AutoModel without remote code: a BERT with "
        f"{len(info['missing_keys'])} random weights, and a warning",
        "theirs": norm_error(theirs, expected), "ours": norm_error(ours, expected),
    }  # fmt: skip


def table(measured: dict[str, Any]) -> str:
    """The record as Markdown, a line per defect."""
    by_defect: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        by_defect.setdefault((row["model"], row["defect"]), []).append(row)
    lines = [
        f"| model | what Transformers {measured['versions']['transformers']} does | tokens | its error | ours |",
        "|---" * 5 + "|",
    ]
    for (model, defect), rows in by_defect.items():
        cells = ("; ".join(in_words(row[name]) for row in rows) for name in ("theirs", "ours"))
        lengths = "; ".join(f"{row['tokens']:,}" for row in rows)
        lines.append(f"| {model} | {defect} | {lengths} | {' | '.join(cells)} |")
    source = f"{measured['machine']}, {measured['date']}, `python runs/existing_defects.py`."
    return "\n".join([*lines, "", source])


def in_words(value: float | str) -> str:
    if isinstance(value, str):
        return value.partition(":")[0]  # of an error its type; the record has its text
    return f"{value:.1%}" if value > 1e-4 else f"{value:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="write the table from the record")
    if not parser.parse_args().table:
        logging.set_verbosity_error()
        rows = [row for rows in (falcons, mpts, blooms, encoders) for row in rows()]
        rows.sort(key=lambda row: (row["model"], row["defect"], row["tokens"]))
        measured = {**record.here(), "rows": rows}
        measured["versions"]["transformers"] = transformers.__version__
        RECORD.write_text(json.dumps(measured, indent=1) + "\n")
    written = table(json.loads(RECORD.read_text()))
    fill(DOCUMENT, {"defects": written})
    print(written)


if __name__ == "__main__":
    main()
