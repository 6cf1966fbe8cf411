"""What users put around a model, ours or fused: PEFT, pipelines, quantisation."""

import copy
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel, pipeline

from linbias.data.tokenizers import byte_tokenizer
from linbias.models import LinbiasConfig, LinbiasForCausalLM, fuse, install

IDS = torch.tensor([[1, 5, 3, 2, 7, 11]])


def fused() -> PreTrainedModel:
    return fuse(BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_head=4, n_layer=2)))


def own() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LinbiasForCausalLM(LinbiasConfig(**sizes))


MODELS = {"fused": (fused, "query_key_value"), "own": (own, "qkv")}
each_model = pytest.mark.parametrize(("make", "projection"), MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def library(name: str) -> Any:
    """A module, or a test that is skipped."""
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


@pytest.mark.filterwarnings("ignore")
@each_model
def test_lora_trains_and_merges(make, projection):
    peft = library("peft")
    model = make().eval()
    before = model(IDS).logits
    config = peft.LoraConfig(target_modules=[projection], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(IDS).logits, before)
    adapted.train()(IDS, labels=IDS).loss.backward()
    trained = {name: x for name, x in adapted.named_parameters() if x.requires_grad}
    assert trained and all("lora" in name for name in trained)
    for name, x in trained.items():
        if "lora_B" in name:
            assert x.grad.abs().max() > 0
            x.data += 10 * x.grad
    changed = adapted.eval()(IDS).logits
    assert (changed - before).abs().max() > 1e-4
    torch.testing.assert_close(adapted.merge_and_unload()(IDS).logits, changed)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@each_model
def test_int8_weights_are_near(make, projection):
    quantization = library("torchao.quantization")
    model = make().eval()
    before = model(IDS).logits
    weights = dict(model.named_parameters())
    narrow = copy.deepcopy(model)
    quantization.quantize_(narrow, quantization.Int8WeightOnlyConfig())
    (name, layer) = next(x for x in narrow.named_modules() if x[0].endswith(projection))
    assert type(layer.weight) is not type(weights[f"{name}.weight"])
    error = (narrow(IDS).logits - before).abs().max()
    assert 0 < error < 0.02 * before.abs().max()


@each_model
def test_a_pipeline_writes_what_generate_does(make, projection, tmp_path):
    model = make().eval()
    byte_tokenizer().save(tmp_path)
    model.save_pretrained(tmp_path)
    install()
    options = {"max_new_tokens": 5, "do_sample": False}
    write = pipeline("text-generation", model=str(tmp_path), device="cpu")
    expected = model.generate(torch.tensor([list(b"to be")]), **options)
    text = write.tokenizer.decode(expected[0])
    assert write("to be", **options)[0]["generated_text"] == text
    again = pipeline("text-generation", model=model, tokenizer=write.tokenizer, device="cpu")
    assert again("to be", **options)[0]["generated_text"] == text
