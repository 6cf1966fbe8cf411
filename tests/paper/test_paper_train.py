"""Training with the paper's recipe: what a run computes, what it leaves, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainerCallback, set_seed

import linbias.paper.train as train_module
from interrupting import Stop, StopAt
from linbias.models import load as load_model
from linbias.paper.blocks import batch_order, block_tokens, blocks
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.paper.optimizer import NAG, cosine_lr
from linbias.paper.step import SeedEachStep
from linbias.paper.store import read_ids, write_ids
from linbias.paper.train import PaperMetrics, train
from paper_training import MODEL, ORIGINAL, RECIPE, log, metrics, train_into


def test_a_step_is_what_the_paper_says_bit_for_bit(paper_data: Path, paper_run: Path) -> None:
    """The run again, without Trainer: every logged number and the weights at the end."""
    set_seed(RECIPE.seed)
    config = PaperConfig(**MODEL, vocab_size=48, position="alibi", train_length=16)
    model = PaperForCausalLM(config).train()
    optimizer = NAG(model.parameters(), momentum=0.99)
    ids, lines = (
        read_ids(paper_data / "train").tokens,
        [line for line in log(paper_run) if "lr" in line],
    )
    schedule = [
        cosine_lr(n, init=1e-7, lr=1.0, warmup=3, period=11, min_lr=1e-4, t_mult=2, shrink=0.75)
        for n in range(15)
    ]
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
        bits = total.item() / math.log(2)
        assert lines[n] == {
            "step": n + 1,
            "loss_base2": bits,
            "ppl": 2**bits,
            "gnorm": norm.item(),
            "lr": schedule[n + 1],
        }
    momentum = torch.load(paper_run.parent / "momentum.pt", weights_only=True)
    assert momentum["param_groups"][0]["lr_old"] == schedule[13]
    for index, p in enumerate(model.parameters()):
        assert torch.equal(
            momentum["state"][index]["momentum_buffer"], optimizer.state[p]["momentum_buffer"]
        )


def test_log_and_metrics_describe_the_run(paper_run: Path) -> None:
    lines, measured = log(paper_run), metrics(paper_run)
    validated = [line for line in lines if "valid_ppl" in line]
    assert [line["step"] for line in lines if "lr" in line] == list(range(1, 15))
    assert [line["step"] for line in validated] == [4, 8, 12, 14]
    best = min(validated, key=lambda line: line["valid_loss_base2"])
    assert measured["best_step"] == best["step"]
    assert measured["valid_loss_base2"] == best["valid_loss_base2"]
    assert measured["valid_ppl"] == 2 ** best["valid_loss_base2"]
    assert (
        measured["loss_base2"] == next(line for line in lines[::-1] if "lr" in line)["loss_base2"]
    )
    assert (measured["steps"], measured["num_processes"]) == (14, 1)
    # Two passes, then a sixth of the blocks that are full and one batch with the short one.
    assert 2000 + 2 * 3 * 64 - 8 <= measured["tokens"] <= 2000 + 2 * 3 * 64
    assert measured["tokens_per_second"] == pytest.approx(
        measured["tokens"] / (measured["steps"] * measured["step_seconds"])
    )
    assert {path.name for path in paper_run.iterdir()} == {
        *("recipe.json", "log.jsonl", "metrics.json", "dict.txt"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("config.json", "generation_config.json", "model.safetensors"),
    }


def test_result_loads_by_auto_classes_and_has_every_weight_once(
    paper_data: Path, paper_run: Path
) -> None:
    model = load_model(paper_run)
    assert isinstance(model, PaperForCausalLM)
    config = model.config
    assert (config.train_length, config.vocab_size, config.use_cache) == (16, 48, True)
    assert metrics(paper_run)["num_parameters"] == model.num_parameters()
    assert set(load_file(paper_run / "model.safetensors")) == {
        n for n, _ in model.named_parameters()
    }
    assert (paper_run / "dict.txt").read_bytes() == (paper_data / "dict.txt").read_bytes()
    # The validation loss is the mean over all ids: blocks of 16 in batches of 4, and 8 ids in one of their own.
    ids, total = read_ids(paper_data / "valid").tokens, 0.0
    for start, stop in blocks(len(ids), 16):
        read, targets = (torch.from_numpy(part)[None] for part in block_tokens(ids, start, stop))
        total += model(input_ids=read, targets=targets, num_items_in_batch=1).loss.item()
    bits = total / len(ids) / math.log(2)
    assert metrics(paper_run)["valid_loss_base2"] == pytest.approx(bits, rel=1e-5)


def test_finished_run_is_returned_as_it_is(
    paper_data: Path, paper_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "PaperTrainer", None)
    before = {path: path.stat().st_mtime_ns for path in paper_run.iterdir()}
    assert train(paper_data, paper_run, RECIPE) == PaperMetrics.read(paper_run)
    assert {path: path.stat().st_mtime_ns for path in paper_run.iterdir()} == before


class KeepWeights(TrainerCallback):
    """The weights at each validation."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, torch.Tensor]] = {}

    def on_evaluate(self, args, state, control, model, **_) -> None:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.by_step[state.global_step] = weights


@pytest.mark.thorough
def test_best_model_is_kept_and_the_last_where_nothing_is_validated(
    paper_data: Path, tmp_path: Path
) -> None:
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


def test_training_learns(paper_data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=50, warmup_steps=5, save_steps=50, log_steps=50)
    recipe = replace(recipe, model={**MODEL, "dropout": 0.0, "softmax_dropout": 0.0})
    metrics = train(paper_data, tmp_path, recipe, progress=False)
    assert metrics.valid_loss_base2 < 4.5  # of log2(44) = 5.5 at random and log2(3) at best


def test_progress_is_lines_on_stderr_or_nothing(
    paper_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(paper_data, tmp_path / "quiet", replace(RECIPE, steps=4), progress=False)
    assert capfd.readouterr() == ("", "")
    train(paper_data, tmp_path / "loud", replace(RECIPE, steps=4))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("training") == 1
    assert "4/4" in err and "tokens/s" in err


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_validation_loss_is_that_of_the_originals_trainer(tmp_path: Path) -> None:
    """It drops two tail terms, so that it says 5.291 where eval_lm says 5.295."""
    from linbias.paper.checkpoint import load

    golden = json.loads((ORIGINAL / "train" / "train_log_C.json").read_text())[-1]
    recipe = replace(RECIPE, length=64, max_tokens=4096)
    data = shutil.copytree(ORIGINAL / "data" / "wikitext-2-v1024", tmp_path / "data")
    for end in ("bin", "idx"):  # nothing is trained, but a run has a text to train on
        shutil.copy(data / f"valid.{end}", data / f"train.{end}")
    trainer = train_module.PaperRun(recipe, data, tmp_path / "run").trainer([])
    trainer.model = load(ORIGINAL / "ckpt" / "ckpt_C_12heads_vocab1024.pt")
    trainer.publish = lambda trainer: None
    trainer.remove_callback(PrinterCallback)
    bits = trainer.evaluate()["eval_loss"] / math.log(2)
    assert (round(bits, 3), round(2**bits, 2)) == (golden["valid_loss_base2"], golden["valid_ppl"])


@pytest.mark.thorough
@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_first_steps_lose_what_those_of_the_original_lose(tmp_path: Path) -> None:
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
    with pytest.raises(Stop):
        train(
            *(ORIGINAL / "data" / "wikitext-2", tmp_path, recipe),
            progress=False,
            callbacks=[StopAt(25)],
        )
    ours, theirs = log(tmp_path), golden[:25]
    assert [line["step"] for line in ours] == [line["update"] for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert float(f"{line['lr']:.6g}") == other["lr_for_next_update"]
    for name, allowed in {"loss_base2": 0.02, "gnorm": 0.15}.items():
        mean, golden_mean = (np.mean([line[name] for line in lines]) for lines in (ours, theirs))
        assert abs(mean / golden_mean - 1) < allowed, name


# What is refused


def test_other_recipe_and_other_data_are_refused_with_the_difference(
    paper_data: Path, paper_run: Path, tmp_path: Path
) -> None:
    other = replace(RECIPE, learning_rate=0.5, model={**MODEL, "dropout": 0.0})
    with pytest.raises(
        ValueError, match=r"recipe\.learning_rate is 1\.0 there and 0\.5 here"
    ) as error:
        train(paper_data, paper_run, other, progress=False)
    assert "recipe.model.dropout is None there and 0.0 here" in str(error.value)
    for path in paper_data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_ids(tmp_path / "train", [2], [np.array([4, 5])])
    with pytest.raises(ValueError, match=r"data\.train\.bin is '\w+' there and '\w+' here"):
        train(tmp_path, paper_run, RECIPE, progress=False)


BAD_RUNS = [
    ("precision 'fp16' must have a GPU", {"precision": "fp16"}),
    (r"model must be made of PaperConfig's fields, got \['depth'\]", {"model": {"depth": 3}}),
    ("PaperConfig: cutoffs must be ids that cut", {"model": {"cutoffs": [20000, 60000]}}),
    ("PaperConfig: position must be one of", {"position": "learned"}),
]


@pytest.mark.parametrize(("message", "change"), BAD_RUNS)
def test_bad_run_is_refused_before_anything_is_written(
    message: str, change: dict[str, object], paper_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(paper_data, tmp_path / "run", replace(RECIPE, **change), progress=False)
    assert not (tmp_path / "run").exists()


def test_several_gpus_in_one_process_are_refused(
    paper_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"process of its own, got 1 for 4 .*--nproc-per-node 4"):
        train(paper_data, tmp_path, replace(RECIPE, device="auto"), progress=False)


def test_batches_that_cannot_be_shared_are_refused(
    paper_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linbias.lm.loop.Sharing.by", lambda *_: SimpleNamespace(of=2))
    with pytest.raises(ValueError, match="multiple of the 2 processes, got 3"):
        train(paper_data, tmp_path, RECIPE, progress=False)


def test_each_piece_of_a_sequence_draws_its_own_dropout() -> None:
    def drawn(piece: int) -> list[float]:
        state = SimpleNamespace(global_step=3)
        SeedEachStep(1, piece).on_step_begin(None, state, None)  # type: ignore[arg-type]
        return torch.rand(2).tolist()

    torch.manual_seed(1 + 3)
    assert torch.rand(2).tolist() == drawn(0)
    assert drawn(1) == drawn(1) != drawn(0)


def test_damaged_data_is_refused_before_anything_is_written(
    paper_data: Path, tmp_path: Path
) -> None:
    for path in paper_data.iterdir():
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


def test_loss_that_is_not_finite_ends_the_run(paper_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train: loss must stay finite, got nan"):
        train(
            paper_data,
            tmp_path,
            replace(RECIPE, learning_rate=1e30, warmup_steps=0),
            progress=False,
        )
