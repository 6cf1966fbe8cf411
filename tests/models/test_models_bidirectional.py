"""Models that read in both directions: position methods by their definitions, and the model.

Models run in float64, so that two ways to the same number agree to 1e-12.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)
from transformers.models.t5.modeling_t5 import T5Attention

import linbias
from linbias.data.tokenizers import byte_tokenizer
from linbias.models import LinbiasForCausalLM, LinbiasForMaskedLM, LinbiasModel, load
from linbias.models.decoder.config import ENCODER_POSITIONS
from linbias.models.decoder.positions import AttendOptions, Position, make_position
from small_models import VOCAB, assert_same, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")
every_method = pytest.mark.parametrize("name", ENCODER_POSITIONS)
LEARNED = ("log_left", "log_right", "first", "bias.weight")


def make(name: str, **changes: object) -> Position:
    method = make_position(
        name, settings(encoder_position=name, window=5, **changes), causal=False
    ).double()
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter, -1.0)
    return method


def build(name: str, **changes: object) -> LinbiasForMaskedLM:
    model = LinbiasForMaskedLM(settings(encoder_position=name, window=5, **changes))
    for parameter in model.model.position.parameters():
        torch.nn.init.normal_(parameter, -1.0)
    return model.double().eval()


def added(method: Position, name: str, distance: Tensor, first: Tensor) -> Tensor | float:
    """What the definition adds to scores, [B, 4, S, S]; distance is query less key."""
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]).double()
    if name in ("sinusoidal", "learned", "rotary", "none"):
        return 0.0
    if name == "t5":
        side = T5Attention._relative_position_bucket(-distance, num_buckets=32, max_distance=128)
        return method.bias(side).permute(0, 3, 1, 2)
    left = right = slopes
    if name == "directional":  # the slopes of two heads, 1/16 and 1/256
        half, hidden = torch.tensor([1 / 16, 1 / 256]), torch.tensor([math.inf] * 2)
        left, right = torch.cat([half, hidden]), torch.cat([hidden, half])
    if name in ("asymmetric", "littlebird"):
        left, right = method.log_left.exp(), method.log_right.exp()
    if name == "random":
        left, right = method.left, method.right
    d = distance[:, None]
    left, right = left[:, None, None], right[:, None, None]
    bias = torch.where(d > 0, -left * d, torch.where(d < 0, right * d, 0.0))
    if name == "littlebird":
        keys = torch.arange(distance.shape[-1])
        at_first = (keys == first) | (keys[:, None] == first)
        bias = torch.where(
            (at_first & (distance != 0))[:, None], -method.first[:, None, None], bias
        )
    if name == "window":
        bias = bias.masked_fill((distance.abs() > 5)[:, None], -math.inf)
    return bias


@pytest.mark.parametrize("ranges", [None, [[0, 17], [3, 17], [0, 13], [4, 5]]])
@every_method
def test_a_method_attends_by_its_definition(name: str, ranges: list[list[int]] | None) -> None:
    """17 queries and keys, 4 heads that share 2 of keys: output, weights and gradients."""
    B, S = 1 if ranges is None else 4, 17
    method = make(name)
    q, k, v = (torch.randn(B, heads, S, 6, dtype=torch.float64) for heads in (4, 2, 2))
    q.requires_grad_()
    options = AttendOptions()
    if ranges is not None:
        options = AttendOptions(torch.tensor(ranges), torch.zeros(B, dtype=torch.int64))
    first, end = torch.tensor(ranges or [[0, S]])[..., None, None].unbind(1)

    keys = torch.arange(S)
    distance = (keys[:, None] - keys).expand(B, S, S)
    seen = ((keys >= first) & (keys < end))[:, None]  # [B, 1, 1, S]
    is_token = seen.mT  # what queries that are padding gather is read by nobody
    score = q @ k.repeat_interleave(2, dim=1).mT / 6**0.5 + added(method, name, distance, first)
    score = score.masked_fill(~seen, -math.inf)
    empty = (score == -math.inf).all(-1, keepdim=True)
    weights = score.masked_fill(empty, 0.0).softmax(-1) * ~empty
    expected = weights @ v.repeat_interleave(2, dim=1)

    out = method.attend(q, k, v, options)
    assert_same(out * is_token, expected * is_token)
    assert_same(method.weights(q, k, options) * is_token, weights * is_token)
    wrt = [q, *method.parameters()] if name != "learned" else [q]
    dout = torch.randn_like(out) * is_token
    gradients = torch.autograd.grad(out, wrt, dout)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, wrt, dout), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["symmetric", "littlebird", "window"])
def test_interpolated_slopes_follow_the_tokens_of_each_row(name: str) -> None:
    plain, scaled = make(name), make(name, slope_scale="interpolate", train_length=4)
    scaled.load_state_dict(plain.state_dict())
    q = k = v = torch.randn(2, 4, 12, 6, dtype=torch.float64)
    both = AttendOptions(torch.tensor([[0, 12], [3, 11]]), torch.zeros(2, dtype=torch.int64))
    alone = scaled.attend(*(x[1:, :, 3:11] for x in (q, k, v)), AttendOptions())
    assert_same(scaled.attend(q, k, v, both)[1:, :, 3:11], alone)
    assert not torch.allclose(
        alone, plain.attend(*(x[1:, :, 3:11] for x in (q, k, v)), AttendOptions())
    )


def test_random_slopes_are_those_of_the_discussion_and_stay() -> None:
    method = make_position(
        "random", settings(hidden_size=4000, num_attention_heads=2000), causal=False
    )
    for side in (method.left, method.right):
        drawn = side.logit()
        assert drawn.mean() == pytest.approx(-2.0, abs=0.1)
        assert drawn.std() == pytest.approx(1, abs=0.1)
    assert not torch.equal(method.left, method.right) and not list(method.parameters())


@every_method
@torch.no_grad()
def test_each_token_sees_both_sides(name: str) -> None:
    model, ids = build(name), tokens(1, 13)
    logits = model(ids).logits
    for changed, seen_at in ((0, 12), (12, 0), (5, 6)):
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB
        if name != "window" or abs(changed - seen_at) <= 10:  # two layers of 5
            assert not torch.equal(model(other).logits[0, seen_at], logits[0, seen_at])


@every_method
def test_a_saved_model_comes_back(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    ids = tokens(1, 9)
    loaded = load(tmp_path).double()
    assert type(loaded) is LinbiasForMaskedLM
    assert_same(loaded(ids).logits, model(ids).logits)
    half = load(tmp_path, task="base", dtype=torch.bfloat16)
    assert type(half) is LinbiasModel and not half.position.causal
    state = model.model.position.state_dict()
    for weight, value in half.position.state_dict().items():
        if weight in (*LEARNED[:3], "left", "right"):  # slopes keep their digits
            assert torch.equal(value, state[weight].float())


def test_weights_that_a_file_lacks_start_as_in_a_fresh_model(tmp_path: Path) -> None:
    model = build("littlebird")
    kept = {k: v for k, v in model.state_dict().items() if ".position." not in k}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ValueError, match=r"lacks model.position.first, .*3 in all"):
        load(tmp_path)
    position = LinbiasForMaskedLM.from_pretrained(tmp_path).model.position
    torch.testing.assert_close(position.log_left.detach().exp(), torch.tensor(linbias.slopes(4)))
    assert not position.first.any()


def test_collators_mask_tokens_and_no_padding(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    texts = [tokenizer(f"{i} times {i} is {i * i}") for i in range(24)]
    batch = collate(texts)
    chosen = batch["labels"] != -100
    assert (batch["input_ids"][chosen] == tokenizer.mask_token_id).float().mean() > 0.6
    assert not (chosen & (batch["attention_mask"] == 0)).any()
    model = LinbiasForMaskedLM(settings(encoder_position="asymmetric", vocab_size=256))
    assert model(**batch).loss.isfinite()


def test_a_direction_that_contradicts_the_model_is_refused() -> None:
    both_ways = LinbiasModel(settings(encoder_position="none"))
    for call, message in (
        (lambda: LinbiasForMaskedLM(settings()), "LinbiasForMaskedLM: encoder_position must be"),
        (lambda: LinbiasForCausalLM(both_ways.config), "CausalLM: encoder_position must be None"),
        (lambda: both_ways(tokens(1, 3), use_cache=True), r"LinbiasModel: .* use_cache must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
