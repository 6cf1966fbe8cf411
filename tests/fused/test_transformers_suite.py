"""What Transformers' own tests ask of BLOOM, MPT and Falcon: a fused copy answers the same.

Those tests are not in its wheel, so this is their list in our words, but for what the other files
of this name hold against Transformers.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BloomConfig,
    Cache,
    DynamicCache,
    FalconConfig,
    MptConfig,
    PreTrainedModel,
)
from transformers.cache_utils import QuantizedLayer

from contract import rows
from linbias.models import fuse, install, load
from linbias.torch.export import decompositions
from small_models import start_checkpointing

VOCABULARY = 97
# Slopes of four heads are powers of two, which Falcon rounds to bfloat16 without loss.
SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "num_labels": 3}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "alibi": True}
FALCON |= {"new_decoder_architecture": True, "num_kv_heads": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bloom": lambda: BloomConfig(hidden_size=32, n_head=4, n_layer=2, **SIZES, **TOKENS),
    "mpt": lambda: MptConfig(d_model=32, n_heads=4, n_layers=2, use_cache=True, **SIZES, **TOKENS),
    "falcon": lambda: FalconConfig(**FALCON, **SIZES, **TOKENS),
}
each_family = pytest.mark.parametrize("family", CONFIGS)
IDS = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
# Padded on the left, on the right, and not at all.
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
LEFT = MASK.clone()
MASK[1, 9:] = 0
PADDED = IDS.where(MASK.bool(), torch.tensor(0))
# Without each row's first token, which padding on the left would have to tell.
LABELS = PADDED.masked_fill(MASK.cumsum(1) * MASK <= 1, -100)
GENERATED = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def build(family: str, head: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.update(changes)
    return head.from_config(config).eval()


def assert_equal(ours: Any, theirs: Any) -> None:
    """Tensors of one kind and shape, equal to rounding, in one structure."""
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype
        most = 0.0 if not theirs.is_floating_point() else 5e-6 * float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=most)
    elif isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys()
        assert_equal(list(ours.values()), list(theirs.values()))
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_equal(*pair)
    else:
        assert ours == theirs


def tokens(x: Tensor, mask: Tensor = MASK) -> Tensor:
    """Of [B, S, ...], what is said at tokens."""
    return x[mask.bool()]


def gradients(model: PreTrainedModel) -> Tensor:
    """Of all weights that have some, in one row, since some vanish but for rounding."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def generated(**options: Any) -> Callable[[Any], Any]:
    return lambda model: model.generate(IDS, attention_mask=LEFT, **GENERATED | options)


def said(model: Any, **options: Any) -> Tensor:
    """The logits of the tokens of padded rows."""
    return tokens(model(**{"input_ids": PADDED, "attention_mask": MASK} | options).logits)


def embedded(model: Any, ids: Tensor) -> Tensor:
    return model.get_input_embeddings()(ids)


# Each asks one thing of a model for language, which may be changed.
CASES: dict[str, Callable[[Any], Any]] = {
    "the loss": lambda model: model(PADDED, attention_mask=MASK, labels=LABELS).loss,
    "logits of the last tokens": lambda model: model(IDS, logits_to_keep=2).logits,
    "logits of some": lambda model: model(IDS, logits_to_keep=torch.tensor([3, 7])).logits,
    "a mask of bool": lambda model: said(model, attention_mask=MASK.bool()),
    "a mask of floats": lambda model: said(model, attention_mask=MASK.float()),
    "one token": lambda model: model(IDS[:, :1]).logits,
    "embeddings": lambda model: said(model, input_ids=None, inputs_embeds=embedded(model, PADDED)),
    "positions": lambda model: model(IDS, position_ids=torch.arange(12)[None]).logits,
    "a tuple": lambda model: model(IDS, return_dict=False, use_cache=False),
    "generate: sampled beams": generated(num_beams=2, do_sample=True, num_return_sequences=2),
    "generate: beams without a cache": generated(num_beams=2, use_cache=False),
    "generate: beams with penalties": generated(
        num_beams=3, repetition_penalty=1.2, no_repeat_ngram_size=2, length_penalty=2.0
    ),
    "generate: a prompt in chunks": generated(prefill_chunk_size=5),
    "generate: a dynamic cache": generated(cache_implementation="dynamic"),
    "generate: from embeddings": lambda model: model.generate(
        inputs_embeds=embedded(model, IDS), attention_mask=LEFT, **GENERATED
    ),
    "generate: two sequences for each": generated(do_sample=True, num_return_sequences=2),
}


def case(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    CASES[function.__name__] = function
    return function


# What a call takes and gives.


@case
def new_tokens_behind_padding(model: Any) -> Tensor:
    return model.generate(IDS, attention_mask=MASK, **GENERATED)


@case
def a_token_behind_padding(model: Any) -> Tensor:
    """Of rows whose cached tokens were all shown; what was read as padding means nothing."""
    cache = model(IDS[:, :9], attention_mask=MASK[:, :9]).past_key_values
    mask = torch.tensor([[1] * 7 + [0] * 2 + [1] * 3] * 3)
    return model(IDS[:, 9:], attention_mask=mask, past_key_values=cache).logits[1:]


@case
def hidden_states(model: Any) -> Any:
    states = model(PADDED, attention_mask=MASK, output_hidden_states=True).hidden_states
    model.config.output_hidden_states = True
    return [tokens(x) for x in states], model(IDS).hidden_states


@case
def inference_mode(model: Any) -> Any:
    with torch.inference_mode():
        return said(model).clone()


@case
def a_functional_call(model: Any) -> Any:
    other = {name: 0.5 * x for name, x in model.named_parameters()}
    return torch.func.functional_call(model, other, (IDS,)).logits


# Caches.


@case
def the_rest_behind_a_cache(model: Any) -> Any:
    start = model(IDS[:, :7], attention_mask=LEFT[:, :7], use_cache=True)
    return model(IDS[:, 7:], attention_mask=LEFT, past_key_values=start.past_key_values).logits


@case
def a_cache_of_the_caller(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    out = [
        model(IDS[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(5)
    ]
    assert cache.get_seq_length() == 5
    return out


def behind_changed(change: Callable[[DynamicCache], Any]) -> Callable[[Any], Any]:
    """The rest of the tokens behind a cache of nine, of which something changed."""

    def case(model: Any) -> Any:
        cache = model(IDS[:, :9], use_cache=True).past_key_values
        change(cache)
        return model(IDS[:, cache.get_seq_length() :], past_key_values=cache).logits

    return case


def repeat_and_choose(cache: DynamicCache) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))


CASES |= {
    "a cache in another order": behind_changed(lambda x: x.reorder_cache(torch.tensor([2, 0, 0]))),
    "a cache that was cropped": behind_changed(lambda x: x.crop(-4)),
    "rows of a cache repeated and chosen": behind_changed(repeat_and_choose),
}


@case
@torch.no_grad()
def a_copied_cache(model: Any) -> Any:
    cache = model(IDS[:, :7], use_cache=True).past_key_values
    other = copy.deepcopy(cache)
    model(IDS[:, 7:], past_key_values=cache)
    return model(IDS[:, 7:], past_key_values=other).logits


@case
def gradients_through_a_cache(model: Any) -> Any:
    cache = model(IDS[:, :7], use_cache=True).past_key_values
    model(IDS[:, 7:], past_key_values=cache).logits.square().mean().backward()
    return gradients(model)


@case
def no_cache(model: Any) -> Any:
    assert model(IDS, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(IDS).past_key_values is None


class Shrunk(QuantizedLayer):
    """Keys and values are changed, but for the last three; rounding would make errors jump."""

    def __init__(self) -> None:
        super().__init__(residual_length=3)

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return 0.9 * tensor

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor


@case
def a_quantized_cache(model: Any) -> Any:
    cache = Cache(layers=[Shrunk(), Shrunk()])
    start = model(IDS[:, :7], past_key_values=cache).logits
    rest = [model(IDS[:, i : i + 1], past_key_values=cache).logits for i in range(7, 12)]
    assert not torch.equal(rest[-1], model(IDS).logits[:, -1:])
    return start, rest


# generate.


@case
def all_that_generate_tells(model: Any) -> Any:
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    told = model.generate(IDS, **GENERATED, **asked, return_dict_in_generate=True)
    return told.sequences, told.scores, told.logits, told.hidden_states


@case
def attentions_of_generate(model: Any) -> Any:
    model.generation_config.pad_token_id = 0
    told = model.generate(IDS, **GENERATED, output_attentions=True, return_dict_in_generate=True)
    return [[w.shape for w in step] for step in told.attentions]


@case
def generate_that_goes_on(model: Any) -> Any:
    short = GENERATED | {"max_new_tokens": 2, "return_dict_in_generate": True}
    first = model.generate(IDS, attention_mask=LEFT, **short)
    mask = torch.cat([LEFT, torch.ones(3, 2, dtype=torch.int64)], dim=1)
    rest = GENERATED | {"max_new_tokens": 4, "past_key_values": first.past_key_values}
    return model.generate(first.sequences, attention_mask=mask, **rest)


# Weights.


@case
def a_larger_and_a_smaller_vocabulary(model: Any) -> Any:
    model.resize_token_embeddings(VOCABULARY + 10, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCABULARY:] = 0.1
        model.get_output_embeddings().weight[VOCABULARY:] = 0.1
    larger = model(IDS).logits
    assert larger.shape[-1] == model.config.vocab_size == VOCABULARY + 10
    model.resize_token_embeddings(VOCABULARY - 10)
    return larger, model(IDS % (VOCABULARY - 10)).logits


@case
def tied_weights_stay_tied(model: Any) -> Any:
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.ones(VOCABULARY, 32)))
    model.tie_weights()
    return model.get_output_embeddings().weight, model(IDS).logits


@case
def reentrant_checkpointing_of_embeddings_that_want_gradients(model: Any) -> Any:
    for p in model.parameters():
        p.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    model.enable_input_require_grads()
    start_checkpointing(model, use_reentrant=True)
    model.train()(IDS, use_cache=False).logits.square().mean().backward()
    return model.get_output_embeddings().weight.grad


@case
def gradients_of_hidden_states(model: Any) -> Any:
    found = model(IDS, output_hidden_states=True)
    for x in found.hidden_states:
        x.retain_grad()
    found.logits.square().mean().backward()
    return [x.grad for x in found.hidden_states]


@case
def frozen_layers(model: Any) -> Any:
    for name, p in model.named_parameters():
        p.requires_grad_("query_key_value" in name or "Wqkv" in name)
    model.train()(IDS).logits.square().mean().backward()
    return gradients(model)


def bloom_at_once(names: Iterable[str]) -> list[Any]:
    """Rows of a name and a family each, of which `make test` runs BLOOM's."""
    return rows(lambda name, family: family == "bloom", *itertools.product(names, CONFIGS))


@pytest.mark.parametrize(("name", "family"), bloom_at_once(CASES))
def test_a_fused_model_answers_as_the_model_did(name, family):
    model = build(family)
    answers = []
    for each in (fuse(copy.deepcopy(model)), model):
        torch.manual_seed(5)
        answers.append(CASES[name](each))
    assert_equal(*answers)


# Heads of other tasks, with labels that fit each.
SEQUENCE, TOKEN = AutoModelForSequenceClassification, AutoModelForTokenClassification
ANSWERS = {"start_positions": torch.tensor([4, 1, 2]), "end_positions": torch.tensor([7, 3, 5])}
SEVERAL = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])
HEADS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "base": (AutoModel, {}, {}),
    "one class": (SEQUENCE, {}, {"labels": torch.tensor([0, 2, 1])}),
    "classes": (SEQUENCE, {"problem_type": "multi_label_classification"}, {"labels": SEVERAL}),
    "a number": (SEQUENCE, {"num_labels": 1}, {"labels": torch.tensor([0.3, 1.0, -2.0])}),
    "tokens": (TOKEN, {}, {"labels": LABELS.clamp(max=2)}),
    "answers": (AutoModelForQuestionAnswering, {}, ANSWERS),
}


@pytest.mark.parametrize(("head", "family"), bloom_at_once(HEADS))
def test_heads_of_other_tasks(head, family, tmp_path):
    """What they say, their gradients, and what they are saved as."""
    kind, settings, labels = HEADS[head]
    model = build(family, kind, **settings)
    given = {"input_ids": PADDED, "attention_mask": MASK}
    if head == "answers":  # which are read at padding, too
        given = {"input_ids": IDS}
    fused = fuse(copy.deepcopy(model))
    answers = [each(**given, **labels, use_cache=False) for each in (fused, model)]
    if head in ("base", "tokens"):
        assert_equal(*(tokens(out[-1]) for out in answers))
    else:
        assert_equal(*([x for x in out.to_tuple() if isinstance(x, Tensor)] for out in answers))
    for out in answers:
        (out.loss if labels else tokens(out[0]).pow(3).mean()).backward()
    assert_equal(gradients(fused), gradients(model))
    fused.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).eval()
    assert type(again) is type(model) and again.config._attn_implementation != "linbias"
    assert_equal(again(**given)[0].detach(), model(**given)[0].detach())


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_another_type_of_numbers(family, dtype, autocast):
    """As near to float32 as the model on its own attention is."""
    model = build(family)
    truth = model(IDS).logits
    errors = []
    for each in (fuse(copy.deepcopy(model)), model):
        with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float64):
            found = (each if autocast else each.to(dtype))(IDS).logits
        assert found.dtype == (torch.float32 if autocast and dtype == torch.float64 else dtype)
        errors.append(float((found.double() - truth).norm() / truth.norm()))
    assert errors[0] <= 1.2 * errors[1] + 1e-6


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@each_family
@torch.no_grad()
def test_an_exported_program(family):
    """Its attention is one operator, and in PyTorch's own where translators need them."""
    model = build(family)
    for implementation in ("auto", "dense"):
        fused = fuse(copy.deepcopy(model), implementation=implementation)
        given = {"input_ids": PADDED, "attention_mask": MASK, "use_cache": False}
        program = torch.export.export(fused, (), given)
        assert has_ours(program) == (implementation == "auto")
        for each in (program, program.run_decompositions(decompositions())):
            found = each.module()(**given).logits
            assert_equal(tokens(found), tokens(model(**given).logits))
        assert not has_ours(each)


def has_ours(program: torch.export.ExportedProgram) -> bool:
    return any("linbias" in str(node.target) for node in program.graph.nodes)


# What PEFT puts in front of a text.


@pytest.mark.filterwarnings("ignore")
@each_family
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("mask", [torch.ones_like(IDS), LEFT], ids=["whole", "padded"])
def test_virtual_tokens(family, kind, mask):
    """Padding on the left of a text is a hole behind them."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    # Not Falcon's with shared keys: PEFT's prefix has keys for each query head.
    own = {"num_kv_heads": 4} if family == "falcon" else {}
    model = build(family, **own)
    sizes = {"num_layers": 2, "num_attention_heads": 4, "token_dim": 32}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **sizes)
    tuned = peft.get_peft_model(model, config)
    labels = IDS.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)  # which padding would have to tell
    answers = []
    for change in (lambda model: model, fuse):
        change(model)
        tuned.zero_grad()
        out = tuned(IDS, attention_mask=mask, labels=labels)
        out.loss.backward()
        written = tuned.eval().generate(input_ids=IDS, attention_mask=mask, **GENERATED)
        shown = tokens(out.logits[:, -12:], mask)  # prompt tuning has logits of its own
        answers.append((shown, gradients(tuned).clone(), written))
    assert_equal(*reversed(answers))


# What is expected to differ, beside what the other files refuse.


def ask_the_configuration(model: Any) -> None:
    model.config.output_attentions = True


DIFFERENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    # Transformers' MPT takes as much of it as it wants.
    "a mask of another length": (
        lambda model: model(IDS, attention_mask=torch.ones(3, 15)),
        r"attention_mask must have shape \[B, S\] = \[3, 12\], got \[3, 15\]",
    ),
    "attentions asked of its configuration": (
        ask_the_configuration,
        r"`output_attentions` attribute is not supported .* set to linbias",
    ),
}


@pytest.mark.parametrize(("name", "family"), bloom_at_once(DIFFERENCES))
def test_what_a_fused_model_refuses(name, family):
    call, words = DIFFERENCES[name]
    with pytest.raises(ValueError, match=words):
        call(fuse(build(family)))


@each_family
def test_weights_of_attention_and_padding_are_not_those_of_transformers(family):
    """Weights are beside what is said, and have no gradient; padding sees nothing, and not all."""
    model = build(family)
    fused = fuse(copy.deepcopy(model))
    out = fused(IDS, output_attentions=True)
    for weights in out.attentions:
        weights.retain_grad()
    out.logits.square().mean().backward()
    assert [weights.grad for weights in out.attentions] == [None, None]
    answers = (each(PADDED, attention_mask=MASK).logits[0, :4] for each in (fused, model))
    assert not torch.allclose(*answers, atol=1e-3)


@each_family
def test_a_configuration_that_asks_for_attentions_is_refused(family, tmp_path):
    """Such a model would run, and could not be saved."""
    words = "output_attentions of the configuration must be False, got True"
    model = build(family)
    model.config._attn_implementation = "eager"  # Falcon's default is not
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=f"^fuse: {words}"):
        fuse(model)
    assert len(model(IDS).attentions) == 2  # and is as it was
    install()
    config = CONFIGS[family]()
    config.output_attentions = True
    with pytest.raises(ValueError, match=f"^attn_implementation='linbias': {words}"):
        AutoModelForCausalLM.from_config(config, attn_implementation="linbias")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"fuse: {words}"):
        load(tmp_path)
    load(tmp_path, output_attentions=False).save_pretrained(tmp_path / "again")
