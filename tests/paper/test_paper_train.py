"""Training with the paper's recipe: what a run computes and leaves, continued and in two
processes too, and what it refuses."""

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainerCallback, set_seed

from interrupting import Stop, StopAt, torchrun
from linbias.models import load as load_model
from linbias.paper.blocks import batch_order, block_tokens, blocks
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.paper.step import NAG, SeedEachStep
from linbias.paper.store import read_ids, write_ids
from linbias.paper.train import PaperRun, train
from lm_training import history, losses, metrics
from paper_training import (
    MODEL,
    ORIGINAL,
    RECIPE,
    SMOOTH,
    KeepMomentum,
    assert_same_run,
    train_into,
)


def test_a_step_is_what_the_paper_says_bit_for_bit(paper_data, paper_run):
    """The run again, without Trainer: every logged number and the weights at the end."""
    set_seed(RECIPE.seed)
    config = PaperConfig(**MODEL, vocab_size=48, position="alibi", train_length=16)
    model = PaperForCausalLM(config).train()
    optimizer = NAG(model.parameters(), momentum=0.99)
    ids = read_ids(paper_data / "train")
    lines, schedule = history(paper_run), [RECIPE.learning_rate_after(n) for n in range(14)]
    steps = [
        order[first : first + 3]
        for epoch in (1, 2, 3)
        for order in [batch_order(len(ids), 16, 64, seed=1, epoch=epoch)]
        for first in range(0, len(order), 3)
    ][:14]
    stream = torch.from_numpy(np.concatenate([[2], ids]).astype(np.int64))
    for n, step in enumerate(steps):
        torch.manual_seed(RECIPE.seed + n)
        num_tokens = sum(min(16, len(ids) - 16 * block) for batch in step for block in batch)
        total = torch.tensor(0.0)
        for batch in step:
            reads = [stream[16 * b : min(16 * b + 16, len(ids))] for b in batch]
            predicted = [stream[16 * b + 1 : 16 * b + 17] for b in batch]
            pad = torch.nn.utils.rnn.pad_sequence
            inputs, targets = pad(reads, True, 1), pad(predicted, True, -100)
            loss = model(inputs, targets=targets, num_items_in_batch=num_tokens).loss
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = schedule[n]
        optimizer.step()
        optimizer.zero_grad()
        logged = {"step": n + 1, "loss": total.item(), "grad_norm": norm.item()}
        assert lines[n].items() >= {**logged, "learning_rate": schedule[n]}.items()
    sizes = [min(16, len(ids) - 16 * b) for step in steps for batch in step for b in batch]
    assert (len(lines), metrics(paper_run)["tokens"]) == (14, sum(sizes))
    kept = torch.load(paper_run.parent / "momentum.pt", weights_only=True)
    assert kept["param_groups"][0]["lr_old"] == schedule[13]
    for index, p in enumerate(model.parameters()):
        momentum = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(kept["state"][index]["momentum_buffer"], momentum)


def test_history_and_metrics_describe_the_run(paper_run):
    lines, measured = history(paper_run), metrics(paper_run)
    validated = [line for line in lines if line["validation_loss"] is not None]
    assert [line["step"] for line in validated] == [4, 8, 12, 14]
    best = min(validated, key=lambda line: line["validation_loss"])
    assert measured["best_step"] == best["step"]
    assert measured["valid_loss_base2"] == best["validation_loss"] / math.log(2)
    assert measured["valid_ppl"] == 2 ** measured["valid_loss_base2"]
    assert measured["loss_base2"] == lines[-1]["loss"] / math.log(2)
    assert measured["ppl"] == 2 ** measured["loss_base2"]
    assert (measured["steps"], measured["num_processes"]) == (14, 1)
    assert {path.name for path in paper_run.iterdir()} == {
        *("recipe.json", "history.jsonl", "metrics.json", "dict.txt"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("config.json", "generation_config.json", "model.safetensors"),
    }


def test_result_loads_by_auto_classes_and_has_every_weight_once(paper_data, paper_run):
    model = load_model(paper_run)
    assert isinstance(model, PaperForCausalLM)
    config = model.config
    assert (config.train_length, config.vocab_size, config.use_cache) == (16, 48, True)
    assert metrics(paper_run)["num_parameters"] == model.num_parameters()
    names = {name for name, _ in model.named_parameters()}
    assert set(load_file(paper_run / "model.safetensors")) == names
    assert (paper_run / "dict.txt").read_bytes() == (paper_data / "dict.txt").read_bytes()
    # The validation loss is the mean over all ids: blocks of 16 in batches of 4, and 8 ids more.
    ids, total = read_ids(paper_data / "valid"), 0.0
    for start, stop in blocks(len(ids), 16):
        read, targets = (torch.from_numpy(part)[None] for part in block_tokens(ids, start, stop))
        total += model(input_ids=read, targets=targets, num_items_in_batch=1).loss.item()
    bits = total / len(ids) / math.log(2)
    assert metrics(paper_run)["valid_loss_base2"] == pytest.approx(bits, rel=1e-5)


class KeepWeights(TrainerCallback):
    """The weights at each validation."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluate(self, args, state, control, model, **_) -> None:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.by_step[state.global_step] = weights


@pytest.mark.thorough
def test_best_model_is_kept_and_the_last_where_nothing_is_validated(paper_data, tmp_path):
    keep = KeepWeights()
    rising = replace(RECIPE, learning_rate=30.0, min_learning_rate=30.0, warmup_steps=13, clip=1.0)
    output = train_into(paper_data, tmp_path / "rising", rising, callbacks=[keep])
    best = metrics(output)["best_step"]
    assert best < 14 and len(keep.by_step) == 4
    kept = load_file(output / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in keep.by_step[best].items())

    blind = replace(rising, validate_steps=0)
    output = train_into(paper_data, tmp_path / "blind", blind)
    last = load_file(output / "model.safetensors")
    assert all(torch.equal(last[name], value) for name, value in keep.by_step[14].items())
    assert "valid_ppl" not in metrics(output)


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_validation_loss_is_that_of_the_originals_trainer(tmp_path):
    """It drops two tail terms, so that it says 5.291 where eval_lm says 5.295."""
    from linbias.paper.checkpoint import load

    golden = json.loads((ORIGINAL / "train" / "train_log_C.json").read_text())[-1]
    recipe = replace(RECIPE, length=64, max_tokens=4096)
    data = shutil.copytree(ORIGINAL / "data" / "wikitext-2-v1024", tmp_path / "data")
    for end in ("bin", "idx"):  # nothing is trained, but a run has a text to train on
        shutil.copy(data / f"valid.{end}", data / f"train.{end}")
    run = PaperRun(recipe, data, tmp_path / "run")
    trainer = run.trainer([])
    trainer.model = load(ORIGINAL / "ckpt" / "ckpt_C_12heads_vocab1024.pt")
    run.publish = lambda trainer: None
    trainer.remove_callback(PrinterCallback)
    bits = trainer.evaluate()["eval_loss"] / math.log(2)
    assert (round(bits, 3), round(2**bits, 2)) == (golden["valid_loss_base2"], golden["valid_ppl"])


@pytest.mark.thorough
@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_first_steps_lose_what_those_of_the_original_lose(tmp_path):
    """The same blocks in the same order; only the initial weights and dropout are other draws."""
    golden = json.loads((ORIGINAL / "train" / "train_log_A.json").read_text())
    recipe = replace(
        RECIPE,
        length=64,
        model={
            **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8},
            **{"intermediate_size": 128, "cutoffs": [2000, 6000]},
        },
        max_tokens=1024,
        batches_per_step=1,
        steps=600,
        warmup_steps=60,
        validate_steps=0,
    )
    data, stop = ORIGINAL / "data" / "wikitext-2", StopAt(25)
    with pytest.raises(Stop):
        train(data, tmp_path, recipe, progress=False, callbacks=[stop])
    ours, theirs = history(tmp_path), golden[:25]
    assert [line["step"] for line in ours] == [line["update"] for line in theirs]
    for line, before in zip(ours[1:], theirs, strict=False):
        assert float(f"{line['learning_rate']:.6g}") == before["lr_for_next_update"]

    def means(lines, name):
        return np.mean([line[name] for line in lines])

    bits = means(ours, "loss") / math.log(2)
    assert abs(bits / means(theirs, "loss_base2") - 1) < 0.02
    assert abs(means(ours, "grad_norm") / means(theirs, "gnorm") - 1) < 0.15


# Interrupted, or in several processes


def test_an_interrupted_run_ends_like_an_unbroken_one(paper_run, paper_data, tmp_path):
    output = tmp_path / "run"
    for step in (3, 7, 12):  # before the first checkpoint, and after each
        with pytest.raises(Stop):
            train_into(paper_data, output, callbacks=[StopAt(step)])
        assert not (output / "metrics.json").exists()
    train_into(paper_data, output, callbacks=[KeepMomentum(output)])
    assert_same_run(output, paper_run)
    files = [folder.parent / "momentum.pt" for folder in (output, paper_run)]
    ours, theirs = (torch.load(file, weights_only=True) for file in files)
    assert ours["param_groups"] == theirs["param_groups"]  # lr_old is there
    for index, state in theirs["state"].items():
        assert torch.equal(ours["state"][index]["momentum_buffer"], state["momentum_buffer"])


def test_a_result_that_was_deleted_is_made_again(paper_data, tmp_path):
    recipe = replace(RECIPE, steps=2, warmup_steps=1, validate_steps=0)
    weights = train_into(paper_data, tmp_path / "run", recipe) / "model.safetensors"
    made = weights.read_bytes()
    weights.unlink()
    train(paper_data, tmp_path / "run", recipe, progress=False)
    assert weights.read_bytes() == made


IN_EACH_PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from torch import distributed
from interrupting import Stop, StopAt
from linbias.paper.train import train
from paper_training import SMOOTH

data, folder = map(Path, sys.argv[1:])
train(data, folder / "ddp", SMOOTH, progress=False)
for name, change in {"fsdp": {"fsdp": {}}, "shards": {"context_parallel": 2}}.items():
    recipe = replace(SMOOTH, **change)
    train(data, folder / name, recipe, progress=False)
    broken = folder / f"resumed-{name}"
    try:
        train(data, broken, recipe, progress=False, callbacks=[StopAt(7)])
    except Stop:
        train(data, broken, recipe, progress=False)
distributed.destroy_process_group()
"""


@pytest.mark.processes
def test_two_processes_train_the_model_of_one(paper_data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_EACH_PROCESS)
    done = torchrun(script, paper_data, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "missing keys" not in done.stderr
    alone = train_into(paper_data, tmp_path / "alone", SMOOTH)
    for kind in ("ddp", "fsdp", "shards"):
        for line, theirs in zip(losses(alone), losses(tmp_path / kind), strict=True):
            assert theirs == pytest.approx(line, rel=1e-4)
        weights = load_file(tmp_path / kind / "model.safetensors")
        for name, value in load_file(alone / "model.safetensors").items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0)
    for kind in ("fsdp", "shards"):
        assert_same_run(tmp_path / f"resumed-{kind}", tmp_path / kind)
    with pytest.raises(ValueError, match="num_processes is 2 there and 1 here"):
        train(paper_data, tmp_path / "ddp", SMOOTH, progress=False)


# What is refused


def test_other_recipe_and_other_data_are_refused_with_the_difference(
    paper_data, paper_run, tmp_path
):
    other = replace(RECIPE, learning_rate=0.5, model={**MODEL, "dropout": 0.0})
    rate, dropout = (
        "learning_rate is 1.0 there and 0.5",
        "recipe.model.dropout is None there and 0.0",
    )
    with pytest.raises(ValueError, match=rf"recipe\.{rate} here; {dropout} here"):
        train(paper_data, paper_run, other, progress=False)
    data = shutil.copytree(paper_data, tmp_path / "data")
    write_ids(data / "train", [[4, 5]])
    with pytest.raises(ValueError, match=r"data\.train\.bin is '\w+' there and '\w+' here"):
        train(data, paper_run, RECIPE, progress=False)


BAD_RUNS = [
    ("precision 'fp16' must have a GPU", {"precision": "fp16"}),
    (r"model must be made of PaperConfig's fields, got \['depth'\]", {"model": {"depth": 3}}),
    ("PaperConfig: cutoffs must be ids that cut", {"model": {"cutoffs": [20000, 60000]}}),
    ("PaperConfig: position must be one of", {"position": "learned"}),
]


@pytest.mark.parametrize(("message", "change"), BAD_RUNS)
def test_bad_run_is_refused_before_anything_is_written(message, change, paper_data, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(paper_data, tmp_path / "run", replace(RECIPE, **change), progress=False)
    assert not (tmp_path / "run").exists()


def test_several_gpus_in_one_process_are_refused(paper_data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"process of its own, got 1 for 4 .*--nproc-per-node 4"):
        train(paper_data, tmp_path, replace(RECIPE, device="auto"), progress=False)


def test_batches_that_cannot_be_shared_are_refused(paper_data, tmp_path, monkeypatch):
    monkeypatch.setattr("linbias.lm.loop.Sharing.by", lambda *_: SimpleNamespace(of=2))
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3"):
        train(paper_data, tmp_path, RECIPE, progress=False)


def test_each_shard_of_a_sequence_draws_its_own_dropout():
    def drawn(shard: int) -> list[float]:
        state = SimpleNamespace(global_step=3)
        SeedEachStep(1, shard).on_step_begin(None, state, None)  # type: ignore[arg-type]
        return torch.rand(2).tolist()

    torch.manual_seed(1 + 3)
    assert torch.rand(2).tolist() == drawn(0)
    assert drawn(1) == drawn(1) != drawn(0)


def test_damaged_data_is_refused_before_anything_is_written(paper_data, tmp_path):
    data = shutil.copytree(paper_data, tmp_path / "data")
    write_ids(data / "valid", [[48]])
    with pytest.raises(ValueError, match=r"valid\.bin must hold ids in .* got 48"):
        train(data, tmp_path / "run", RECIPE)
    write_ids(data / "train", [])
    with pytest.raises(ValueError, match=r"data must have tokens, got none in .*train\.bin"):
        train(data, tmp_path / "run", RECIPE)
    assert not (tmp_path / "run").exists()
