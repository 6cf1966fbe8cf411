"""`linbias paper translate`: the commands of the paper's README, and what has no counterpart."""

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from linbias import cli
from linbias.paper import train as training
from linbias.paper.recipe import PRESETS
from linbias.paper.translate import translate

# What the commands of all READMEs have in common.
SHARED = (
    "--task language_modeling     data-bin/wikitext-103 --save-dir wt103/ --max-update 286000"
    " --arch transformer_lm_wiki103 --t-mult 2 --lr-period-updates 270000 --lr-scheduler cosine"
    " --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-07 --optimizer nag --seed 1"
    " --clip-norm 0.1 --criterion adaptive_loss --fp16 --sample-break-mode none"
    " --skip-invalid-size-inputs-valid-test"
)
AUGUST_2021 = (
    f"fairseq-train {SHARED} --max-lr 1.0 --lr 0.0001 --min-lr 1e-09 --ddp-backend=no_c10d"
    " --no-epoch-checkpoints --tokens-per-sample 512 --max-tokens 9216 --update-freq 1"
)
LATER = (
    f"python train.py {SHARED} --lr 1.0 --min-lr 0.0001 --stop-min-lr 1e-09"
    " --ddp-backend=legacy_ddp --required-batch-size-multiple 1"
)


def recipe_of(command, monkeypatch):
    """What our command for one of the original trains, and what it was told beside."""
    found = translate(command)
    given = []
    monkeypatch.setattr(training, "train", lambda *a, **_: given.append(a) or exit())
    assert found.words[:3] == ["linbias", "paper", "train"]
    CliRunner().invoke(cli.app, found.words[1:], catch_exceptions=False)
    ((data, output, recipe),) = given
    assert (str(data), str(output)) == ("data-bin/wikitext-103", "wt103")
    return recipe, found


def test_the_commands_of_the_readme_are_our_presets(monkeypatch):
    recipe, found = recipe_of(AUGUST_2021, monkeypatch)
    assert recipe == replace(PRESETS["L512"], rows_multiple=8)
    assert found.command.endswith("--preset L512 --rows-multiple 8")
    assert found.unknown == [] and found.notes[0].startswith("8 GPUs are assumed")
    for length, tokens, frequency in ((512, 9216, 1), (2048, 9216, 1), (3072, 3072, 3)):
        sizes = f" --tokens-per-sample {length} --max-tokens {tokens} --update-freq {frequency}"
        recipe, found = recipe_of(LATER + sizes, monkeypatch)
        assert recipe == PRESETS[f"L{length}"] and found.unknown == []


def test_what_differs_is_said_and_comes_to_the_recipe_that_is_meant(monkeypatch):
    changed = (
        f"CUDA_VISIBLE_DEVICES=0,1 {LATER.replace('286000', '5000').replace('--fp16', '')}"
        " --tokens-per-sample 100 --max-sentences 4 --update-freq 3 --weight-decay 0.01"
        " --momentum 0.9 --validate-interval-updates 700 --decoder-layers 4"
        " --adaptive-softmax-cutoff 1000,5000 --decoder-embed-dim=64"
    )
    recipe, found = recipe_of(changed, monkeypatch)
    expected = {
        **{"length": 100, "max_tokens": 400, "batches_per_step": 6, "validate_steps": 700},
        **{"steps": 5000, "period": 270_000, "precision": "fp32"},
        **{"weight_decay": 0.01, "momentum": 0.9},
        "model": {"num_hidden_layers": 4, "cutoffs": [1000, 5000], "hidden_size": 64},
    }
    assert recipe == replace(PRESETS["L512"], **expected) and found.notes == []


def test_what_a_command_leaves_out_has_the_default_of_fairseq(monkeypatch):
    bare = f"{LATER} --tokens-per-sample 512 --max-tokens 9216 --distributed-world-size 4"
    for flag in (
        "--lr-period-updates 270000",
        "--clip-norm 0.1",
        "--t-mult 2",
        "--lr-shrink 0.75",
    ):
        bare = bare.replace(flag, "")
    recipe, found = recipe_of(f"{bare} --disable-validation", monkeypatch)
    defaults = {"clip": 1e9, "t_mult": 1.0, "shrink": 0.1}
    defaults |= {"batches_per_step": 4, "validate_steps": 0}
    assert recipe == replace(PRESETS["L512"], **defaults)
    assert found.notes == [
        "the original does not clip gradients without --clip-norm, nor does --clip 1e9"
    ]


# What copies of the README print: the script's name is gone, and so is that of the checkpoint.
PREPARE = """{script} \\
    --only-source \\
    --trainpref $TEXT/wiki.train.tokens \\
    --validpref $TEXT/wiki.valid.tokens \\
    --testpref 'a b' \\
    --destdir data-bin/wikitext-103 --srcdict dict.txt \\
    --workers 20
"""
TRAIN_WITHOUT_SCRIPT = AUGUST_2021.replace("fairseq-train", "python")
EVALUATE = (
    "l=1024; {script} data-bin/wikitext-103/     --path {path}  --sample-break-mode none"
    " --gen-subset valid   --max-sentences 1 --model-overrides \"{'max_tokens':$l,"
    " 'tokens_per_sample':$l, 'max_target_positions':$l}\"  --tokens-per-sample $l"
    " --max-tokens ${l}  --max-target-positions $l  --context-window "
)


def meant(script, flags):
    return f"the command names no script; taken to be {script}, whose flags {flags} it has"


@pytest.mark.parametrize("script", ["fairseq-preprocess", "python"])
def test_a_preparation_keeps_the_variables_of_the_shell(script):
    found = translate(PREPARE.replace("{script}", script))
    assert found.command == (
        "linbias paper prepare --train $TEXT/wiki.train.tokens --valid $TEXT/wiki.valid.tokens"
        " --test 'a b' -o data-bin/wikitext-103 --workers 20 --dict dict.txt"
    )
    guess = meant("preprocess.py", "--only-source, --trainpref, --destdir")
    assert found.notes == [guess] * (script == "python") and found.unknown == []


@pytest.mark.parametrize("start", ["python", "CUDA_VISIBLE_DEVICES=0,1 /usr/bin/python3.11", ""])
def test_a_training_without_its_script_is_recognised(start, monkeypatch):
    recipe, found = recipe_of(TRAIN_WITHOUT_SCRIPT.replace("python", start), monkeypatch)
    batches = 2 if "CUDA" in start else 8
    assert recipe == replace(PRESETS["L512"], rows_multiple=8, batches_per_step=batches)
    assert found.notes[0] == meant("train.py", "--task, --arch, --save-dir")
    assert found.unknown == []


@pytest.mark.parametrize(("window", "ours"), [("0", ""), ("$((l-1))", " --context-window 1023")])
@pytest.mark.parametrize("script", ["fairseq-eval-lm", "python"])
@pytest.mark.parametrize("path", ["wt103/", "best.pt"])
def test_an_evaluation(path, script, window, ours):
    command = EVALUATE.replace("{script}", script).replace("{path}", path) + window
    found = translate(command)
    words = f"evaluate {path} data-bin/wikitext-103/ --split valid --length 1024{ours}"
    assert found.command == f"linbias paper {words}" and found.unknown == []
    guess = meant("eval_lm.py", "--path, --gen-subset, --context-window")
    is_file = "is a folder; the original reads a file, such as wt103/checkpoint_best.pt"
    file = [f"--path wt103/ {is_file}"] * (path == "wt103/")
    assert found.notes == [guess] * (script == "python") + file


def test_what_is_not_known_is_named():
    command = LATER.replace("nag", "adam").replace("--arch transformer_lm_wiki103", "")
    more = "--max-tokens 4096 --adam-eps 1e-8 --reset-optimizer --stop-min-lr 0.1 extra"
    assert translate(f"{command} {more}").unknown == [
        "no --arch: here it is transformer_lm_wiki103",
        "--optimizer adam: here it is nag",
        "--stop-min-lr 0.1",
        "--adam-eps 1e-8",
        "--reset-optimizer",
        "extra",
    ]
    assert translate("fairseq-preprocess").unknown[0].startswith("no --only-source")


NO_SCRIPT = (
    "must name its script or have the flags of one alone .*train.py: --task, --arch, --save-dir"
)
MESSAGES = [
    ("python --workers 20", NO_SCRIPT),
    ("python data --gen-subset test", NO_SCRIPT),
    ("python data --save-dir wt103 --arch transformer_lm_wiki103", NO_SCRIPT),
    ("python data --path best.pt --beam 5", NO_SCRIPT),
    ("python data --task language_modeling --arch transformer_lm_wiki103", NO_SCRIPT),
    (TRAIN_WITHOUT_SCRIPT.replace("language_modeling", "translation"), NO_SCRIPT),
    (TRAIN_WITHOUT_SCRIPT + " --path best.pt --gen-subset test", NO_SCRIPT),
    ("python generate.py data --path best.pt --gen-subset test", "must call one of"),
    ("python -m generate data --path best.pt --gen-subset test", "must call one of"),
    ("torchrun --only-source", "must call one of"),
    ("python", "must call one of"),
    ("A=1", "must call one of"),
    ("ls", "must call one of fairseq-train, train.py"),
    ("fairseq-train 'd", "must be a line for the shell, got No closing quotation"),
    ("fairseq-train --max-update 5 --max-tokens 512", "must name the folder of the data"),
    ("fairseq-train d --max-tokens 512", "must have --max-update"),
    ("fairseq-train d --max-update 5", "must have --max-tokens or --batch-size"),
    ("fairseq-train d --max-update five", "--max-update must be a number, got 'five'"),
    ("fairseq-eval-lm d", "must have --path, the model"),
]


@pytest.mark.parametrize(("command", "words"), MESSAGES)
def test_what_cannot_be_translated_says_why(command, words):
    with pytest.raises(ValueError, match=f"translate: .*{words}"):
        translate(command)


def test_the_command_prints_ours_and_what_is_not_known():
    words = ["paper", "translate", f"{TRAIN_WITHOUT_SCRIPT} --foo 3"]
    done = CliRunner().invoke(cli.app, words)
    assert done.stdout.startswith("linbias paper train data-bin/wikitext-103 -o wt103/ --preset ")
    assert "not known here: --foo 3" in done.stderr and "--foo" not in done.stdout
    assert "note: the command names no script; taken to be train.py" in done.stderr


def test_every_flag_of_the_readme_stands_in_the_help_of_its_option():
    shown = typer.main.get_command(cli.app).commands["paper"].commands["train"]
    words = " ".join(option.help or "" for option in shown.params)
    flags = "t-mult lr-period-updates lr-shrink warmup-init-lr min-lr clip-norm warmup-updates"
    flags += " required-batch-size-multiple update-freq tokens-per-sample max-tokens"
    for flag in flags.split():
        assert f"--{flag}" in words
