"""`linbias.compat.labml` gives what labml's annotated layer gives, and loads its weights."""

import pytest
import torch

from linbias.compat import labml

pytestmark = pytest.mark.usefixtures("same_start")


def pair(heads=4, width=24, dropout=0.0):
    """labml's layer, and ours with its weights."""
    from labml_nn.transformers.alibi import AlibiMultiHeadAttention

    theirs = AlibiMultiHeadAttention(heads, width, dropout)
    ours = labml.AlibiMultiHeadAttention(heads, width, dropout)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def with_gradients(layer, inputs, mask):
    """The output, and the gradients of inputs and parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = layer(**dict(zip(("query", "key", "value"), inputs, strict=True)), mask=mask)
    out.square().sum().backward()
    return [out, *(x.grad for x in inputs), *(p.grad for p in layer.parameters())]


def holes(length):
    """A causal mask in which every third key is hidden, but not from itself."""
    mask = torch.ones(length, length).tril()
    mask[:, 1::3] = 0
    return mask.fill_diagonal_(1)[..., None]


MASKS = {
    "causal": lambda n: torch.ones(n, n).tril()[..., None],
    "causal, bool": lambda n: torch.ones(n, n, dtype=torch.bool).tril()[..., None],
    "holes": holes,
    "all": lambda n: torch.ones(n, n, 1),
}


@pytest.mark.parametrize("kind", MASKS)
def test_labmls_layer(kind):
    ours, theirs = pair()
    inputs, mask = torch.randn(3, 19, 2, 24), MASKS[kind](19)
    found = (with_gradients(layer, inputs, mask) for layer in (ours, theirs))
    for got, want in zip(*found, strict=True):
        most = 1e-6 * max(1.0, float(want.detach().abs().max()))
        torch.testing.assert_close(got, want, rtol=0, atol=most)


def test_labmls_weights_load_both_ways():
    ours, theirs = pair()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    new = labml.AlibiMultiHeadAttention(4, 24)
    assert theirs.load_state_dict(new.state_dict()) == ([], [])
    assert torch.equal(theirs.output.bias, new.output.bias)


@pytest.mark.parametrize("heads", [1, 6, 8, 12])
def test_labmls_slopes_and_biases(heads):
    from labml_nn.transformers import alibi

    torch.testing.assert_close(labml.get_slopes(heads), alibi.get_slopes(heads))
    for mask in (holes(7)[..., 0], torch.ones(3, 7, dtype=torch.bool)):
        got = labml.get_alibi_biases(heads, mask)
        torch.testing.assert_close(got, alibi.get_alibi_biases(heads, mask))


def test_a_causal_mask_is_recognised_and_needs_no_matrix_of_scores(monkeypatch):
    seen = []
    monkeypatch.setattr(labml, "attention", lambda q, *_, **o: seen.append(o.get("mask")) or q)
    layer = labml.AlibiMultiHeadAttention(2, 8)
    causal, changed = (torch.ones(300, 300).tril()[..., None] for _ in range(2))
    changed[299, 4] = 0  # beyond the rows that are compared first
    x = torch.randn(300, 1, 8)
    for mask in (causal, changed, 2 * causal):
        layer(query=x, key=x, value=x, mask=mask)
    assert seen[0] is None and seen[1].shape == (1, 2, 300, 300) and seen[2] is not None


def test_biases_are_those_of_the_mask_of_the_call():
    """The original would add those of the first mask."""
    ours, theirs = pair()
    x = torch.randn(9, 2, 24)
    ours(query=x, key=x, value=x, mask=MASKS["causal"](9))
    got, want = (layer(query=x, key=x, value=x, mask=holes(9)) for layer in (ours, theirs))
    torch.testing.assert_close(got, want)


def test_rows_of_the_batch_may_have_masks_of_their_own():
    ours, theirs = pair()
    x = torch.randn(11, 2, 24)
    masks = torch.cat([MASKS["causal"](11), holes(11)], dim=2)
    got = ours(query=x, key=x, value=x, mask=masks)
    for b in range(2):
        own = x[:, b : b + 1]
        theirs.alibi_biases = None
        want = theirs(query=own, key=own, value=own, mask=masks[..., b : b + 1])
        torch.testing.assert_close(got[:, b : b + 1], want)


def test_a_query_without_keys_gives_the_bias_of_the_output_layer():
    layer = labml.AlibiMultiHeadAttention(2, 8, 0.0)
    mask = MASKS["causal"](3)
    mask[1] = 0
    x = torch.randn(3, 1, 8)
    torch.testing.assert_close(layer(query=x, key=x, value=x, mask=mask)[1, 0], layer.output.bias)


def test_dropout_runs_in_training_only():
    layer = labml.AlibiMultiHeadAttention(2, 8, 0.5)
    x, mask = torch.randn(20, 1, 8), MASKS["causal"](20)

    def run():
        return layer(query=x, key=x, value=x, mask=mask)

    assert not torch.equal(run(), run())
    layer.eval()
    assert torch.equal(run(), run())


X = torch.zeros(5, 2, 8)
CAUSAL = torch.ones(5, 5).tril()[..., None]


def layer(**given):
    arguments = {"query": X, "key": X, "value": X, "mask": CAUSAL} | given
    return labml.AlibiMultiHeadAttention(2, 8)(**arguments)


LAYER = "^AlibiMultiHeadAttention: "
WRONG_VALUES = [
    (lambda: labml.get_slopes(0), "get_slopes: n_heads must be at least 1, got 0"),
    (lambda: labml.get_alibi_biases(2, CAUSAL), r"mask must have .* \[q, k\], got \[5, 5, 1\]"),
    (lambda: labml.AlibiMultiHeadAttention(3, 8), f"{LAYER}d_model must be .* heads = 3, got 8"),
    (lambda: labml.AlibiMultiHeadAttention(2, 8, 1.0), f"{LAYER}dropout_prob must be .*, got 1.0"),
    (lambda: layer(mask=CAUSAL[..., 0]), rf"{LAYER}mask must have .* \[T, T, B\], got \[5, 5\]"),
    (
        lambda: layer(mask=CAUSAL[:4]),
        r"= \[5, 5, 1\] or \[T, T, B\] = \[5, 5, 2\], got \[4, 5, 1\]",
    ),
    (lambda: layer(query=X[..., :4]), r"query must have .* d_model = 8\], got \[5, 2, 4\]"),
    (lambda: layer(value=X[1:]), r"value must have .* query, \[5, 2, 8\], got \[4, 2, 8\]"),
]
WRONG_KINDS = [
    (lambda: labml.get_slopes(2.0), "get_slopes: n_heads must be an integer, got 2.0"),
    (lambda: labml.get_alibi_biases(True, CAUSAL[..., 0]), "n_heads must be an .*, got True"),
    (lambda: layer(mask=None), rf"{LAYER}mask must be a torch.Tensor \[T, T, 1\] .*, got None"),
]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_bad_input_is_refused_by_name(error):
    for call, message in WRONG_VALUES if error is ValueError else WRONG_KINDS:
        with pytest.raises(error, match=message):
            call()
