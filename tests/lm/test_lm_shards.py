"""Training and evaluation of sequences that several processes share, beside one process."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from interrupting import torchrun
from linbias.data.corpus import Corpus
from linbias.data.segments import InShards, Segments
from linbias.lm.measure import evaluate_text
from linbias.lm.settings import TrainSettings
from lm_training import TINY, history, train_into

# Shards of a sequence differ by a token.
SETTINGS = TrainSettings(
    model=TINY, length=15, batch_size=4, steps=12, save_steps=5, validate_steps=6, device="cpu"
)
READINGS = {
    "segments": {"lengths": (1, 3, 200)},  # of fewer tokens than processes, too
    "sliding": {"lengths": (7,), "stride": 1, "limit_tokens": 60},
}
IN_EACH_PROCESS = """
import json
import sys
from dataclasses import replace
from torch import distributed
from linbias.data.corpus import load_corpus
from linbias.lm.training import train
from test_lm_shards import READINGS, SETTINGS, scores, validated

text, folder = sys.argv[1:]
corpus = validated(load_corpus(text))
pairs = replace(SETTINGS, context_parallel=2)
train(pairs, corpus, f"{folder}/pairs", progress=False)
train(replace(pairs, fsdp={}), corpus, f"{folder}/sharded", progress=False)
for name, reading in READINGS.items():
    found = scores(f"{folder}/pairs", text, context_parallel=4, **reading)
    if distributed.get_rank() == 0:
        json.dump(found, open(f"{folder}/{name}.json", "w"))
distributed.destroy_process_group()
"""


def validated(corpus: Corpus) -> Corpus:
    return replace(corpus, valid=corpus.train[: 4 * 15 + 1])


def scores(model: str, text: str, **options: Any) -> list[dict[str, Any]]:
    def no_bar(_: str) -> Any:
        return nullcontext(lambda *_: None)

    return evaluate_text(model, text, bar=no_bar, device="cpu", **options).rows()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:read_text")
def test_four_processes_in_pairs_train_and_score_as_one_does(text, corpus, tmp_path):
    """Two share a sequence, and the two pairs a batch; four share a sequence to be scored."""
    script = tmp_path / "script.py"
    script.write_text(IN_EACH_PROCESS)
    done = torchrun(script, text, tmp_path, processes=4)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = history(train_into(SETTINGS, validated(corpus), tmp_path / "alone"))
    for name in ("pairs", "sharded"):  # the model is whole, or in shards itself
        for line, other in zip(expected, history(tmp_path / name), strict=True):
            for loss in ("loss", "validation_loss"):
                assert other[loss] == pytest.approx(line[loss], abs=1e-5)
    for name, reading in READINGS.items():
        shared = json.loads((tmp_path / f"{name}.json").read_text())
        for a, b in zip(scores(f"{tmp_path}/pairs", text, **reading), shared, strict=True):
            assert b["nll"] == pytest.approx(a["nll"], rel=1e-6)
            assert b["count_by_position"] == list(a["count_by_position"])
            assert b["loss_by_position"] == pytest.approx(a["loss_by_position"], rel=1e-4)


def test_segments_in_shards():
    """Batch j of the loader is shard j % 3 of batch j // 3, which make whole segments."""
    whole = Segments(np.arange(1000, dtype=np.int16), length=10, num_segments=12, seed=0)
    cut = InShards(whole, shards=3, batch_size=2)
    assert len(cut) == 36
    for batch in range(6):
        expected = whole.__getitems__([2 * batch, 2 * batch + 1])
        parts = [cut.__getitems__([6 * batch + 2 * p, 6 * batch + 2 * p + 1]) for p in range(3)]
        assert [part["labels"].shape[1] for part in parts] == [4, 3, 3]
        for name, x in expected.items():
            assert torch.equal(torch.cat([part[name] for part in parts], 1), x)
