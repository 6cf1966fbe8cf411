"""A large corpus as vectors, on many machines: each process embeds its share of the files.

    python examples/embed_many.py ENCODER vectors corpus/*.jsonl      # one process
    torchrun --nproc-per-node 8 examples/embed_many.py ...            # eight, one for each GPU
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 examples/embed_many.py ...

The last is called on each of four machines.

Every file becomes one of the same name in the folder of vectors, which all machines share, with
the suffix --format. A file that is there is whole and is left out, so the same command resumes a
job that was stopped, also with another number of processes: a file that was under way goes on
behind its last batch. The processes need nothing of each other, so they join no group.
"""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch

from linbias.models import embed, read_documents


def output_of(file: Path, folder: Path, suffix: str) -> Path:
    return folder / f"{file.name.removesuffix('.jsonl')}.{suffix}"


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Return the files that this process wrote."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="folder of an encoder, as `linbias embed` takes it")
    parser.add_argument("vectors", type=Path, help="folder to write to, which all processes see")
    parser.add_argument("files", type=Path, nargs="+", help=".jsonl, or text of one document each")
    parser.add_argument("--format", choices=("npy", "jsonl", "parquet"), default="npy")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--normalize", action="store_true", help="make vectors of length 1")
    chosen = parser.parse_args(arguments)
    # torchrun sets these.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    files = sorted(chosen.files)
    outputs = [output_of(file, chosen.vectors, chosen.format) for file in files]
    if len({*outputs}) < len(files):
        parser.error("files: must have names that differ")
    chosen.vectors.mkdir(parents=True, exist_ok=True)
    made = []
    for file, output in list(zip(files, outputs, strict=True))[rank::size]:
        if output.exists():
            continue
        documents = read_documents([file])
        result = embed(
            chosen.encoder,
            documents,
            output,
            normalize=chosen.normalize,
            batch_tokens=chosen.batch_tokens,
            device=device,
            precision=chosen.precision,
        )
        made.append(output)
        tokens = sum(result.num_tokens)
        print(f"rank {rank}: {file}, {len(documents):,} documents, {tokens:,} tokens", flush=True)
    return made


def _device(local_rank: int) -> str:
    """A GPU for each process of a machine, or the CPU."""
    count = torch.cuda.device_count()
    return f"cuda:{local_rank % count}" if count else "cpu"


if __name__ == "__main__":
    main()
