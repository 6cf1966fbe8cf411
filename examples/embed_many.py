"""A corpus as vectors of whole documents and of their passages, by `datasets` and `embed`.

    python examples/embed_many.py ENCODER vectors corpus/*.jsonl             # one process
    torchrun --nproc-per-node 8 examples/embed_many.py ...                   # eight of them
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 examples/embed_many.py ...

ENCODER is a folder that `linbias convert` wrote. `datasets` reads the files (a "text" per line, or
compressed, or of the Hub), and gives each process its shard, which becomes a Parquet file in the
folder of vectors; a shard that is there is left out, so the same command goes on after a stop.
The processes need nothing of each other, so they join no group.
"""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer

from linbias.models import embed, install


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Return the files that this process wrote."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="folder of an encoder")
    parser.add_argument("vectors", type=Path, help="folder to write to, which all processes see")
    parser.add_argument("files", nargs="+", help='.jsonl files with a "text" per line')
    parser.add_argument("--shards", type=int, default=1, help="files that each process writes")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--normalize", action="store_true", help="make vectors of length 1")
    parser.add_argument("--spans", type=int, help="also embed passages of so many tokens")
    chosen = parser.parse_args(arguments)
    # torchrun sets these.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    install()
    model = SentenceTransformer(chosen.encoder, device=_device())
    corpus = load_dataset("json", data_files=chosen.files, split="train")
    chosen.vectors.mkdir(parents=True, exist_ok=True)

    def embed_rows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        options = {"normalize": chosen.normalize, "batch_size": chosen.batch_size}
        made = embed(model, rows["text"], spans=chosen.spans, **options)
        columns = {"vector": [one.vector for one in made]}
        if chosen.spans is not None:
            columns["spans"] = [one.spans for one in made]
            columns["span_vectors"] = [one.span_vectors for one in made]
        return columns

    written = []
    for index in range(rank, size * chosen.shards, size):
        output = chosen.vectors / f"{index:05d}-of-{size * chosen.shards:05d}.parquet"
        if not output.exists():
            shard = corpus.shard(size * chosen.shards, index, contiguous=True)
            partial = output.with_suffix(".partial")
            shard.map(embed_rows, batched=True, batch_size=256).to_parquet(str(partial))
            partial.rename(output)
            print(f"rank {rank}: {len(shard):,} documents in {output}", flush=True)
            written.append(output)
    return written


def _device() -> str:
    """A GPU for each process of a machine, or the CPU."""
    count = torch.cuda.device_count()
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}" if count else "cpu"


if __name__ == "__main__":
    main()
