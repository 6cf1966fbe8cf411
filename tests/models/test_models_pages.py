"""Keys in pages: `generate_batch` says what `generate` says for each prompt alone."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from linbias.models import LinbiasForConditionalGeneration, LinbiasSeq2SeqConfig, fuse, unfuse
from linbias.models.decoder.baichuan import BaichuanConfig, BaichuanForCausalLM
from linbias.models.decoder.config import POSITIONS
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.paper.config import POSITIONS as PAPER_POSITIONS
from small_models import (
    VOCAB,
    assert_same,
    build,
    build_paper,
    each_existing,
    existing,
    fused,
    tokens,
)

pytestmark = pytest.mark.usefixtures("same_start")

NEW_TOKENS = 8
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MPT = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "initializer_range": 0.3}
GROUPED = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": True}
STEPPED = ("forget", "cable")


def falcon_of_one_key_head() -> PreTrainedModel:
    return fuse(existing("falcon", heads=6, multi_query=True).double())


def mpt_of_foundry() -> PreTrainedModel:
    config = LinbiasMptConfig(**MPT, attn_config={"alibi": True, **GROUPED})
    return LinbiasMptForCausalLM(config).double().eval()


def baichuan() -> PreTrainedModel:
    config = BaichuanConfig(**SIZES, intermediate_size=64, initializer_range=0.3)
    return BaichuanForCausalLM(config).double().eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": lambda: fused("bloom"),
    "falcon": lambda: fused("falcon"),
    "falcon, one key head": falcon_of_one_key_head,
    "mpt": lambda: fused("mpt"),
    "mpt of llm-foundry": mpt_of_foundry,
    "baichuan": baichuan,
    "bloom, dense": lambda: fused("bloom", implementation="dense"),
    "bloom, another scale": lambda: fused("bloom", slope_scale=0.5),
    "own, grouped heads": lambda: build(num_key_value_heads=2, head_size=6),
    "own, side by side": lambda: build(block="parallel_fused"),
    **{f"own, {p}": partial(build, position=p) for p in POSITIONS if p not in STEPPED},
    **{f"paper, {p}": partial(build_paper, position=p) for p in PAPER_POSITIONS},
}
QUICK = ("bloom", "falcon", "mpt", "own, grouped heads")
EACH = [
    pytest.param(name, marks=[pytest.mark.thorough] if name not in QUICK else [])
    for name in MODELS
]


def prompts() -> list[list[int]]:
    """Of mixed lengths, most longer than a page and a part; two begin like another."""
    drawn = [tokens(n).tolist() for n in (3, 11, 1, 25, 17)]
    return [*drawn, [*drawn[3][:18], 1, 2], drawn[3]]


def one_by_one(model: PreTrainedModel, texts: list[list[int]], **settings: Any) -> list[list[int]]:
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 3, **settings}
    rows = [torch.tensor([text]) for text in texts]
    return [
        model.generate(row, attention_mask=torch.ones_like(row), **how)[0, row.shape[1] :].tolist()
        for row in rows
    ]


def in_pages(
    model: PreTrainedModel,
    texts: list[list[int]],
    persistent_manager: bool = False,
    pages: dict[str, Any] | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Read in parts of 8 tokens, in pages of 4 rows, too few of them for all at once."""
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, **settings}
    small: Any = {"page_size": 4, "num_blocks": 12, "max_batch_tokens": 8, **(pages or {})}
    found = model.generate_batch(
        texts,
        generation_config=GenerationConfig(**how),
        continuous_batching_config=ContinuousBatchingConfig(**small),
        persistent_manager=persistent_manager,
    )
    assert not any(request.error for request in found.values())
    return [request.generated_tokens for request in found.values()]


@pytest.mark.parametrize("name", EACH)
def test_requests_in_pages_say_what_each_says_alone(name: str) -> None:
    model, texts = MODELS[name](), prompts()
    expected = one_by_one(model, texts, eos_token_id=None)
    assert in_pages(model, texts) == expected
    assert one_by_one(model, texts[:1], eos_token_id=None) == expected[:1]


def test_pages_that_the_engine_copies_keep_their_keys_in_sight() -> None:
    model, text = fused("bloom"), tokens(400).tolist()
    for block in model.transformer.h:  # keys that matter at any distance
        block.self_attention.query_key_value.weight.data *= 20
    (expected,) = one_by_one(model, [text], eos_token_id=None)
    pages = {"num_blocks": 260, "max_batch_tokens": 400, "allow_block_sharing": False}
    both = in_pages(model, [text], pages=pages, do_sample=True, top_k=1, num_return_sequences=2)
    assert both == [expected, expected]


def test_requests_of_one_beginning_share_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, search = [], PagedAttentionCache.search_prefix_match

    def seen_search(*args: Any) -> int:
        shared.append(search(*args))
        return shared[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", seen_search)
    model, (*_, longer, text) = build(), prompts()
    expected = one_by_one(model, [text, longer], eos_token_id=None)
    for one, said in zip([text, longer], expected, strict=True):
        assert in_pages(model, [one], persistent_manager=True) == [said]
    model.destroy_cached_continuous_batching_manager()
    assert shared == [0, 16]


def test_answers_end_where_the_settings_say() -> None:
    model, texts = build(), prompts()[:3]
    end = one_by_one(model, texts, eos_token_id=None)[0][2]
    expected = one_by_one(model, texts, eos_token_id=end)
    model.generation_config.eos_token_id = None
    assert in_pages(model, texts, eos_token_id=end) == expected
    assert len(expected[0]) < NEW_TOKENS
    model.generate_batch(texts, max_new_tokens=2)
    assert model.generation_config.eos_token_id is None


@each_existing
def test_every_copy_of_a_fused_model_reads_pages_and_an_unfused_one_is_as_before(
    family: str,
) -> None:
    stock = existing(family).init_continuous_batching.__func__
    model, texts = fused(family), prompts()[:2]
    expected = one_by_one(model, texts, eos_token_id=None)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert in_pages(one, texts) == expected
    assert unfuse(model).init_continuous_batching.__func__ is stock


def test_sixteen_bits_and_a_manager_that_stays() -> None:
    model, texts = fused("bloom").bfloat16(), prompts()
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None)
    answers = []
    for _ in range(2):
        found = model.generate_batch(texts, generation_config=settings, persistent_manager=True)
        answers.append([request.generated_tokens for request in found.values()])
    model.destroy_cached_continuous_batching_manager()
    assert answers[0] == answers[1]
    assert all(len(said) == 3 for said in answers[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            pytest.param(
                partial(build, position=p),
                rf"LinbiasForCausalLM.*keys and values alone, .* got {p.title()}",
                id=p,
            )
            for p in STEPPED
        ),
        pytest.param(
            lambda: fused("bloom", slope_scale="interpolate", train_length=5),
            "BloomForCausalLM.*slope_scale must be None or a number, .* got 'interpolate'",
            id="fused, interpolate",
        ),
        pytest.param(
            lambda: build(slope_scale="interpolate"),
            "LinbiasForCausalLM.*slope_scale must be None or a number, .* got 'interpolate'",
            id="own, interpolate",
        ),
        pytest.param(
            lambda: LinbiasForConditionalGeneration(LinbiasSeq2SeqConfig(**SIZES)),
            "LinbiasForConditionalGeneration.*a decoder alone, got one with an encoder",
            id="encoder",
        ),
    ],
)
def test_what_has_no_place_in_pages_is_refused(
    make: Callable[[], PreTrainedModel], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make().generate_batch([[5, 6, 7]], max_new_tokens=3)


def test_what_reads_no_tables_is_refused() -> None:
    pages = ContinuousBatchingConfig(varlen_compile_config=CompileConfig())
    with pytest.raises(ValueError, match="neither compilation nor CUDA graphs"):
        build().generate_batch([[5, 6, 7]], continuous_batching_config=pages)


@torch.no_grad()
def test_logits_of_some_tokens_are_those_of_all() -> None:
    for model in (build(), build_paper()):
        ids, some = tokens(2, 9), torch.tensor([7, 0, 3])
        whole = model(ids).logits
        assert_same(model(ids, logits_to_keep=some).logits, whole[:, some])
