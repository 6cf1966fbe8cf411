"""`MultiheadAttention` in the place of PyTorch's: its results without a bias."""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import linbias
from contract import rows
from linbias.torch import MultiheadAttention, replace_attention

B, H, T, S, WIDTH = 2, 4, 7, 5, 16
INF = float("inf")


def transformer(**options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options
    return nn.Transformer(WIDTH, H, 2, 2, 24, **options)


def padding(side, length):
    hidden = torch.zeros(B, length, dtype=torch.bool)
    keys = {"left": slice(0, 2), "right": slice(-2, None), "holes": slice(1, 4, 2)}[side]
    hidden[1, keys] = True
    return hidden


def random_mask(*shape):
    """Hide keys at random, but from each query its own."""
    torch.manual_seed(1)
    hidden = torch.rand(shape) < 0.5
    return hidden & ~torch.eye(*shape[-2:], dtype=torch.bool)


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def added(hidden):
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -INF)


# Source and target of `nn.Transformer`: S and T tokens.
OF_SOURCE = ("src_key_padding_mask", "memory_key_padding_mask")
SOME, PADDED, CAUSAL = random_mask(S, S), padding("holes", S), causal(T)
NUMBERS = torch.randn(S, S).double()
MASKS = {
    "none": {},
    "causal": {"tgt_mask": CAUSAL},
    "causal, as numbers": {"tgt_mask": added(CAUSAL), "src_mask": added(causal(S))},
    "causal, said": {"tgt_mask": CAUSAL, "tgt_is_causal": True},
    "any": {"src_mask": SOME, "tgt_mask": random_mask(B * H, T, T)},
    "any, of two sequences": {"memory_mask": random_mask(T, S)},
    "numbers": {"src_mask": NUMBERS, "tgt_mask": torch.randn(B * H, T, T).double()},
    "padding on the left": {
        "src_key_padding_mask": padding("left", S),
        "tgt_key_padding_mask": padding("left", T),
    },
    "padding on the right": dict.fromkeys(OF_SOURCE, padding("right", S)),
    "padding with holes": dict.fromkeys(OF_SOURCE, PADDED),
    "causal and padding": {"tgt_mask": CAUSAL, "tgt_key_padding_mask": padding("right", T)},
    "any and padding": {"src_mask": SOME, "src_key_padding_mask": PADDED},
    "numbers and padding": {
        "src_mask": NUMBERS,
        "src_key_padding_mask": added(padding("left", S)),
    },
    "padding, as numbers": {"src_key_padding_mask": torch.randn(B, S).double()},
}


@pytest.mark.parametrize(
    ("training", "name"),
    rows(  # every other mask in training, and the rest without
        lambda training, name: training == (list(MASKS).index(name) % 2 == 0),
        *product((True, False), MASKS),
    ),
)
@pytest.mark.filterwarnings("ignore:.*nested tensor", "ignore:.*NestedTensor")
def test_without_bias_a_transformer_gives_what_pytorchs_gives(training, name):
    theirs = transformer().train(training)
    ours = copy.deepcopy(theirs)
    replace_attention(ours, "none")
    source, target = torch.randn(B, S, WIDTH).double(), torch.randn(B, T, WIDTH).double()
    real = torch.ones(B, T, dtype=torch.bool)
    if "tgt_key_padding_mask" in MASKS[name]:
        real = ~MASKS[name]["tgt_key_padding_mask"]
    found = []
    for model in (theirs, ours):
        inputs = source.clone().requires_grad_(), target.clone().requires_grad_()
        out = model(*inputs, **MASKS[name])[real]
        gradients = torch.autograd.grad(out.square().sum(), (*inputs, *model.parameters()))
        weights = zip((n for n, _ in model.named_parameters()), gradients[2:], strict=True)
        found.append([out, *gradients[:2], *as_ours(dict(weights)).values()])
    for mine, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, other)
    with torch.inference_mode():
        torch.testing.assert_close(ours(source, target, **MASKS[name])[real], found[0][0])


def as_ours(theirs):
    """Gradients by the names of our parameters, in their order."""
    found = {}
    for name, array in theirs.items():
        if "in_proj" not in name:
            found[name] = array
            continue
        for letter, part in zip("qkv", array.chunk(3), strict=True):
            found[name.replace("in_proj_", f"{letter}_proj.")] = part
    ours = transformer()
    replace_attention(ours)
    return {name: found[name] for name, _ in ours.named_parameters()}


def pair(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, H, batch_first=True, dtype=torch.float64)
    return theirs, MultiheadAttention.from_torch(theirs, **options)


@pytest.mark.parametrize("seed", range(24))
def test_without_bias_a_layer_gives_what_pytorchs_gives(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch_first, bias, batched, average = rng.random(4) < 0.5
    widths = {"kdim": 7, "vdim": 5} if rng.random() < 0.5 else {}
    options = {"bias": bool(bias), "batch_first": bool(batch_first)} | widths
    theirs = nn.MultiheadAttention(WIDTH, H, **options, dtype=torch.float64)
    ours = MultiheadAttention.from_torch(theirs, "none")
    given = {"need_weights": True, "average_attn_weights": bool(average)}
    as_given = added if rng.random() < 0.5 else torch.clone
    shape = rng.choice(["none", "of all heads", "of each head"])
    if shape != "none":
        heads = [B * H if batched else H] if shape == "of each head" else []
        mask = random_mask(*heads, T, S)
        mask[..., -1] = False  # theirs gives NaN where all is hidden
        given["attn_mask"] = as_given(mask)
    if rng.random() < 0.5:
        hidden = padding("left", S)
        given["key_padding_mask"] = as_given(hidden if batched else hidden[1])
    inputs = [
        torch.randn(B, length, width).double()
        for length, width in ((T, WIDTH), (S, theirs.kdim), (S, theirs.vdim))
    ]
    if not batched:
        inputs = [x[0] for x in inputs]
    elif not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    for mine, other in zip(ours(*inputs, **given), theirs(*inputs, **given), strict=True):
        torch.testing.assert_close(mine, other)


SETTINGS = (
    dict(norm_first=True),
    dict(bias=False),
    dict(batch_first=False),
    dict(activation="gelu"),
)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("batch", ((), (B,), (0,)))
def test_without_bias_a_transformer_of_any_setting_is_pytorchs(batch, setting):
    theirs = transformer(**setting)
    ours = copy.deepcopy(theirs)
    replace_attention(ours, "none")
    inputs = [torch.randn(*batch, length, WIDTH).double() for length in (S, T)]
    if batch and not theirs.encoder.layers[0].self_attn.batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    for training in (True, False):
        with torch.set_grad_enabled(training):  # without, theirs takes its fast path
            found = ours.train(training)(*inputs)
            torch.testing.assert_close(found, theirs.train(training)(*inputs))
    none = [x[..., :0, :] for x in inputs]
    assert ours(*none).shape == none[1].shape


def test_what_is_said_to_be_causal_needs_no_mask():
    theirs, layer = pair(variant="none")
    x = torch.randn(B, T, WIDTH).double()
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True)
    expected = theirs(x, x, x, attn_mask=CAUSAL)[0]
    for mask, need_weights in product((None, random_mask(T, T)), (True, False)):
        out = layer(x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        torch.testing.assert_close(out, expected)


def test_a_query_that_sees_no_key_gathers_zeros_where_pytorchs_gives_nan():
    theirs, layer = pair(variant="none")
    x, mask = torch.randn(B, T, WIDTH).double(), random_mask(T, T)
    mask[2] = True
    assert theirs(x, x, x, attn_mask=mask)[0][:, 2].isnan().all()
    out, weights = layer(x, attn_mask=mask, need_weights=True)
    assert torch.equal(out[:, 2], layer.out_proj.bias.expand(B, -1))
    assert (weights[:, 2] == 0).all() and weights[:, 1].sum() > 0


def test_weights_come_when_asked_for_in_float32_and_before_dropout():
    theirs = nn.MultiheadAttention(WIDTH, H, 0.5, dtype=torch.bfloat16)
    layer, x = MultiheadAttention.from_torch(theirs, "none"), torch.randn(T, B, WIDTH).bfloat16()
    dropped, kept = theirs(x, x, x)[1], layer(x, need_weights=True)[1]
    assert layer(x)[1] is None and kept.dtype == torch.float32
    torch.testing.assert_close(kept.sum(-1), torch.ones(B, T))
    assert (dropped.sum(-1).float() - 1).abs().max() > 0.1


def test_second_derivatives_come_from_dense():
    theirs, layer = pair(variant="none")
    x = torch.randn(B, T, WIDTH, dtype=torch.float64, requires_grad=True)

    def twice(out):
        (once,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(once.square().sum(), x)[0]

    with pytest.raises(NotImplementedError, match="implementation='dense' gives all"):
        twice(layer(x)[0])
    layer.implementation = "dense"
    torch.testing.assert_close(twice(layer(x)[0]), twice(theirs(x, x, x, need_weights=True)[0]))


def by_definition(layer, query, key, added):
    """Output and weights from the bias and what is added to the scores, [B, H, T, S]."""
    parts = (layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, key)
    q, k, v = (f(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for f, x in parts)
    right = [INF] * H if layer.right_slopes is None else layer.right_slopes.detach()
    bias = linbias.bias(layer.slopes.detach(), q.shape[2], k.shape[2], right_slopes=right)
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * layer.head_dim**-0.5 + torch.from_numpy(bias) + added
    weights = scores.softmax(-1).nan_to_num(0.0)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_asked_for_at_once_is_the_definition(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    variants = ["causal", "symmetric", "directional", "asymmetric", "none", "none_causal"]
    options = {"variant": rng.choice(variants), "num_kv_heads": 2, "dtype": torch.float64}
    queries, keys = (T, T) if rng.random() < 0.5 else (S, T)
    layer = MultiheadAttention(WIDTH, H, batch_first=True, **options)
    if layer.learned:
        torch.nn.init.normal_(layer.log_right)
    x, given = torch.randn(B, keys, WIDTH).double(), {}
    kind = rng.choice(["nothing", "is_causal", "causal", "hidden", "per head", "numbers"])
    shape = (B * H, queries, keys) if kind == "per head" else (queries, keys)
    mask = torch.rand(shape) < (0.0 if kind == "nothing" else 0.4)
    if kind.endswith("causal"):
        mask = torch.ones(shape, dtype=torch.bool).triu(1 + keys - queries)
    scores = torch.randn(shape).double() if kind == "numbers" else added(mask)
    if kind == "is_causal":
        given["is_causal"] = True
    else:
        given["attn_mask"] = scores if kind == "numbers" or rng.random() < 0.5 else mask
    scores = scores.view(B, H, queries, keys) if kind == "per head" else scores
    side = rng.choice(["none", "left", "holes", "numbers"] + ["right"] * (queries == keys))
    if side != "none":
        pad = torch.randn(B, keys).double() if side == "numbers" else padding(side, keys)
        given["key_padding_mask"] = pad
        scores = scores + (pad if side == "numbers" else added(pad))[:, None, None]
    query = x[:, keys - queries :]
    found = layer(query, x, need_weights=True, average_attn_weights=False, **given)
    for mine, wanted in zip(found, by_definition(layer, query, x, scores), strict=True):
        torch.testing.assert_close(mine, wanted)


def encoder(by_hand, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, H, 24, 0.0, batch_first=True)
    if by_hand:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, "symmetric")
        return nn.TransformerEncoder(layer, 2, **options)
    whole = nn.TransformerEncoder(layer, 2, **options)
    replace_attention(whole)
    return whole


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mask_check", (True, False))
@pytest.mark.parametrize("by_hand", (True, False))
def test_pytorchs_fast_path_never_bypasses_the_bias(by_hand, mask_check):
    model, x = encoder(by_hand, mask_check=mask_check), torch.randn(B, T, WIDTH)
    hidden = padding("right", T)
    expected = model.train()(x, src_key_padding_mask=hidden)[~hidden]
    alone = model(x)
    model.eval()
    assert model.use_nested_tensor  # PyTorch would take it
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            found = model(x, src_key_padding_mask=hidden)[~hidden]
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(model(x), alone)
            torch.testing.assert_close(model.layers[1](model.layers[0](x)), alone)
    layer = nn.TransformerEncoderLayer(WIDTH, H, 24, 0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2)
    replace_attention(plain, "none")
    plain.load_state_dict(model.state_dict())
    assert (plain.eval()(x) - alone).abs().max() > 0.01  # that the bias shows at all


def test_pytorchs_kernel_refuses_what_stands_for_the_weights():
    layer = encoder(True).layers[0]
    attend, x = layer.self_attn, torch.randn(1, 3, WIDTH)
    weights = attend.in_proj_weight, attend.in_proj_bias, *attend.out_proj.parameters()
    in_python = *weights[:2], None, None, False, 0.0, *weights[2:]
    for function, given in (
        (torch._native_multi_head_attention, weights),
        (nn.functional.multi_head_attention_forward, in_python),
    ):
        with pytest.raises(TypeError, match="there is no in_proj_weight"):
            function(x, x, x, WIDTH, H, *given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", (torch.jagged, torch.strided))
def test_nested_tensors_are_their_sequences(layout):
    model = encoder(True).eval()
    parts = [torch.randn(n, WIDTH) for n in (T, 1, S)]
    with torch.no_grad():
        out = model(torch.nested.nested_tensor(parts, layout=layout))
        assert out.is_nested and out.layout == layout
        for part, alone in zip(out.unbind(), parts, strict=True):
            torch.testing.assert_close(part, model(alone[None])[0])


@pytest.fixture
def options(monkeypatch):
    """What `attention` was given."""
    module, given = linbias.torch.layers.nn, []
    attend = module.attention
    monkeypatch.setattr(module, "attention", lambda *a, **o: given.append(o) or attend(*a, **o))
    return given


@pytest.mark.parametrize("length", (T, 150))
@pytest.mark.parametrize("as_numbers", (False, True))
def test_a_causal_mask_is_recognised(length, as_numbers, options):
    layer, x = pair()[1], torch.randn(B, length, WIDTH).double()
    mask = added(causal(length)) if as_numbers else causal(length)
    expected = layer(x, is_causal=True)[0]
    for given in (mask, mask.expand(B * H, -1, -1)):
        assert torch.equal(layer(x, attn_mask=given)[0], expected)
    assert all(given["causal"] and given["mask"] is None for given in options)
    for row, key in ((0, 1), (length - 1, 0), (length // 2, length // 2 + 1)):
        other = mask.clone()
        other[row, key] = 1 if other[row, key] == 0 else 0
        layer(x, attn_mask=other)
        assert options[-1]["mask"] is not None


CHANGES = {
    "by NumPy": lambda mask, new: mask.numpy().__setitem__(..., new),
    "behind its version": lambda mask, new: mask.data.copy_(new),
    "other memory": lambda mask, new: setattr(mask, "data", new.clone()),
}


@pytest.mark.parametrize("name", ("attn_mask", "key_padding_mask"))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_mask_is_read_anew_at_every_call(change, name):
    layer, x = pair()[1], torch.randn(B, T, WIDTH).double()
    old, new = {
        "attn_mask": (causal(T), random_mask(T, T)),
        "key_padding_mask": (padding("left", T), padding("holes", T)),
    }[name]
    mask = old.clone()
    layer(x, **{name: mask})
    change(mask, new)
    assert torch.equal(layer(x, **{name: mask})[0], layer(x, **{name: new})[0])


def test_no_keys_give_zeros_whatever_masks_say():
    layer, x = pair()[1], torch.randn(B, T, WIDTH).double()
    none = torch.zeros(B, 0, WIDTH).double()
    no_padding = {"key_padding_mask": torch.zeros(B, 0, dtype=torch.bool)}
    for masks_of_none in ({}, no_padding, {"attn_mask": torch.zeros(T, 0)}):
        out = layer(x, none, **masks_of_none)[0]
        assert torch.equal(out, layer.out_proj.bias.expand_as(out))


def test_padding_at_the_ends_of_rows_needs_no_mask(options):
    layer, x = pair()[1], torch.randn(B, T, WIDTH).double()
    for hidden in (padding("left", T), padding("right", T), added(padding("right", T))):
        layer(x, key_padding_mask=hidden)
        assert options[-1]["mask"] is None and options[-1]["key_range"] is not None
    layer(x, key_padding_mask=torch.zeros(B, T, dtype=torch.bool))
    assert "key_range" not in options[-1]


def test_of_fewer_queries_the_last_stands_at_the_last_key(options):
    layer, x, hidden = pair()[1], torch.randn(B, T, WIDTH).double(), padding("left", T)
    whole = layer(x, attn_mask=causal(T), key_padding_mask=hidden)[0]
    part = layer(x[:, 4:], x, attn_mask=causal(T)[4:], key_padding_mask=hidden)[0]
    torch.testing.assert_close(part, whole[:, 4:])
    assert options[-1]["causal"] and options[-1]["mask"] is None
    other = causal(T)[:3]  # the first query at the first key: then is_causal does not say it
    given = [layer(x[:, 4:], x, attn_mask=other, is_causal=said)[0] for said in (True, False)]
    assert torch.equal(*given) and not torch.allclose(given[0], part)


def test_a_mask_that_is_learned_gets_its_gradient():
    layer, x = pair()[1], torch.randn(B, T, WIDTH).double()
    mask = torch.zeros(T, T, dtype=torch.float64, requires_grad=True)
    layer(x, attn_mask=mask)[0].square().sum().backward()
    assert mask.grad.abs().max() > 0


def test_a_masked_layer_drops_and_learns():
    layer, x = pair(learned=True)[1].train(), torch.randn(B, T, WIDTH).double()
    layer.dropout = 0.5
    for mask in (random_mask(T, T), torch.randn(T, T).double()):
        layer.zero_grad()
        out = layer(x, attn_mask=mask)[0]
        assert not torch.equal(out, layer(x, attn_mask=mask)[0])
        out.square().sum().backward()
        assert layer.log_left.grad.abs().max() > 0 and layer.log_right.grad.abs().max() > 0


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # without biases
def test_replacing_takes_over_everything_and_old_weights_still_load():
    theirs = transformer(bias=False).eval()
    saved = theirs.state_dict()
    shared = theirs.encoder.layers[1].self_attn = theirs.encoder.layers[0].self_attn
    shared.in_proj_weight.requires_grad_(False)
    theirs.decoder.layers[0].multihead_attn.out_proj.requires_grad_(False)
    ours = copy.deepcopy(theirs)
    names = replace_attention(ours, "asymmetric")
    assert len(names) == 6 and not [m for m in ours.modules() if type(m) is nn.MultiheadAttention]
    first, second = (ours.encoder.layers[i].self_attn for i in (0, 1))
    assert first is second and first.variant == "asymmetric" and not first.training
    assert not first.q_proj.weight.requires_grad and first.out_proj.weight.requires_grad
    assert first.q_proj.weight.dtype == torch.float64 and first.out_proj.bias is None
    other = ours.decoder.layers[0].multihead_attn
    assert other.variant == "none" and not other.out_proj.weight.requires_grad
    assert not any("multihead" in name for name, _ in ours.named_parameters() if "log_" in name)
    fresh = transformer(bias=False)
    replace_attention(fresh, "asymmetric", learned=True)
    fresh.load_state_dict(saved, assign=True)  # that of PyTorch's layers
    weight = fresh.encoder.layers[0].self_attn.q_proj.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes  # which safetensors asks for
    again = copy.deepcopy(fresh)
    again.load_state_dict(fresh.state_dict())
    wanted = saved["decoder.layers.1.self_attn.in_proj_weight"]
    layer = again.decoder.layers[1].self_attn
    assert torch.equal(torch.cat([getattr(layer, f"{c}_proj").weight for c in "qkv"]), wanted)


def test_layers_of_other_widths_are_cross_attention():
    assert [pair(cross_attention=c)[1].variant for c in (False, True)] == ["symmetric", "none"]
    assert MultiheadAttention(WIDTH, H, cross_attention=True).variant == "none"
    theirs = nn.Sequential(nn.MultiheadAttention(WIDTH, H, kdim=7, vdim=5, batch_first=True))
    ours = copy.deepcopy(theirs)
    assert replace_attention(ours) == ["0"] and ours[0].variant == "none"
    query, key, value = torch.randn(B, T, WIDTH), torch.randn(B, S, 7), torch.randn(B, S, 5)
    torch.testing.assert_close(ours[0](query, key, value)[0], theirs[0](query, key, value)[0])


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.thorough
@pytest.mark.parametrize("training", (True, False))
def test_an_encoder_compiles_whole(training):
    model, x, hidden = encoder(True).train(training), torch.randn(B, T, WIDTH), padding("right", T)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = {"src_key_padding_mask": hidden}
    torch.testing.assert_close(compiled(x, **given)[~hidden], model(x, **given)[~hidden])
    if training:
        for mask, is_causal in ((CAUSAL, True), (random_mask(T, T), False)):
            given = {"mask": mask, "is_causal": is_causal}
            torch.testing.assert_close(compiled(x, **given), model(x, **given))
    with pytest.raises(RuntimeError, match="contiguous where the layer is compiled"):
        compiled(x, src_key_padding_mask=padding("holes", T))


def test_under_autocast_masked_layers_run_in_sixteen_bits():
    model, x = encoder(False), torch.randn(B, T, WIDTH)
    given = {"mask": random_mask(T, T)}, {"src_key_padding_mask": padding("holes", T)}
    for masked in given:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, **masked)
        torch.testing.assert_close(out.float(), model(x, **masked), atol=0.05, rtol=0.05)
        out.float().square().sum().backward()


def test_under_transforms_masks_are_taken_as_they_are():
    layer, x = pair()[1], torch.randn(3, B, T, WIDTH).double()
    hidden = padding("holes", T)
    run = torch.func.vmap(lambda x, mask: layer(x, attn_mask=mask, key_padding_mask=hidden)[0])
    each = torch.stack([causal(T), random_mask(T, T), ~causal(T)])
    expected = [run(row[None], mask[None])[0] for row, mask in zip(x, each, strict=True)]
    torch.testing.assert_close(run(x, each), torch.stack(expected))
    alone = layer(x[0], attn_mask=each[0], key_padding_mask=hidden)[0]
    torch.testing.assert_close(expected[0], alone)


def test_the_annotated_interface(monkeypatch):
    from labml_nn.transformers import MultiHeadAttention, mha

    monkeypatch.setattr(mha.tracker, "debug", lambda *_: None, raising=False)
    torch.manual_seed(0)
    theirs = MultiHeadAttention(H, WIDTH, dropout_prob=0.0)
    ours = MultiheadAttention(WIDTH, H, variant="none")
    others = theirs.query.linear, theirs.key.linear, theirs.value.linear, theirs.output
    mine = ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj
    for projection, other in zip(mine, others, strict=True):
        projection.load_state_dict(other.state_dict())
    x, memory = torch.randn(T, B, WIDTH), torch.randn(S, B, WIDTH)
    for key, mask in (
        (x, ~causal(T)[..., None]),
        (x, (~random_mask(B, T, T)).movedim(0, 2).long()),
        (memory, ~padding("holes", S).mT[None]),
    ):
        found = ours(query=x, key=key, value=key, mask=mask)[0]
        torch.testing.assert_close(found, theirs(query=x, key=key, value=key, mask=mask))
    expected = ours(x, is_causal=True)[0]
    assert torch.equal(ours(x, mask=torch.ones(T, T, 1), is_causal=True)[0], expected)


BOTH = dict(mask=torch.ones(T, T, 1), attn_mask=CAUSAL)
MESSAGES = [
    (
        dict(attn_mask=torch.ones(T, S) > 0),
        ValueError,
        r"attn_mask must be .*8, 7, 7\], got \[7, 5\]",
    ),
    (dict(attn_mask=torch.ones(T, T).long()), TypeError, "attn_mask must hold bool, .*int64"),
    (dict(mask=torch.ones(T, T)), ValueError, r"mask must be .* = \[7, 7, 2\], .*, got \[7, 7\]"),
    (BOTH, ValueError, "either attn_mask or mask, not both"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), MESSAGES)
def test_masks_say_what_is_wrong(arguments, error, words):
    with pytest.raises(error, match=f"MultiheadAttention: .*{words}"):
        pair()[1](torch.randn(B, T, WIDTH).double(), **arguments)


def nested():
    return torch.nested.nested_tensor([torch.randn(3, WIDTH)], layout=torch.jagged)


THEIRS = nn.MultiheadAttention(WIDTH, H)
OURS = MultiheadAttention(WIDTH, H)
REFUSED = [
    (lambda: replace_attention(nn.Linear(1, 1)), ValueError, r"torch\.nn\.Mul.*, got Linear"),
    (lambda: replace_attention(THEIRS), TypeError, r"got a torch\.nn\.Mult.* itself .*from_torch"),
    (lambda: replace_attention(nn.Sequential(OURS)), ValueError, "got Sequential with layers of"),
    (lambda: MultiheadAttention(WIDTH, H, num_head=H), TypeError, r"did you mean num_heads\?"),
    (lambda: OURS(nested()), ValueError, "nested tensors need batch_first=True"),
    (lambda: OURS(torch.nested.nested_tensor([])), ValueError, "all have 3 axes.* got 1, 1 and 1"),
    (lambda: MultiheadAttention(WIDTH, H, 0.0, True, None), TypeError, "positional arguments"),
    (lambda: torch.jit.script(OURS), torch.jit.frontend.NotSupportedError, "keyword-only"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_cannot_be_replaced_says_so(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("option", ("add_bias_kv", "add_zero_attn"))
def test_keys_beside_those_of_the_sequence_are_refused(option):
    with pytest.raises(ValueError, match=f"from_torch: theirs must have no {option}"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(WIDTH, H, **{option: True}))
    with pytest.raises(TypeError, match=f"there is no argument {option}; it adds a key"):
        MultiheadAttention(WIDTH, H, **{option: True})
