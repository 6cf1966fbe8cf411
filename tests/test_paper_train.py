"""The paper's recipe: each part equals the original's, and an interrupted run an unbroken one."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from typer.testing import CliRunner, Result

import linbias.paper.train as train_module
from linbias import cli
from linbias.data.batches import batch_order
from linbias.data.dictionary import Dictionary
from linbias.data.store import read_ids, write_ids
from linbias.models.paper import PaperForCausalLM
from linbias.models.paper_config import PaperConfig
from linbias.paper.optimizer import NAG, cosine_lr
from linbias.paper.recipe import PRESETS, Recipe
from linbias.paper.train import train
from linbias.paper.trainer import Batches, PaperTrainer
from linbias.runs.checkpoints import write_whole

GOLDEN = Path(__file__).parent / "golden"
ORIGINAL = Path(__file__).resolve().parents[2] / "shared" / "golden" / "fairseq"

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "cutoffs": [12, 24],
    "adaptive_factor": 2.0,
}
# 63 blocks of 16 make 16 batches of 4, so 3 make an update and 6 updates a pass; the last of them
# has one batch to train on and two that are empty. 14 updates cover three passes. Neither
# save_every nor validate_every divides 14, and dropout makes the weights depend on the random state.
RECIPE = Recipe(
    length=16,
    model=MODEL,
    max_tokens=64,
    rows_multiple=1,
    batches_per_update=3,
    updates=14,
    warmup=3,
    precision="fp32",
    validate_every=4,
    save_every=5,
    log_every=1,
    device="cpu",
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Walks over 44 words, of which each has three likely successors."""
    folder = tmp_path_factory.mktemp("data")
    Dictionary.from_counts({f"word{i}": 100 - i for i in range(44)}).write(folder / "dict.txt")
    rng = np.random.default_rng(0)
    for name, length in {"train": 1000, "valid": 200}.items():
        ids = [2]
        while len(ids) < length:
            ids.append(4 + (5 * ids[-1] + int(rng.integers(3))) % 44)
        write_ids(folder / name, [length], [np.array(ids)])
    return folder


@pytest.fixture(scope="session")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "run"
    return train(data, output, RECIPE, progress=False, callbacks=[KeepMomentum(output)])


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.json").read_text())


# The optimizer and the schedule


def test_nag_takes_the_steps_of_the_original() -> None:
    golden = json.loads((GOLDEN / "nag_toy.json").read_text())
    params = [torch.nn.Parameter(torch.tensor(values)) for values in golden["params0"]]
    optimizer = NAG(params, lr=golden["construct_lr"], momentum=golden["momentum"])
    for step in golden["steps"]:
        for p, gradient in zip(params, step["raw_grads"], strict=True):
            p.grad = torch.tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_(params, golden["clip_norm"])
        assert norm.item() == step["grad_norm"]
        (group,) = optimizer.param_groups
        group["lr"] = step["lr"]
        optimizer.step()
        assert group["lr_old"] == step["lr_old_after"]
        for p, values, v in zip(params, step["params"], step["momentum_buffers"], strict=True):
            assert torch.equal(p.detach(), torch.tensor(values))
            assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.tensor(v))


def test_nag_is_nesterov_sgd_in_exact_arithmetic() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
    nag = NAG([ours], lr=1.0, momentum=0.9)
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.9, nesterov=True)
    for lr in (1e-7, 0.3, 1.0, 0.2, 0.75):
        gradient = torch.randn(7, dtype=torch.float64, generator=torch.manual_seed(round(9 * lr)))
        for p, optimizer in ((ours, nag), (theirs, sgd)):
            p.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
        buffer = -sgd.state[theirs]["momentum_buffer"] * lr
        torch.testing.assert_close(nag.state[ours]["momentum_buffer"], buffer, rtol=1e-13, atol=0)


def test_nag_computes_half_precision_in_float32_and_rounds_once() -> None:
    start, gradient = torch.randn(2, 100, dtype=torch.bfloat16, generator=torch.manual_seed(0))
    half, full = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    half.grad, full.grad = gradient, gradient.float()
    for p in (half, full):
        NAG([p], lr=0.1).step()
    assert torch.equal(half.detach(), full.detach().bfloat16())


def test_nag_decays_weights_and_leaves_those_without_a_gradient_alone() -> None:
    decayed, idle = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    decayed.grad = torch.zeros(1)
    optimizer = NAG([decayed, idle], lr=0.5, weight_decay=0.1)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (decayed.item(), idle.item()) == (pytest.approx(0.95), 1.0)
    assert idle not in optimizer.state


@pytest.mark.parametrize("flags", ["readme_flags", "checkpoint_A_flags"])
def test_schedule_has_the_values_of_the_original(flags: str) -> None:
    golden = json.loads((GOLDEN / "cosine_lr.json").read_text())[flags]
    flags = golden["cfg"]
    for n, value in golden["lr_after_n_updates"].items():
        lr = cosine_lr(
            int(n),
            init=flags["warmup_init_lr"],
            lr=flags["lr"][0],
            warmup=flags["warmup_updates"],
            period=flags["lr_period_updates"],
            min_lr=flags["min_lr"],
            t_mult=flags["t_mult"],
            shrink=flags["lr_shrink"],
        )
        assert lr == value, n


def test_preset_follows_the_schedule_of_the_readme() -> None:
    golden = json.loads((GOLDEN / "cosine_lr.json").read_text())["readme_flags"]["cfg"]
    recipe = PRESETS["L512"]
    assert golden == {
        "warmup_init_lr": recipe.warmup_init_lr,
        "lr": [recipe.lr],
        "min_lr": recipe.min_lr,
        "t_mult": recipe.t_mult,
        "lr_shrink": recipe.lr_shrink,
        "warmup_updates": recipe.warmup,
        "lr_period_updates": recipe.cosine_period,
        "max_update": recipe.updates,
    }


BAD_ARGUMENTS = [
    ("NAG: lr must be at least 0, got -1", NAG, {"params": [], "lr": -1}),
    (r"NAG: momentum must be in \[0, 1\), got 1", NAG, {"params": [], "momentum": 1}),
    ("NAG: weight_decay must be at least 0", NAG, {"params": [], "weight_decay": -0.1}),
    ("cosine_lr: n must be at least 0, got -1", cosine_lr, {"n": -1}),
    ("cosine_lr: warmup must be at least 0", cosine_lr, {"n": 0, "warmup": -1}),
    ("cosine_lr: period must be above 0, got 0", cosine_lr, {"n": 0, "period": 0}),
    ("cosine_lr: t_mult must be at least 1", cosine_lr, {"n": 0, "t_mult": 0.5}),
]


@pytest.mark.parametrize(("message", "function", "arguments"), BAD_ARGUMENTS)
def test_bad_argument_is_refused(message: str, function, arguments: dict[str, object]) -> None:
    if function is cosine_lr:
        arguments = {"init": 0, "lr": 1, "warmup": 0, "period": 9, "min_lr": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        function(**arguments)


# The batches


def test_every_id_is_predicted_once_per_pass_in_the_order_of_the_original() -> None:
    ids = np.arange(4, 104)

    def order(number: int) -> list[list[int]]:
        return batch_order(100, 7, 21, seed=1, epoch=number)

    batches = Batches(ids, 7, order, per_update=2, updates=6)
    assert batches.updates_per_pass == 3  # of 15 blocks in 5 batches
    assert [batches.num_targets(update) for update in range(3)] == [
        sum(int((batches[place]["targets"] >= 0).sum()) for place in (2 * update, 2 * update + 1))
        for update in range(3)
    ]
    for number in (0, 1):
        firsts = []
        for place in range(6 * number, 6 * number + 5):
            batch = batches[place]
            read, asked = batch["input_ids"], batch["targets"]
            assert torch.equal(read[:, 1:][asked[:, 1:] >= 0], asked[:, :-1][asked[:, 1:] >= 0])
            assert (asked[:, 0] - read[:, 0] == 1).logical_or(asked[:, 0] == 4).all()
            firsts.append([(int(first) - 4) // 7 for first in asked[:, 0]])
        assert firsts == order(number + 1)
        empty = batches[6 * number + 5]
        assert empty["targets"].tolist() == [[-100]]
        assert empty["num_items_in_batch"] == batches[6 * number + 4]["num_items_in_batch"]
    assert batches.num_tokens() == 200
    longer = Batches(ids, 7, order, per_update=2, updates=4)
    assert longer.num_tokens() == 100 + longer.num_targets(3)


# A run


def test_an_update_is_what_the_paper_says_bit_for_bit(data: Path, unbroken: Path) -> None:
    """The run again, without Trainer: every logged number and the weights at the end."""
    set_seed(RECIPE.seed)
    config = PaperConfig(**MODEL, vocab_size=48, position="alibi", train_length=16)
    model = PaperForCausalLM(config).train()
    optimizer = NAG(model.parameters(), momentum=0.99)
    ids, lines = read_ids(data / "train").tokens, [line for line in log(unbroken) if "lr" in line]
    schedule = [
        cosine_lr(n, init=1e-7, lr=1.0, warmup=3, period=11, min_lr=1e-4, t_mult=2, shrink=0.75)
        for n in range(15)
    ]
    updates = [
        order[first : first + 3]
        for epoch in (1, 2, 3)
        for order in [batch_order(len(ids), 16, 64, seed=1, epoch=epoch)]
        for first in range(0, len(order), 3)
    ][:14]
    stream = torch.from_numpy(np.concatenate([[2], ids]).astype(np.int64))
    for n, update in enumerate(updates):
        torch.manual_seed(RECIPE.seed + n)
        num_tokens = sum(min(16, len(ids) - 16 * block) for batch in update for block in batch)
        total = torch.tensor(0.0)
        for batch in update:
            reads = [stream[16 * b : min(16 * b + 16, len(ids))] for b in batch]
            asked = [stream[16 * b + 1 : 16 * b + 17] for b in batch]
            pad = torch.nn.utils.rnn.pad_sequence
            inputs, targets = pad(reads, True, 1), pad(asked, True, -100)
            loss = model(inputs, targets=targets, num_items_in_batch=num_tokens).loss
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = schedule[n]
        optimizer.step()
        optimizer.zero_grad()
        bits = total.item() / math.log(2)
        assert lines[n] == {
            "update": n + 1,
            "loss_base2": bits,
            "ppl": 2**bits,
            "gnorm": norm.item(),
            "lr": schedule[n + 1],
        }
    momentum = torch.load(unbroken.parent / "momentum.pt", weights_only=True)
    assert momentum["param_groups"][0]["lr_old"] == schedule[13]
    for index, p in enumerate(model.parameters()):
        assert torch.equal(
            momentum["state"][index]["momentum_buffer"], optimizer.state[p]["momentum_buffer"]
        )


class KeepMomentum(TrainerCallback):
    """Saves the optimizer's state at the end, beside the run's folder."""

    def __init__(self, output: Path) -> None:
        self.path = output.parent / "momentum.pt"

    def on_train_end(self, args, state, control, optimizer, **_) -> None:
        torch.save(optimizer.state_dict(), self.path)


def test_log_and_metrics_tell_the_run(unbroken: Path) -> None:
    lines, told = log(unbroken), metrics(unbroken)
    validated = [line for line in lines if "valid_ppl" in line]
    assert [line["update"] for line in lines if "lr" in line] == list(range(1, 15))
    assert [line["update"] for line in validated] == [4, 8, 12, 14]
    best = min(validated, key=lambda line: line["valid_loss_base2"])
    assert told["best_update"] == best["update"]
    assert told["valid_loss_base2"] == best["valid_loss_base2"]
    assert told["valid_ppl"] == 2 ** best["valid_loss_base2"]
    assert told["loss_base2"] == next(line for line in lines[::-1] if "lr" in line)["loss_base2"]
    assert (told["updates"], told["num_processes"]) == (14, 1)
    # Two passes, then a sixth of the blocks that are full and one batch with the short one.
    assert 2000 + 2 * 3 * 64 - 8 <= told["tokens"] <= 2000 + 2 * 3 * 64
    assert told["tokens_per_second"] == pytest.approx(told["tokens"] / told["seconds"])
    assert {path.name for path in unbroken.iterdir()} == {
        *("recipe.json", "log.jsonl", "metrics.json", "dict.txt"),
        *("config.json", "generation_config.json", "model.safetensors"),
    }


def test_result_loads_by_auto_classes_and_has_every_weight_once(
    data: Path, unbroken: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(unbroken)
    assert isinstance(model, PaperForCausalLM)
    config = model.config
    assert (config.train_length, config.vocab_size, config.use_cache) == (16, 48, True)
    assert metrics(unbroken)["num_parameters"] == model.num_parameters()
    assert set(load_file(unbroken / "model.safetensors")) == {
        n for n, _ in model.named_parameters()
    }
    assert (unbroken / "dict.txt").read_bytes() == (data / "dict.txt").read_bytes()


def test_finished_run_is_returned_as_it_is(
    data: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "PaperTrainer", None)
    before = {path: path.stat().st_mtime_ns for path in unbroken.iterdir()}
    assert train(data, unbroken, RECIPE) == unbroken
    assert {path: path.stat().st_mtime_ns for path in unbroken.iterdir()} == before


class KeepWeights(TrainerCallback):
    """The weights at each validation."""

    def __init__(self) -> None:
        self.by_update: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluate(self, args, state, control, model, **_) -> None:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.by_update[state.global_step] = weights


def test_best_model_is_kept_and_the_last_where_nothing_is_validated(
    data: Path, tmp_path: Path
) -> None:
    keep = KeepWeights()
    rising = replace(RECIPE, lr=30.0, min_lr=30.0, warmup=13, clip=1.0)
    output = train(data, tmp_path / "rising", rising, progress=False, callbacks=[keep])
    best = metrics(output)["best_update"]
    assert best < 14 and len(keep.by_update) == 4
    kept = load_file(output / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in keep.by_update[best].items())

    blind = replace(rising, validate_every=0)
    output = train(data, tmp_path / "blind", blind, progress=False)
    last = load_file(output / "model.safetensors")
    assert all(torch.equal(last[name], value) for name, value in keep.by_update[14].items())
    assert "valid_ppl" not in metrics(output)


def test_training_learns(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, updates=50, warmup=5, save_every=50, log_every=50)
    recipe = replace(recipe, model={**MODEL, "dropout": 0.0, "softmax_dropout": 0.0})
    told = metrics(train(data, tmp_path, recipe, progress=False))
    assert told["valid_loss_base2"] < 4.5  # of log2(44) = 5.5 at random and log2(3) at best


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_validation_loss_is_that_of_the_originals_trainer(tmp_path: Path) -> None:
    from linbias.paper.checkpoint import load

    golden = json.loads((ORIGINAL / "train" / "train_log_C.json").read_text())[-1]
    ids = read_ids(ORIGINAL / "data" / "wikitext-2-v1024" / "valid")
    recipe = replace(RECIPE, length=64, max_tokens=4096)
    trainer = PaperTrainer(
        recipe,
        lambda trainer: None,
        model=load(ORIGINAL / "ckpt" / "ckpt_C_12heads_vocab1024.pt"),
        args=train_module._arguments(recipe, tmp_path, 1),
        eval_dataset=train_module._validation_batches(recipe, ids),
    )
    trainer.remove_callback(train_module.PrinterCallback)
    bits = trainer.evaluate()["eval_loss"] / math.log(2)
    assert (round(bits, 3), round(2**bits, 2)) == (golden["valid_loss_base2"], golden["valid_ppl"])


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_first_updates_lose_what_those_of_the_original_lose(tmp_path: Path) -> None:
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
        batches_per_update=1,
        updates=600,
        warmup=60,
        validate_every=0,
    )
    with pytest.raises(Stop):
        train(
            *(ORIGINAL / "data" / "wikitext-2", tmp_path, recipe),
            progress=False,
            callbacks=[StopAt(25)],
        )
    ours, theirs = log(tmp_path), golden[:25]
    assert [line["update"] for line in ours] == [line["update"] for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert float(f"{line['lr']:.6g}") == other["lr_for_next_update"]
    for name, allowed in {"loss_base2": 0.02, "gnorm": 0.15}.items():
        mean, golden_mean = (np.mean([line[name] for line in lines]) for lines in (ours, theirs))
        assert abs(mean / golden_mean - 1) < allowed, name


# Interruptions


class Kill(TrainerCallback):
    """Kills its process, as `kill -9` would, at one event of one update."""

    def __init__(self, event: str, update: int) -> None:
        self.update = update
        setattr(self, event, self.look)

    def look(self, args, state, *_, **__) -> None:
        if state.global_step == self.update:
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(data: Path, output: Path, event: str, update: int) -> None:
    callbacks = []
    if event == "while saving":
        torch_save = torch.save

        def save_and_die(content: object, path: str) -> None:
            if path.endswith(f"checkpoint-{update}/scheduler.pt"):
                die()  # the model and the optimizer are written, the rest is not
            torch_save(content, path)

        torch.save = save_and_die
    elif event == "while publishing":
        os_replace = os.replace

        def replace_and_die(source: Path, target: Path) -> None:
            os_replace(source, target)
            if Path(target).name == "model.safetensors":
                die()

        os.replace = replace_and_die
    else:
        callbacks = [Kill(event, update)]
    train(data, output, RECIPE, progress=False, callbacks=callbacks)


def assert_same_run(folder: Path, other: Path) -> None:
    """The same weights and log bit for bit, and the same numbers but for time and memory."""
    for name in ("model.safetensors", "log.jsonl", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for name in ("loss_base2", "valid_loss_base2", "best_update", "tokens"):
        assert metrics(folder)[name] == metrics(other)[name]


@pytest.mark.parametrize(
    "deaths",
    [
        [("on_step_end", 1), ("while publishing", 4), ("while saving", 5), ("while saving", 10)],
        [("on_step_begin", 5), ("on_evaluate", 8), ("on_step_end", 11), ("on_train_end", 14)],
    ],
    ids=lambda deaths: ", ".join(f"{event} {update}" for event, update in deaths),
)
def test_killed_run_ends_like_an_unbroken_one(
    deaths: list[tuple[str, int]], unbroken: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    context = multiprocessing.get_context("forkserver")  # imports once, dies often
    context.set_forkserver_preload(["linbias.paper.train"])
    for death in deaths:
        process = context.Process(target=train_until_killed, args=(data, output, *death))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (output / "metrics.json").exists()
    train(data, output, RECIPE, progress=False, callbacks=[KeepMomentum(output)])
    assert_same_run(output, unbroken)
    ours, theirs = (
        torch.load(folder.parent / "momentum.pt", weights_only=True)
        for folder in (output, unbroken)
    )
    assert ours["param_groups"] == theirs["param_groups"]  # lr_old is there
    for index, state in theirs["state"].items():
        assert torch.equal(ours["state"][index]["momentum_buffer"], state["momentum_buffer"])


@pytest.mark.parametrize(
    "full_at", ["checkpoint-10/optimizer.pt", "checkpoint-10/model.safetensors", ".partial"]
)
def test_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_from_it(
    full_at: str, unbroken: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_utils

    def fail_if_full(path: object) -> None:
        full = full_at in str(path) and (tmp_path / "checkpoints" / "checkpoint-5").exists()
        if full:
            Path(str(path)).write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

    torch_save, tensors_save = torch.save, modeling_utils.safe_save_file

    def save(content: object, path: str) -> None:
        fail_if_full(path)
        torch_save(content, path)

    def save_tensors(content: object, path: str, **kwargs: object) -> None:
        fail_if_full(path)
        tensors_save(content, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        patch.setattr(modeling_utils, "safe_save_file", save_tensors)
        with pytest.raises(OSError, match=r"train: could not write to .*No space left") as error:
            train(data, tmp_path, RECIPE, progress=False)
        assert str(error.value).count("could not write") == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path)  # the best of the first updates
    assert_same_run(train(data, tmp_path, RECIPE, progress=False), unbroken)


# What is refused


def test_other_recipe_and_other_data_are_refused_with_the_difference(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    other = replace(RECIPE, lr=0.5, model={**MODEL, "dropout": 0.0})
    with pytest.raises(ValueError, match=r"recipe\.lr is 1\.0 there and 0\.5 here") as error:
        train(data, unbroken, other, progress=False)
    assert "recipe.model.dropout is None there and 0.0 here" in str(error.value)
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_ids(tmp_path / "train", [2], [np.array([4, 5])])
    with pytest.raises(ValueError, match=r"data\.train\.bin is '\w+' there and '\w+' here"):
        train(tmp_path, unbroken, RECIPE, progress=False)


def test_folder_of_something_else_is_refused_and_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="train: output must be empty or hold this run"):
        train(data, tmp_path, RECIPE, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


BAD_RUNS = [
    ("precision 'fp16' must have a GPU", {"precision": "fp16"}),
    (r"model must be made of PaperConfig's fields, got \['depth'\]", {"model": {"depth": 3}}),
    ("PaperConfig: cutoffs must be ids that cut", {"model": {"cutoffs": [20000, 60000]}}),
    ("PaperConfig: position must be one of", {"position": "learned"}),
]


@pytest.mark.parametrize(("message", "change"), BAD_RUNS)
def test_bad_run_is_refused_before_anything_is_written(
    message: str, change: dict[str, object], data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path / "run", replace(RECIPE, **change), progress=False)
    assert not (tmp_path / "run").exists()


def test_several_gpus_in_one_process_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"process of its own, got 1 for 4 .*--nproc-per-node 4"):
        train(data, tmp_path, replace(RECIPE, device="auto"), progress=False)


def test_batches_that_cannot_be_shared_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = SimpleNamespace(num_processes=2)
    monkeypatch.setattr(train_module, "PartialState", lambda **_: two)
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3"):
        train(data, tmp_path, RECIPE, progress=False)


def test_a_result_that_was_deleted_is_made_again(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, updates=2, warmup=1, validate_every=0)
    weights = train(data, tmp_path / "run", recipe, progress=False) / "model.safetensors"
    made = weights.read_bytes()
    weights.unlink()
    train(data, tmp_path / "run", recipe, progress=False)
    assert weights.read_bytes() == made


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_damaged_settings_file_is_named(data: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(ValueError, match=r"recipe\.json"):
        train(data, tmp_path, RECIPE, progress=False)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "replace", lambda *_: full(_))
    with pytest.raises(OSError, match=r"No space left.*scores\.npz"):
        write_whole(tmp_path / "scores.npz", b"x")
    with pytest.raises(OSError, match=r"No space left.*dict\.txt"):
        Dictionary.from_counts({"a": 1}).write(tmp_path / "dict.txt")
    assert not list(tmp_path.iterdir())


def test_damaged_data_is_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_ids(tmp_path / "valid", [1], [np.array([48])])
    with pytest.raises(ValueError, match=r"valid\.bin must hold ids in .* got 48"):
        train(tmp_path, tmp_path / "run", RECIPE)
    os.truncate(tmp_path / "train.bin", 100)
    with pytest.raises(ValueError, match=r"train\.bin is truncated"):
        train(tmp_path, tmp_path / "run", RECIPE)
    write_ids(tmp_path / "train", [], [])
    with pytest.raises(ValueError, match=r"data must have tokens, got none in .*train\.bin"):
        train(tmp_path, tmp_path / "run", RECIPE)
    assert not (tmp_path / "run").exists()


def test_loss_that_is_not_finite_ends_the_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train: loss must stay finite, got nan"):
        train(data, tmp_path, replace(RECIPE, lr=1e30, warmup=0), progress=False)


BAD_RECIPES = [
    ("length must be at least 1, got 0", {"length": 0}),
    ("max_tokens must be at least 16, got 15", {"max_tokens": 15}),
    ("rows_multiple must be at least 1", {"rows_multiple": 0}),
    ("batches_per_update must be at least 1", {"batches_per_update": 0}),
    ("updates must be at least 1, got 0", {"updates": 0}),
    ("period must be at least 1, got 0", {"period": 0}),
    ("save_every must be a multiple of log_every, 2, got 5", {"log_every": 2}),
    ("warmup must be at least 0", {"warmup": -1}),
    ("validate_every must be at least 0", {"validate_every": -1}),
    ("lr must be above 0, got 0", {"lr": 0}),
    ("clip must be above 0", {"clip": 0}),
    ("t_mult must be at least 1", {"t_mult": 0.5}),
    (r"momentum must be in \[0, 1\), got 1", {"momentum": 1}),
    ("precision must be one of .* got 'fp8'", {"precision": "fp8"}),
    ("device must be 'auto' or 'cpu', got 'tpu'", {"device": "tpu"}),
    (r"model must be without \['vocab_size'\]", {"model": {"vocab_size": 3}}),
]


@pytest.mark.parametrize(("message", "change"), BAD_RECIPES)
def test_bad_recipe_is_refused(message: str, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"Recipe: {message}"):
        replace(RECIPE, **change)


# Recipes


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model_and_reads_its_blocks(name: str) -> None:
    recipe = PRESETS[name]
    vocab_size = 267_744 if name.startswith("L") else 33_280
    PaperConfig(
        **recipe.model,
        vocab_size=vocab_size,
        position=recipe.position,
        train_length=recipe.length,
    )
    assert recipe.warmup < recipe.updates
    if name.startswith("L"):
        assert recipe == replace(
            PRESETS["L512"],
            length=int(name[1:]),
            max_tokens=recipe.max_tokens,
            batches_per_update=recipe.batches_per_update,
        )
        assert recipe.max_tokens * recipe.batches_per_update == 9216 * 8
        order = batch_order(
            100_000, recipe.length, recipe.max_tokens, 1, 1, multiple=recipe.rows_multiple
        )
        # --required-batch-size-multiple 1: as many rows as the tokens allow
        assert max(map(len, order)) == recipe.max_tokens // recipe.length


def test_recipe_of_another_duration_keeps_the_shares_of_warmup_and_cosine() -> None:
    shorter = PRESETS["L512"].lasting(2860)
    assert (shorter.updates, shorter.warmup, shorter.cosine_period) == (2860, 160, 2700)
    assert replace(RECIPE, period=7).lasting(28).period == 14


def test_bfloat16_trains_float32_weights(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, precision="bf16", updates=4)
    output = train(data, tmp_path, recipe, progress=False)
    weights = load_file(output / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_progress_is_one_bar_on_stderr_or_nothing(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(data, tmp_path / "quiet", replace(RECIPE, updates=4), progress=False)
    assert capfd.readouterr() == ("", "")
    train(data, tmp_path / "loud", replace(RECIPE, updates=4))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("training") == 1
    assert "4/4" in err and "tokens/s" in err


# The command line

SMALL = [
    *("--set", "hidden_size=32", "--set", "num_hidden_layers=1", "--set", "num_attention_heads=2"),
    *("--set", "intermediate_size=32", "--set", "cutoffs=[10,20]"),
]


def linbias(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["paper", *map(str, words)], env={"COLUMNS": "120"})


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    words = np.random.default_rng(0).integers(40, size=900)
    paths = [folder / f"wiki.{split}.tokens" for split in ("train", "valid", "test")]
    for path, part in zip(paths, np.split(words, [500, 700]), strict=True):
        path.write_text(
            "\n".join(" ".join(f"w{n}" for n in line) for line in part.reshape(-1, 20))
        )
    return paths


@pytest.fixture(scope="session")
def whole_path(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("path") / "out"
    words = ["run", *texts, "-o", folder, "--updates", 3, "--workers", 1, *SMALL, "-q", "--json"]
    result = linbias(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    told = json.loads(result.stdout)
    again = json.loads(linbias(*words).stdout)  # from what is there, and so at once
    for one in (*told["evaluations"], *again["evaluations"]):
        del one["tokens_per_second"], one["peak_memory_bytes"]
    assert again == told
    return folder, told


def test_run_goes_from_texts_to_perplexity(whole_path: tuple[Path, dict]) -> None:
    folder, told = whole_path
    assert told["training"]["updates"] == 3
    assert [(r["subset"], r["length"], r["context_window"]) for r in told["evaluations"]] == [
        *(("valid", 128, 0), ("valid", 128, 64), ("valid", 512, 0), ("valid", 512, 256)),
        *(("test", 128, 0), ("test", 128, 64), ("test", 512, 0), ("test", 512, 256)),
    ]
    assert {r["num_tokens"] for r in told["evaluations"]} == {210}
    assert (folder / "data" / "dict.txt").exists() and (folder / "model" / "log.jsonl").exists()


def test_run_of_other_texts_is_refused(whole_path: tuple[Path, dict], texts: list[Path]) -> None:
    result = linbias("run", texts[0], texts[2], texts[1], "-o", whole_path[0], *SMALL)
    assert result.exit_code == 2
    assert "run: output must not be another run's" in result.stderr


def test_texts_that_fail_leave_the_folder_to_others(texts: list[Path], tmp_path: Path) -> None:
    words, folder = (
        ["-o", tmp_path / "out", "--updates", 3, "--workers", 1, *SMALL, "-q"],
        tmp_path,
    )
    (folder / "empty").write_text("")
    (folder / "latin").write_bytes(b"caf\xe9")
    for wrong in (folder / "empty", folder / "latin"):
        refused = linbias("run", texts[0], texts[1], wrong, *words)
        assert refused.exit_code == 2 and str(wrong) in " ".join(refused.stderr.split())
    assert linbias("run", *texts, *words).exit_code == 0


def test_data_with_other_words_than_the_model_is_refused(
    whole_path: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, _ = whole_path
    data = shutil.copytree(folder / "data", tmp_path / "data")
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    shutil.copy(folder / "data" / "dict.txt", folder / "model" / "dict.txt")
    refused = linbias("evaluate", folder / "model", data, "-q")
    assert refused.exit_code == 2
    assert "evaluate: data must have the words of" in " ".join(refused.stderr.split())


def test_steps_one_by_one_are_the_whole_path(
    whole_path: tuple[Path, dict], texts: list[Path], tmp_path: Path
) -> None:
    folder, told = whole_path
    data, home = tmp_path / "data", tmp_path / "model"
    given = zip(("--train", "--valid", "--test"), texts, strict=True)
    made = linbias(
        "prepare", *(word for pair in given for word in pair), "-o", data, "--workers", 1, "--json"
    )
    assert json.loads(made.stdout)["valid"]["num_ids"] == 210
    words = ["train", data, "-o", home, "--preset", "tiny", "--updates", 3, *SMALL, "-q"]
    shown = linbias(*words)
    assert shown.exit_code == 0, shown.stderr
    assert "3 updates" in shown.stdout and f"model in {home}" in shown.stdout
    for name in ("model.safetensors", "log.jsonl"):
        assert (home / name).read_bytes() == (folder / "model" / name).read_bytes()
    expected = told["evaluations"][5]
    words = ["evaluate", home, data, "--subset", "test", "--context-window", 64, "-q"]
    shown = linbias(*words)
    assert shown.stdout.splitlines()[-1] == expected["line"]
    assert f"{expected['perplexity']:,.2f}" in shown.stdout.splitlines()[-3]
    result = json.loads(linbias(*words, "--json").stdout)
    assert result["perplexity"] == expected["perplexity"]


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_checkpoint_of_the_original_is_evaluated_and_converted(tmp_path: Path) -> None:
    checkpoint, data = ORIGINAL / "ckpt" / "ckpt_A_8heads.pt", ORIGINAL / "data" / "slices"
    options = ["--subset", "test", "--length", 128, "-q"]
    line = linbias("evaluate", checkpoint, data, *options).stdout.splitlines()[-1]
    (golden,) = (
        run
        for run in json.loads((ORIGINAL / "eval" / "perplexities.json").read_text())
        if (run["text"], run["l"], run["context_window"]) == ("slice4k", 128, 0)
        and "ckpt_A" in run["checkpoint"]
    )
    bits, perplexity = golden["repo_loss_base2"], golden["repo_perplexity"]
    assert line == f"Loss (base 2): {bits:.4f}, Perplexity: {perplexity:.2f}"
    made = linbias("convert", checkpoint, tmp_path / "A", "--dict", data / "dict.txt")
    assert made.exit_code == 0, made.stderr
    assert linbias("evaluate", tmp_path / "A", data, *options).stdout.splitlines()[-1] == line


ERRORS = [
    (["prepare", "-o", "{tmp}/x"], "prepare: give either texts or --dataset, and not both"),
    (["prepare", "--dataset", "x", "-o", "{tmp}/x"], "name must be one of wikitext-2"),
    (["prepare", "--train", "{tmp}/none", "-o", "{tmp}/x"], "no such file"),
    (["train", "{tmp}", "-o", "{tmp}/x", "--preset", "L7"], "--preset: must be one of L64, L128"),
    (["train", "{tmp}", "-o", "{tmp}/x", "--preset", "tiny"], "folder must hold dict.txt"),
    (["train", "{data}", "-o", "{tmp}/x", "--preset", "tiny"], "cutoffs must be ids that cut"),
    (["train", "{data}", "-o", "{tmp}/x", "--device", "cpu"], "precision 'fp16' must have a GPU"),
    (["train", "{data}", "-o", "{tmp}/x", "--set", "a"], "--set: must be NAME=VALUE, got 'a'"),
    (["train", "{data}", "-o", "{tmp}/x", "--length", "0"], "Recipe: length must be at least 1"),
    (["train", "{data}", "-o", "{tmp}/x", "--updates", "0"], "Recipe: updates must be at least 1"),
    (["convert", "{tmp}/none.pt", "{tmp}/x"], "path must be a file"),
    (["evaluate", "{tmp}/none.pt", "{data}"], "path must be a file"),
    (["evaluate", "{model}", "{tmp}"], "folder must hold dict.txt"),
    (["evaluate", "{model}", "{data}", "--subset", "x"], "split must be one of"),
    (["evaluate", "{model}", "{data}", "--length", "0"], "length must be at least 1, got 0"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_an_error_is_one_line(
    words: list[str], message: str, whole_path: tuple[Path, dict], tmp_path: Path
) -> None:
    places = {"tmp": tmp_path, "data": whole_path[0] / "data", "model": whole_path[0] / "model"}
    result = linbias(*(word.format(**places) for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert re.fullmatch(r"error: .+\n", result.stderr)
    assert result.stdout == ""


def test_help_names_every_command() -> None:
    shown = linbias("--help").stdout
    for command in ("prepare", "train", "convert", "evaluate", "run"):
        assert command in shown
        assert linbias(command, "--help").exit_code == 0
    assert linbias("nonsense").exit_code == 2


# Several processes

IN_EACH_PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from torch import distributed
from test_paper_train import RECIPE, SMOOTH, Stop, StopAt, train

data, folder = map(Path, sys.argv[1:])
train(data, folder / "ddp", SMOOTH, progress=False)
sharded = replace(SMOOTH, fsdp={})
train(data, folder / "fsdp", sharded, progress=False)
try:
    train(data, folder / "resumed", sharded, progress=False, callbacks=[StopAt(7)])
except Stop:
    train(data, folder / "resumed", sharded, progress=False)
distributed.destroy_process_group()
"""
# Dropout falls elsewhere where a batch is read by another process.
SMOOTH = replace(
    RECIPE,
    model={
        **MODEL,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
        "softmax_dropout": 0.0,
    },
    batches_per_update=6,
    updates=8,
)


class Stop(Exception):
    pass


class StopAt(TrainerCallback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == self.update:
            raise Stop


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in two processes that talk over the loopback device."""
    options = "--nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [*command, "--local-addr=127.0.0.1", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_two_processes_train_the_model_of_one(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_EACH_PROCESS)
    done = torchrun(script, data, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "missing keys" not in done.stderr
    alone = train(data, tmp_path / "alone", SMOOTH, progress=False)
    for kind in ("ddp", "fsdp"):
        for line, theirs in zip(log(alone), log(tmp_path / kind), strict=True):
            assert theirs == pytest.approx(line, rel=1e-4)
        weights = load_file(tmp_path / kind / "model.safetensors")
        for name, value in load_file(alone / "model.safetensors").items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0)
    assert_same_run(tmp_path / "resumed", tmp_path / "fsdp")
    with pytest.raises(ValueError, match="num_processes is 2 there and 1 here"):
        train(data, tmp_path / "ddp", SMOOTH, progress=False)
