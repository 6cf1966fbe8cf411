"""Several texts in a row, and draft trees, of fused models: what their heads do not pass on."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    StaticCache,
)

from linbias.models import WindowCache, fuse, unfuse
from linbias.models.decoder.text_marks import MARKS

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
# 12 heads have slopes that are no powers of two, which bfloat16 rounds.
FALCON = {"hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2, "alibi": True}
MPT = {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 40}
MODELS = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=48, n_head=6, n_layer=2, **SIZES)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**FALCON, **SIZES, multi_query=True)),
    "mpt": lambda: MptForCausalLM(MptConfig(**MPT, **SIZES)),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)

PROMPT = 9
PARENTS = [-1, 0, 1, 0, -1, 4]  # depth first: positions fall


def build(make: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return fuse(make().double().eval(), **options)


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def tree() -> tuple[Tensor, Tensor, list[list[int]]]:
    """Mask [1, 1, S, S], numbers [1, S], and the branch of each draft."""
    branches: list[list[int]] = []
    for i, parent in enumerate(PARENTS):
        branches.append([*(branches[parent] if parent >= 0 else []), i])
    seen = torch.ones(PROMPT + 6, PROMPT + 6).tril() == 1
    seen[PROMPT:, PROMPT:] = False
    for i, branch in enumerate(branches):
        seen[PROMPT + i, [PROMPT + j for j in branch]] = True
    depths = [PROMPT - 1 + len(branch) for branch in branches]
    return seen[None, None], torch.tensor([[*range(PROMPT), *depths]]), branches


def near(ours: Tensor, expected: Tensor, most: float = 1e-12) -> None:
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(ours, expected, rtol=most, atol=most * size)


@each_model
def test_texts_in_a_row_are_read_as_each_alone(make: Any) -> None:
    """By position_ids or other marks, in training and not, as the loss of each text says."""
    model = build(make)
    texts = [tokens(n) for n in (5, 2, 9, 5)]
    marked = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = marked([{"input_ids": text.tolist()} for text in texts])
    alone = [model(text[None], labels=text[None]) for text in texts]
    logits = torch.cat([output.logits for output in alone], dim=1)
    scored = sum(len(text) - 1 for text in texts)
    loss = sum(out.loss * (len(text) - 1) for out, text in zip(alone, texts, strict=True)) / scored
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss, parameters)
    counted = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    others = {name: x for name, x in batch.items() if name != "position_ids"}
    for given in (batch, counted, others):
        output = model.train()(**given) if given is batch else model.eval()(**given)
        near(output.logits, logits)
        assert output.past_key_values is None
        for ours, theirs in zip(
            torch.autograd.grad(output.loss, parameters), expected, strict=True
        ):
            near(ours, theirs, 1e-10)
    assert set(MARKS) <= set(inspect.signature(model.forward).parameters)
    wrong = {**counted, "seq_idx": torch.zeros_like(batch["seq_idx"])}
    with pytest.raises(ValueError, match=r"ForCausalLM: seq_idx must mark the same texts as"):
        model(**wrong)


@each_model
@torch.no_grad()
def test_every_copy_and_entry_of_a_model_reads_texts(make: Any) -> None:
    model, packed = build(make), torch.tensor([[0, 1, 2, 0, 1]])
    ids = tokens(2, 5)
    expected = model(ids, position_ids=packed).logits
    near(expected[:, 3:], model(ids[:, 3:]).logits)
    again = pickle.loads(pickle.dumps(model))
    for call in (copy.deepcopy(model), again, model.forward):
        assert torch.equal(call(ids, position_ids=packed).logits, expected)
    states = model.base_model(ids, position_ids=packed)[0]
    near(model.lm_head(states), expected)
    if isinstance(model, FalconForCausalLM):  # the others take them by name alone
        assert torch.equal(model.base_model(ids, None, None, packed)[0], states)
    plain = unfuse(model)(ids).logits
    assert torch.equal(model(ids, position_ids=torch.arange(5)[None]).logits, plain)


@each_model
@torch.no_grad()
def test_padding_may_stand_beside_texts(make: Any) -> None:
    model, ids = build(make), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    numbers = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1]])
    output = model(ids, attention_mask=mask, position_ids=numbers, output_attentions=True)
    near(output.logits[0, 2:4], model(ids[:1, 2:4]).logits[0])
    near(output.logits[0, 4:], model(ids[:1, 4:]).logits[0])
    near(output.logits[1, :4], model(ids[1:, :4]).logits[0])
    assert not output.attentions[1][1, :, 4:, :4].any()
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # one text each
    plain = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask, position_ids=counted).logits, plain)


@each_model
@pytest.mark.parametrize("rounding", ["exact", "checkpoint"])
@torch.no_grad()
def test_each_branch_of_a_draft_tree_is_read_as_if_alone(make: Any, rounding: str) -> None:
    model, (mask, numbers, branches) = build(make, rounding=rounding), tree()
    ids = tokens(2, PROMPT + 6)
    whole = model(ids, attention_mask=mask, position_ids=numbers, output_attentions=True)
    assert not whole.attentions[1].masked_select(~mask).any()
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    numeric = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = {"attention_mask": numeric[:, :, PROMPT:], "position_ids": numbers[:, PROMPT:]}
    behind = model(ids[:, PROMPT:], past_key_values=cache, **given).logits
    assert cache.get_seq_length() == PROMPT + 6
    reference = unfuse(copy.deepcopy(model)).float()  # of Transformers; Falcon's rounds slopes
    for i, branch in enumerate(branches):
        text = torch.cat([ids[:, :PROMPT], ids[:, PROMPT:][:, branch]], dim=1)
        expected = model(text).logits[:, -1]
        near(whole.logits[:, PROMPT + i], expected)
        near(behind[:, i], expected)
        if "falcon" not in type(model).__name__.lower():
            near(whole.logits[:, PROMPT + i].float(), reference(text).logits[:, -1], 1e-4)


@torch.no_grad()
def test_what_cannot_be_read_is_explained() -> None:
    model, ids = build(MODELS["bloom"]), tokens(1, 4)
    packed, mask = torch.tensor([[0, 1, 0, 1]]), torch.ones(4, 4).tril()[None, None] == 1
    cache = model(ids[:, :2], use_cache=True).past_key_values
    static = StaticCache(config=model.config, max_cache_len=9)
    for given, message in (
        ({"position_ids": packed, "use_cache": True}, "position_ids must count .* is a cache"),
        (
            {"input_ids": ids[:, 2:], "position_ids": packed[:, 1:3], "past_key_values": cache},
            "position_ids must count .* is a cache",
        ),
        ({"attention_mask": mask[..., 1:]}, r"attention_mask must .* got \[1, 1, 4, 3\]"),
        ({"attention_mask": mask, "past_key_values": static}, r"\[B, S\] for a StaticCache"),
        (
            {"attention_mask": mask, "past_key_values": WindowCache.for_model(model, 1e-3)},
            r"\[B, S\] for a WindowCache",
        ),
        ({"attention_mask": mask, "seq_idx": packed}, "seq_idx must be None where"),
        ({"attention_mask": ~mask}, r"must hide what stands after a token, but shows"),
    ):
        with pytest.raises(ValueError, match=f"^BloomForCausalLM: .*{message}"):
            model(**{"input_ids": ids, **given})


@each_model
def test_batches_with_keys_in_pages_are_refused(make: Any) -> None:
    model = build(make)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match=r"^\w+ForCausalLM: generate_batch, .* is not built"):
            one.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=3)
    assert "refuse_pages" not in repr(unfuse(model).init_continuous_batching)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo, where a graph breaks
@torch.no_grad()
def test_a_compiled_model_reads_texts_and_trees() -> None:
    model, (mask, numbers, _) = build(MODELS["bloom"]), tree()
    compiled, ids = torch.compile(model, backend="eager"), tokens(1, PROMPT + 6)
    for given in (
        {"position_ids": torch.tensor([[*range(5), *range(10)]])},
        {"cu_seq_lens_q": torch.tensor([0, 5, 15])},
        {"attention_mask": mask, "position_ids": numbers},
    ):
        near(compiled(ids, **given).logits, model(ids, **given).logits)
