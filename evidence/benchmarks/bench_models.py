"""Time existing models whole, fused and as Transformers runs them, interleaved in one run.

    python evidence/benchmarks/bench_models.py                     # everything, some minutes on 2 cores
    python evidence/benchmarks/bench_models.py bloom --lengths 4096

bloom: two layers of the shape of BLOOM-560m (16 heads of 64), float32 and bfloat16, one text; fused and eager.
encoder: two layers of the shape of jina-embeddings-v2-base (12 heads of 64); its attention, and in its place
scaled_dot_product_attention with the bias as a mask for the whole batch, which is the fastest way to run the original's math.
texts: the same encoder on 24 texts of 86 to 8,192 tokens (log-normal, median 1,000), without padding; and padded, with
PyTorch's attention and the bias as a mask from a table that exists already, in the same batches of like length and in
batches as the texts come.
generate: 200 tokens after a prompt of 16,384, two layers of BLOOM-560m.
Weights are random. Records go to records, or where --records says.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import NormalDist
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

import record
from linbias.models import LinbiasBertConfig, LinbiasBertModel, fuse
from linbias.models.encoders.bert import Attention

VOCABULARY = 1000
LENGTHS = (1024, 2048, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["bloom", "encoder", "texts", "generate"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    options = parser.parse_args()
    options.records = options.records or record.default_path()
    torch.manual_seed(0)
    parts = {"bloom": bloom, "encoder": encoder, "texts": texts, "generate": generate}
    with torch.no_grad():
        for part in options.parts:
            parts[part](options)


def bloom(options: argparse.Namespace) -> None:
    for dtype in options.dtypes:
        eager, fused = bloom_pair(dtype)
        for length in options.lengths:
            ids = torch.randint(VOCABULARY, (1, length))
            compare(
                f"bloom-560m-2-layers-{dtype}-{length}",
                {"linbias": partial(fused, ids), "eager": partial(eager, ids)},
                options,
            )


def bloom_pair(dtype: str) -> tuple[BloomForCausalLM, BloomForCausalLM]:
    """A model as Transformers runs it, and fused."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=1024, n_head=16, n_layer=2)
    model = BloomForCausalLM(config).eval().to(getattr(torch, dtype))
    return model, fuse(copy.deepcopy(model))


def encoder(options: argparse.Namespace) -> None:
    for dtype in options.dtypes:
        model = encoder_model(dtype)
        for length in options.lengths:
            ids = torch.randint(VOCABULARY, (1, length))
            compare(
                f"jina-base-2-layers-{dtype}-{length}",
                {
                    "linbias": partial(model, ids),
                    "sdpa mask": partial(with_mask, model, ids, torch.ones_like(ids)),
                },
                options,
            )


def encoder_model(dtype: str) -> LinbiasBertModel:
    config = LinbiasBertConfig(vocab_size=VOCABULARY, num_hidden_layers=2)
    return LinbiasBertModel(config).eval().to(getattr(torch, dtype))


def with_mask(model: LinbiasBertModel, ids: Tensor, mask: Tensor) -> Tensor:
    """The model with padding left in, and PyTorch's attention with the bias as a mask, made once for all layers."""
    return padded(model, bias_table(model, ids.shape[1]), ids, mask)


def bias_table(model: LinbiasBertModel, length: int) -> Tensor:
    """[1, H, length, length], in the type of the model."""
    slopes = model.layers[0].attention.slopes.left(torch.empty(0), length)
    place = torch.arange(length)
    distance = (place[:, None] - place).abs().float()
    table = torch.empty(1, len(slopes), length, length, dtype=model.dtype)
    for head, slope in zip(table[0], slopes, strict=True):
        head.copy_(distance * -slope)
    return table


def padded(model: LinbiasBertModel, table: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The model on a padded batch: a view of the table is its mask, to which padding, where there is some, is added once."""
    B, T = ids.shape
    bias = table[..., :T, :T].expand(B, -1, -1, -1)
    if not mask.all():
        hidden = torch.zeros(B, T, dtype=model.dtype).masked_fill(mask == 0, -torch.inf)
        bias = bias + hidden[:, None, None]

    def attend(_: Attention, q: Tensor, k: Tensor, v: Tensor, *__: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, bias).transpose(1, 2)

    with mock.patch.object(Attention, "_attend", attend):
        return model(ids).last_hidden_state


def texts(options: argparse.Namespace) -> None:
    """Batches of at most 8,192 tokens with their padding, so that masks of 24 texts stay below 3.2 GB."""
    spread = NormalDist(math.log(1000), 1.2)
    lengths = [round(math.exp(spread.inv_cdf((i + 0.5) / 24))) for i in range(24)]
    lengths = torch.tensor(lengths).clamp(max=8192)[torch.randperm(24)]
    alike = batches_of(lengths.sort(descending=True).values.tolist())
    as_they_come = batches_of(lengths.tolist())
    for dtype in options.dtypes:
        model = encoder_model(dtype)
        table = bias_table(model, 8192)
        check(model, table, alike[-1])
        case = f"jina-base-2-layers-{dtype}-24-texts"
        compare(
            case,
            {
                "linbias": partial(run_all, model, alike),
                "sdpa mask, padded": partial(run_all, partial(padded, model, table), alike),
            },
            options,
        )
        start = time.perf_counter()
        run_all(partial(padded, model, table), as_they_come)
        write(case, "sdpa mask, unsorted", [(time.perf_counter() - start) * 1e3], options)


def batches_of(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Token ids and masks [B, T] of texts with these lengths, in this order, with B * T of at most 8,192."""
    batches: list[list[int]] = [[]]
    for length in lengths:
        if (len(batches[-1]) + 1) * max(length, *batches[-1], 0) > 8192:
            batches.append([])
        batches[-1].append(length)
    made = []
    for rows in batches:
        ids = torch.randint(VOCABULARY, (len(rows), max(rows)))
        made.append((ids, (torch.arange(max(rows)) < torch.tensor(rows)[:, None]).long()))
    return made


def check(model: LinbiasBertModel, table: Tensor, batch: tuple[Tensor, Tensor]) -> None:
    """Both ways compute the same."""
    ids, mask = batch
    ours, theirs = model(ids, mask).last_hidden_state, padded(model, table, ids, mask)
    most = 1e-4 if model.dtype == torch.float32 else 0.1
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=most, atol=most)


def run_all(run: Callable[[Tensor, Tensor], object], batches: list[tuple[Tensor, Tensor]]) -> None:
    for ids, mask in batches:
        run(ids, mask)


def generate(options: argparse.Namespace) -> None:
    """200 steps after the prompt, which the fused model reads for both: its eager scores alone would take 17 GB."""
    for dtype in options.dtypes:
        eager, fused = bloom_pair(dtype)
        ids = torch.randint(VOCABULARY, (1, 16_384))
        cache = fused(ids, logits_to_keep=1).past_key_values
        copied = DynamicCache(config=eager.config)
        for index, layer in enumerate(cache.layers):
            copied.update(layer.keys.clone(), layer.values.clone(), index)
        token, found = ids[:, :1], {}
        for name, model, past in (("linbias", fused, cache), ("eager", eager, copied)):
            steps = []
            for _ in range(200):
                start = time.perf_counter()
                model(token, past_key_values=past)
                steps.append((time.perf_counter() - start) * 1e3)
            case = f"bloom-560m-2-layers-{dtype}-token-after-16384"
            found[name] = write(case, name, steps, options)
        print(f"{'':44} {found['eager'] / found['linbias']:.2f} x eager", flush=True)


def compare(
    case: str, functions: dict[str, Callable[[], object]], options: argparse.Namespace
) -> None:
    times = record.interleave(functions, options.repeats)
    medians = {name: write(case, name, found, options) for name, found in times.items()}
    ours, peer = medians.values()
    print(f"{'':44} {peer / ours:.2f} x {list(medians)[1]}", flush=True)


def write(case: str, name: str, times: list[float], options: argparse.Namespace) -> float:
    line = {"case": case, "implementation": name, **record.spread(times), **record.here()}
    record.write(line, options.records)
    median = float(line["p50_ms"])
    print(f"{case:44} {name:18} {median:9.1f} ms", flush=True)
    return median


if __name__ == "__main__":
    main()
