"""Tensor parallelism: processes that each hold some heads of a layer."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from linbias.models import LinbiasConfig, LinbiasForCausalLM
from linbias.torch import MultiheadAttention, attention

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
plan["out_proj"] = RowwiseParallel()

def refused(call, words):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)

x = distribute_tensor(torch.randn(1, 2, 3, 4), mesh)
refused(lambda: attention(x, x, x), "q must be a tensor of all its values, which a DTensor is not")

learned = {"variant": "asymmetric", "learned": True}
for options in ({}, learned, {"num_kv_heads": 2}, {"variant": "directional"}):
    torch.manual_seed(0)
    layer = MultiheadAttention(24, 4, batch_first=True, **options)
    if layer.learned:
        nn.init.uniform_(layer.log_right, -4, -1)
    x, mask = torch.randn(2, 7, 24), torch.randn(8, 7, 7)
    expected, masked = layer(x)[0], layer(x, attn_mask=mask)[0]
    parallelize_module(layer, mesh, plan)
    torch.testing.assert_close(layer(x)[0], expected)
    torch.testing.assert_close(layer(x, attn_mask=mask)[0], masked)
    assert len(layer.slopes) == 4
    refused(lambda: layer(x, need_weights=True), "need_weights must be False")

odd = parallelize_module(MultiheadAttention(24, 4, num_kv_heads=1, batch_first=True), mesh, plan)
refused(lambda: odd(x), "whose number divides num_heads 4 and num_kv_heads 1")

some = MultiheadAttention(24, 4, num_kv_heads=2, batch_first=True)
parallelize_module(some, mesh, {"q_proj": ColwiseParallel()})
refused(lambda: some(x), "must give all heads, or be split alike")

model = LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2))
parallelize_module(model, mesh, {"model.layers.*.attention.qkv": ColwiseParallel()})
refused(lambda: model(torch.tensor([[1, 2, 3]])), "qkv must give 96 numbers, got 48")
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_processes_that_share_the_heads_take_the_slopes_of_theirs(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "meet")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            errors = process.communicate(timeout=120)[1]
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
