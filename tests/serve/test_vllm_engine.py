"""vLLM's engine with the plugin: the tokens and log-probabilities of Transformers' eager models.

`make serve` runs this where vLLM is installed.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linbias import vllm as plugin
from vllm_engine import (
    HEADS,
    LAYERS,
    PROMPTS,
    Answer,
    as_answer,
    ask,
    by_transformers,
    engine,
    exact_falcon,
    random_tokens,
    save_model,
)

vllm = pytest.importorskip("vllm", reason="needs vLLM: make serve")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore"),  # those of the engine
]
TEXTS = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4}
NGRAMS |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two ranks on one memory
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("bloom", "mpt", "falcon", "gpt2")}
    for name, folder in found.items():
        save_model(name, folder)
    return found


@pytest.fixture
def bloom(folders):
    return engine(folders["bloom"])  # the engine before it is gone: a process has one at a time


def layers_of(llm):
    """The attention layers of a model, and whether each is ours."""
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: getattr(layer.impl, "near_to_far", None) for name, layer in context.items()}


def check(folder, answers, greedy=True, attention="eager"):
    """Hold answers against Transformers' model, in float32."""
    for answer in answers:
        expected = by_transformers(folder, answer, attention)
        if greedy:
            assert answer.tokens == expected.tokens
        torch.testing.assert_close(
            answer.log_probabilities, expected.log_probabilities, rtol=0, atol=1e-4
        )


def test_bloom_in_parts_and_from_cached_pages_answers_as_transformers(bloom, folders):
    assert all(layers_of(bloom).values())
    for _ in range(2):  # the second time from pages that are there
        check(folders["bloom"], ask(bloom, TEXTS, tokens=96))
    longer = [text + random_tokens(50, 9) for text in TEXTS]
    check(folders["bloom"], ask(bloom, longer))


def test_whole_prompts_without_cached_pages_answer_as_transformers(folders):
    whole = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    llm = engine(folders["bloom"], **whole, max_num_batched_tokens=1024)
    check(folders["bloom"], ask(llm, TEXTS, tokens=96))


def test_samples_of_one_prompt_share_its_pages(bloom, folders):
    answers = ask(bloom, TEXTS[:1], n=2, temperature=1.0)
    assert answers[0].tokens != answers[1].tokens
    check(folders["bloom"], answers, greedy=False)


def test_others_go_on_after_a_request_is_aborted(bloom, folders):
    core = bloom.llm_engine
    asked = vllm.SamplingParams(
        temperature=0.0, max_tokens=40, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = {}
    for i, text in enumerate(TEXTS):
        core.add_request(str(i), {"prompt_token_ids": text[::-1]}, asked)
    for step in range(1000):
        if step == 12:
            core.abort_request(["0"])
            core.add_request("3", {"prompt_token_ids": TEXTS[0][7:]}, asked)
        outputs |= {x.request_id.split("-")[0]: x for x in core.step()}
        if not core.has_unfinished_requests():
            break
    assert {name for name, x in outputs.items() if x.finished} == {"1", "2", "3"}
    for name, text in (("1", TEXTS[1][::-1]), ("2", TEXTS[2][::-1]), ("3", TEXTS[0][7:])):
        check(folders["bloom"], [as_answer(text, outputs[name].outputs[0])])


def test_mpt_which_the_engine_lacks_answers_as_transformers(folders):
    llm = engine(folders["mpt"])
    assert all(layers_of(llm).values())
    check(folders["mpt"], ask(llm, TEXTS, tokens=96))


def test_falcon_answers_as_the_definition_which_that_of_transformers_is_not(folders):
    """Transformers rounds Falcon's bias to bfloat16, and its eager attention adds it twice."""
    llm = engine(folders["falcon"])
    assert all(layers_of(llm).values())
    answers = ask(llm, TEXTS, tokens=96)
    for attention, differ in (("eager", 0.1), ("sdpa", 1e-3)):
        said = by_transformers(folders["falcon"], answers[0], attention).log_probabilities
        assert (said - answers[0].log_probabilities).abs().max() > differ
    with exact_falcon():
        check(folders["falcon"], answers, attention="sdpa")


def test_a_model_without_linear_biases_keeps_the_attention_of_the_engine(folders):
    llm = engine(folders["gpt2"])
    assert not any(layers_of(llm).values())
    check(folders["gpt2"], ask(llm, TEXTS))


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_groups_of_heads_change_no_token_and_give_pages_back(tmp_path, monkeypatch, family):
    monkeypatch.setenv("LINBIAS_VLLM_GROUPS", "2")
    plugin.register()
    save_model(family, tmp_path, factor=5.0)  # windows of hundreds of keys; a folder of its own,
    # since the engine remembers of which class it was
    llm = engine(tmp_path, max_model_len=2048)
    assert len(layers_of(llm)) == LAYERS * HEADS // 2
    text = random_tokens(1700, 5)
    check(tmp_path, ask(llm, [text, *TEXTS]))
    core = llm.llm_engine
    pool = core.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    core.add_request("0", {"prompt_token_ids": text[::-1]}, vllm.SamplingParams(max_tokens=200))
    held = []
    while core.has_unfinished_requests():
        core.step()
        held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
    pages = -(-1900 // 128)
    # The steepest group sees some 640 keys, the flattest all.
    assert 2 * pages <= held[-2] <= 2 * pages + 640 // 128 + 2


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_two_ranks_answer_as_one(folders, family):
    llm = engine(folders[family], tensor_parallel_size=2)
    check(folders[family], ask(llm, TEXTS, tokens=96))


SCRIPT = """
import sys
from pathlib import Path
import linbias.vllm
linbias.vllm.MADE_FOR = sys.argv[2]
from vllm_engine import PROMPTS, ask, engine, random_tokens
llm = engine(Path(sys.argv[1]))
context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
print([type(layer.impl).__module__ for layer in context.values()])
texts = [random_tokens(length, seed) for seed, length in enumerate(PROMPTS)]
print([answer.tokens for answer in ask(llm, texts)])
"""


@pytest.mark.parametrize(("switch", "version"), [("0", "0.32"), ("1", "0.31")])
def test_the_attention_of_the_engine_stays_where_it_is_asked_or_unknown(folders, switch, version):
    command = [sys.executable, "-c", SCRIPT, str(folders["bloom"]), version]
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    environment = {**os.environ, **path, "LINBIAS_VLLM": switch}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert said.count("linbias: vLLM keeps its own attention") == (version == "0.31")
    layers, tokens = (ast.literal_eval(x) for x in done.stdout.splitlines() if x.startswith("["))
    assert set(layers) == {"vllm.v1.attention.backends.cpu_attn"}
    for text, answer in zip(TEXTS, tokens, strict=True):
        assert by_transformers(folders["bloom"], Answer(text, answer)).tokens == answer


# The engine compiles what finds its drafts, and cannot start again in that process.
def test_drafts_of_ngrams_change_no_token(folders):
    llm = engine(folders["bloom"], speculative_config=NGRAMS, disable_log_stats=False)
    check(folders["bloom"], ask(llm, TEXTS, tokens=96))
    counted = {x.name: getattr(x, "value", 0) for x in llm.get_metrics()}
    drafted = counted["vllm:spec_decode_num_draft_tokens"]
    accepted = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < accepted < drafted
