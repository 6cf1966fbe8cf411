"""Time vLLM on this CPU with its own attention and with linbias, in the venv of `make serve`.

    .venv-vllm/bin/python evidence/benchmarks/bench_serve.py
    .venv-vllm/bin/python evidence/benchmarks/bench_serve.py --lengths 128 512 2048 8192 32768 \\
        --prompts 512 2048 8192 --answers 512 4096 16384 --repeats 9

`serve-decode-*` and `serve-prefill-*`: attention of a layer, 16 heads of 64; both kernels read the
same keys by the same table of pages, interleaved. What a step prepares once for all layers is not
in the times. `serve-answers-*`: BLOOM-560m's shape with random weights, in two servers on
127.0.0.1, one with LINBIAS_VLLM=0, which the engine's own client asks in turn; memory is the most
that a server's processes ever held.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import vllm
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast
from vllm import _custom_ops as engine
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

import linbias
import record
from linbias.torch.packed.step import Layer, Step

H, D, PAGE = 16, 64, 128
VLLM, OURS = "vLLM", "linbias in vLLM"
VERSION = {"vllm": vllm.__version__}


def attention_alone(B: int, T: int, S: int, dtype: str, options: argparse.Namespace) -> None:
    """T new tokens of each of B sequences of S, in pages in random order."""
    torch.manual_seed(0)
    kind, pages = getattr(torch, dtype), -(-S // PAGE)
    q, k, v = (torch.randn(B, n, H, D).to(kind) for n in (T, S, S))
    table = (torch.randperm(B * pages) + 1).view(B, pages).int()
    slots = (table.long()[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :S].flatten()
    starts, lengths = torch.arange(B + 1).int() * T, torch.full((B,), S).int()
    slopes = torch.tensor(linbias.slopes(H)).float()
    q, k, v = (x.flatten(0, 1).contiguous() for x in (q, k, v))

    isa = _get_attn_isa(kind, PAGE, D)
    own = torch.zeros(B * pages + 1, H, PAGE * 2, D, dtype=kind).chunk(2, dim=2)
    engine.cpu_attn_reshape_and_cache(k, v, *own, slots, isa)
    plan = engine.cpu_attn_get_scheduler_metadata(
        num_reqs=B,
        num_heads=H,
        num_kv_heads=H,
        head_dim=D,
        seq_lens=lengths,
        dtype=kind,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    out = torch.empty_like(q)

    def by_engine() -> torch.Tensor:
        engine.cpu_attention_with_kv_cache(
            query=q,
            key_cache=own[0],
            value_cache=own[1],
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=D**-0.5,
            causal=True,
            alibi_slopes=slopes,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return out

    both = torch.zeros(B * pages + 1, H, 2, PAGE, D, dtype=kind).transpose(1, 3).unbind(2)
    norms = torch.zeros(B * pages + 1, H)
    layer = Layer(*both, slopes, norms, scale=D**-0.5)
    step = Step(table, lengths, starts, slots)
    step.write(layer, k, v)

    def by_linbias() -> torch.Tensor:
        step.attention(layer, q, out)
        return out

    near = {"rtol": 0.0, "atol": 1e-5 if dtype == "float32" else 0.05}
    torch.testing.assert_close(by_linbias().clone(), by_engine(), **near)
    case = f"serve-decode-{S}" if T == 1 else f"serve-prefill-{S}"
    fields = record.fields(case, (B, H, T, D), (B, H, S, D), dtype)
    more = {name: {"versions": record.here()["versions"] | VERSION} for name in (VLLM, OURS)}
    record.compare(fields, {VLLM: by_engine, OURS: by_linbias}, options, more)


def write_model(folder: Path, length: int) -> None:
    """BLOOM-560m's shape, with a word for each token, so that prompts keep their lengths."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "n_head": 16, "n_layer": 24}
    BloomForCausalLM(BloomConfig(**sizes, seq_length=length)).bfloat16().save_pretrained(folder)
    # The server refuses a prompt whose tokens would be longer than the longest that there is.
    vocabulary = {"<unknown>": 0, **{f"w{i}": i for i in range(1, 4096)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unknown>").save_pretrained(folder)


@contextmanager
def server(
    folder: Path, length: int, dtype: str, plugin: str
) -> Iterator[tuple[int, psutil.Process]]:
    """The engine's server for a model, its port and its process, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(length)]
    command += ["--dtype", dtype, "--enforce-eager", "--no-enable-prefix-caching"]
    room = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**room, **os.environ, "LINBIAS_VLLM": plugin}
    with (folder / f"server-{plugin}.log").open("w") as log:
        process = psutil.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 600
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(Path(log.name).read_text()[-3000:])
            time.sleep(1)
        yield port, process
    finally:
        children = process.children(recursive=True)
        process.terminate()
        psutil.wait_procs([process, *children], timeout=60)


def _answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
    except OSError:
        return False


def most_memory(process: psutil.Process) -> int:
    total = 0
    for member in (process, *process.children(recursive=True)):
        status = Path(f"/proc/{member.pid}/status").read_text()
        total += int(status.split("VmHWM:")[1].split()[0]) * 1024
    return total


# The wheel for CPUs has no command of its own: it looks for a package of another name.
CLIENT = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def ask(
    folder: Path, port: int, prompt: int, at_once: int, answers: int, tokens: int
) -> dict[str, Any]:
    """What the engine's client says of so many answers."""
    told = folder / "client.json"
    command = [sys.executable, "-c", CLIENT, "--backend", "openai", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dataset-name", "random"]
    command += ["--random-input-len", str(prompt), "--random-output-len", str(tokens)]
    command += ["--num-prompts", str(answers), "--max-concurrency", str(at_once)]
    command += ["--ready-check-timeout-sec", "0"]  # which would be one more such prompt
    command += ["--ignore-eos", "--disable-tqdm", "--save-detailed", "--save-result"]
    command += ["--result-filename", str(told)]
    subprocess.run(command, check=True, capture_output=True)
    said = json.loads(told.read_text())
    if said["failed"]:
        raise RuntimeError(f"{said['failed']} requests failed: {said.get('errors')}")
    return said


KEPT = ("output_throughput", "median_ttft_ms", "median_tpot_ms")


def whole_answers(options: argparse.Namespace) -> None:
    length = max(options.answers) + options.tokens + 16
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder, length)
        given = folder, length, options.answer_dtype
        with server(*given, "0") as stock, server(*given, "1") as ours:
            servers = {VLLM: stock, OURS: ours}
            for prompt in options.answers:
                for at_once in options.at_once:
                    for _ in range(options.rounds):
                        for name, (port, process) in servers.items():
                            answers = options.turns * at_once
                            said = ask(folder, port, prompt, at_once, answers, options.tokens)
                            line = {"case": f"serve-answers-{prompt}", "implementation": name}
                            line |= {"at_once": at_once, "answers": answers}
                            line |= {"tokens": options.tokens}
                            line |= {key: round(said[key], 3) for key in KEPT}
                            line |= {"peak_memory_bytes": most_memory(process)}
                            here = record.here()
                            here["versions"] |= VERSION
                            line |= {"dtype": options.answer_dtype, **here}
                            record.write(line, options.records)
                            print({key: line[key] for key in list(line)[:9]}, flush=True)


def main() -> None:
    parser = record.parser(__doc__)
    numbers: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument("--lengths", default=[512, 2048], help="keys before one token", **numbers)
    parser.add_argument("--prompts", default=[512], help="keys of a prefill", **numbers)
    parser.add_argument("--answers", default=[], help="prompts of whole answers", **numbers)
    parser.add_argument("--at-once", default=[1, 8], help="requests at a time", **numbers)
    parser.add_argument("--sequences", default=[1, 8], help="in a decode step", **numbers)
    parser.add_argument("--dtypes", default=["float32", "bfloat16"], nargs="*")
    parser.add_argument("--answer-dtype", default="float32", help="of whole answers")
    parser.add_argument("--tokens", type=int, default=32, help="of a whole answer")
    parser.add_argument("--turns", type=int, default=2, help="answers of each client in a round")
    parser.add_argument("--rounds", type=int, default=3, help="of whole answers")
    options = parser.parse_args()
    current_platform.import_kernels()
    with torch.inference_mode():
        for dtype in options.dtypes:
            for S in options.lengths:
                for B in options.sequences:
                    attention_alone(B, 1, S, dtype, options)
            for S in options.prompts:
                attention_alone(1, S, S, dtype, options)
    if options.answers:
        whole_answers(options)


if __name__ == "__main__":
    main()
