"""A large corpus as vectors, on many machines: each process embeds its share of the files.

    python examples/embed_many.py ENCODER vectors corpus/*.jsonl      # one process
    torchrun --nproc-per-node 8 examples/embed_many.py ...            # eight, one for each GPU
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 examples/embed_many.py ...
    python examples/embed_many.py --ray 32 ...                        # 32 workers of Ray Data

torchrun is called on each of four machines, Ray (`pip install 'ray[data]'`) once on its cluster,
where each worker has a GPU if there are any, and takes the next file when it is done.

Every file becomes one of the same name in the folder of vectors, which all machines share, with
the suffix --format. A file that is there is whole and is left out, so the same command resumes a
job that was stopped, also with another number of processes: a file that was under way goes on
behind its last batch. So does that of a worker that died, when Ray gives it to another one. The
processes need nothing of each other, so they join no group.
"""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    parser.add_argument("--spans", help="also embed passages: 'sentences' or a number of tokens")
    parser.add_argument("--ray", type=int, metavar="WORKERS", help="share the files by Ray Data")
    chosen = parser.parse_args(arguments)
    if chosen.ray is not None and find_spec("ray") is None:
        parser.error("--ray: needs ray, which is not installed: pip install 'ray[data]'")
    files = sorted(file.absolute() for file in chosen.files)
    outputs = [output_of(file, chosen.vectors.absolute(), chosen.format) for file in files]
    if len({*outputs}) < len(files):
        parser.error("files: must have names that differ")
    chosen.vectors.mkdir(parents=True, exist_ok=True)
    folder = Path(chosen.encoder)
    encoder = str(folder.absolute()) if folder.exists() else chosen.encoder  # or of the hub
    embed_file = partial(
        _embed,
        encoder=encoder,
        normalize=chosen.normalize,
        spans=int(chosen.spans) if (chosen.spans or "").isdecimal() else chosen.spans,
        batch_tokens=chosen.batch_tokens,
        precision=chosen.precision,
    )
    jobs = list(zip(files, outputs, strict=True))
    if chosen.ray is not None:
        return _run_on_ray(embed_file, [job for job in jobs if not job[1].exists()], chosen.ray)
    # torchrun sets these.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    made = []
    for file, output in jobs[rank::size]:
        if not output.exists():
            print(f"rank {rank}: {embed_file(file, output, device=device)}", flush=True)
            made.append(output)
    return made


def _embed(file: Path, output: Path, *, encoder: str, **how: Any) -> str:
    """Embed a file, and say in words what was in it."""
    documents = read_documents([file])
    result = embed(encoder, documents, output, **how)
    return f"{file}, {len(documents):,} documents, {sum(result.num_tokens):,} tokens"


def _run_on_ray(
    embed_file: Callable[[Path, Path], str], jobs: list[tuple[Path, Path]], workers: int
) -> list[Path]:
    import ray

    if not jobs:
        return []
    ray.init(ignore_reinit_error=True)
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    rows = [{"file": str(file), "output": str(output)} for file, output in jobs]
    # A block for each file: what a dead worker was at is all that another one does again.
    done = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        lambda row: {"done": embed_file(Path(row["file"]), Path(row["output"]))},
        compute=ray.data.TaskPoolStrategy(size=workers),
        num_gpus=gpus,
    )
    for row in done.iter_rows():
        print(row["done"], flush=True)
    return [output for _, output in jobs]


def _device(local_rank: int) -> str:
    """A GPU for each process of a machine, or the CPU."""
    count = torch.cuda.device_count()
    return f"cuda:{local_rank % count}" if count else "cpu"


if __name__ == "__main__":
    main()
