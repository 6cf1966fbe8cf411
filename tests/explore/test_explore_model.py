"""The explorer's view of trained models: its data by NumPy and PyTorch, and in a real browser."""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

import browser
import linbias
from explorer_page import styles
from linbias import explore
from linbias.data.tokenizers import byte_tokenizer, train_bpe
from linbias.explore import model, reading
from linbias.lm import TrainSettings, evaluate, extrapolate
from linbias.lm.settings import ExtrapolateSettings
from linbias.methods import METHODS
from linbias.models import (
    LinbiasConfig,
    LinbiasForCausalLM,
    LinbiasForMaskedLM,
    fuse,
    load,
)
from linbias.paper.config import PaperConfig
from linbias.paper.dictionary import Dictionary
from linbias.paper.model import PaperForCausalLM
from linbias.paper.words import save_word_tokenizer
from linbias.schedules import variant_slopes
from test_cli import run

T = 40  # tokens that are shown
CONTENT = '<b>"a" &amp;</b>\n\u05e9\u05dc\u05d5\u05dd e\u0301\tmore and more words'
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def save(folder: Path, tokenizer: Any = None, **settings: Any) -> Path:
    """A model whose weights are large, or all heads and predictions would be alike."""
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_tokenizer()
    config = LinbiasConfig(
        **{**SMALL, "initializer_range": 0.4, "vocab_size": tokenizer.vocab_size, **settings}
    )
    kind = LinbiasForMaskedLM if config.encoder_position else LinbiasForCausalLM
    kind(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "<i>text.txt"
    path.write_text(CONTENT, "utf-8")
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three methods trained on 24 tokens, beside models that do not belong to them."""
    folder = tmp_path_factory.mktemp("run") / "run" / "models"
    for method in ("rotary", "learned", "alibi"):
        save(folder / f"{method}-L24-s0", position=method, train_length=24)
    save(folder / "sinusoidal-L48-s0", position="sinusoidal")
    save(folder / "none-L24-s1", position="none")
    (folder / "t5-L24-s0" / "checkpoints").mkdir(parents=True)
    return folder.parent


@pytest.fixture(scope="module")
def shown_model(model_folder, text_file) -> dict[str, Any]:
    return model.read(model_folder, text_file, limit_tokens=T)


@pytest.fixture(scope="module")
def shown_run(run_folder, text_file) -> dict[str, Any]:
    return model.read(run_folder, text_file, limit_tokens=T)


def truth(folder: Path, num_tokens: int = T) -> tuple[np.ndarray, np.ndarray]:
    """What a model of bytes makes of the text: weights, and probabilities of next tokens."""
    ids = torch.tensor([list(CONTENT.encode()[:num_tokens])])
    with torch.no_grad():
        found = load(folder, device="cpu")(ids, output_attentions=True)
    return torch.cat(found.attentions).numpy(), found.logits[0].double().softmax(-1).numpy()


def page_of(shown: dict[str, Any], folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(explore.page(model=shown), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model_file(shown_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(shown_model, tmp_path_factory.mktemp("explore"))


@pytest.fixture(scope="module")
def run_file(shown_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(shown_run, tmp_path_factory.mktemp("explore"))


def open_model(visit, file: Path, state: str = "", **options: Any) -> Any:
    """The panel of the view."""
    page = visit(file, "&".join(filter(None, ["view=model", state])), **options)
    return page.locator("[role=tabpanel]:not([hidden])")


def choose(panel: Any, method: str) -> None:
    panel.get_by_role("group", name="Position method").get_by_label(method).check()


def unpacked(one: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(one["weights"]), "<u2") / 65535


# Weights, reach and departure


def test_a_model_is_packed_within_16_bits(shown_model, model_folder):
    [one] = shown_model["models"]
    weights, _ = truth(model_folder)
    rows, columns = np.tril_indices(T)
    np.testing.assert_allclose(
        unpacked(one), weights[..., rows, columns].ravel(), rtol=0, atol=0.5 / 65535 + 1e-7
    )
    assert one["slopes"] == linbias.slopes(4).tolist()
    assert (one["causal"], one["note"], one["method"]) == (True, None, "alibi")
    assert (shown_model["whole"], shown_model["notes"]) == (False, [])
    assert shown_model["tokens"][:5] == ["<", "b", ">", '"', "a"]
    assert shown_model["tokens"][17] == "\\xd7"  # half a letter


def test_reach_is_measured_over_the_later_half_of_the_rows():
    bands = np.zeros((1, 2, 8, 8))
    for t in range(8):
        bands[0, 0, t, t] = 1.0  # looks at itself
        bands[0, 1, t, max(0, t - 3)] = 0.8
        bands[0, 1, t, t] += 0.2
    assert reading.reach(bands) == [[0.0, pytest.approx(0.8 * 3)]]


def test_departure_is_the_share_of_weight_that_lies_elsewhere(shown_model, model_folder):
    weights, _ = truth(model_folder)
    expected = np.zeros((2, 4))
    for layer in range(2):
        for head, slope in enumerate(linbias.slopes(4)):
            for t in range(T // 2, T):
                bias = np.exp(-slope * (t - np.arange(t + 1)))
                moved = np.abs(weights[layer, head, t, : t + 1] - bias / bias.sum())
                expected[layer, head] += moved.sum() / 2 / (T - T // 2)
    np.testing.assert_allclose(shown_model["models"][0]["departure"], expected, atol=1e-6)


def assert_slopes_are_those_of_attention(network, causal):
    for name, parameter in network.named_parameters():
        if re.search("query_key_value|Wqkv|proj|qkv", name):
            torch.nn.init.zeros_(parameter)  # then the bias alone decides
    weights, _ = reading.run(network, np.arange(12))
    sides = reading.slopes_of(network, 12)
    expected = reading.weights_of_bias(*sides, 12, causal=causal)
    np.testing.assert_allclose(weights[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_slopes_of_other_families_are_those_of_their_attention(kind):
    sizes = {"vocab_size": 64, "hidden_size": 48, "d_model": 48}
    counts = {"num_hidden_layers": 1, "n_layers": 1, "num_attention_heads": 6, "n_heads": 6}
    extra = {"falcon": {"alibi": True}}.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **sizes, **counts, **extra)
    torch.manual_seed(0)
    network = fuse(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert_slopes_are_those_of_attention(network, causal=True)


@pytest.mark.parametrize("position", ["symmetric", "directional", "asymmetric", "random"])
def test_slopes_of_masked_models_are_those_of_their_attention(tmp_path, position):
    network = load(save(tmp_path, encoder_position=position), device="cpu")
    assert_slopes_are_those_of_attention(network, causal=False)


@pytest.mark.parametrize("position", ["littlebird", "window", "forget", "cable"])
def test_a_bias_that_is_more_than_slopes_has_none_to_show(tmp_path, position):
    task = "position" if position in ("forget", "cable") else "encoder_position"
    network = load(save(tmp_path, window=4, **{task: position}), device="cpu")
    assert reading.slopes_of(network, 12) is None


# Losses and guesses


def test_losses_and_guesses_are_those_of_the_model(shown_run, run_folder):
    """Of all methods of the run; a table of 24 positions ends there."""
    ids = np.frombuffer(CONTENT.encode()[:T], np.uint8)
    assert shown_run["unit"] == "byte"
    assert shown_run["blind"] == 8
    for one in shown_run["models"]:
        folder = run_folder / "models" / one["name"]
        num = 24 if one["method"] == "learned" else T
        assert one["num_tokens"] == num
        _, p = truth(folder, num)
        bits = -np.log2(p[np.arange(num - 1), ids[1:num]])
        assert one["bits"][0] is None
        np.testing.assert_allclose(one["bits"][1:], bits, atol=1e-4)
        within, beyond = bits[:24].mean(), bits[24:].mean() if num > 25 else None
        expected = {"all": bits.mean(), "within": within, "beyond": beyond}
        assert one["losses"] == pytest.approx(expected, abs=1e-4)
        nll = evaluate(load(folder, device="cpu"), ids[:num], length=num - 1).nll
        assert one["losses"]["all"] == pytest.approx(nll / np.log(2), abs=1e-4)

        best = np.argsort(-p, axis=-1)[:, :5]
        names = [[shown_run["vocabulary"][at] for at, _ in row] for row in one["guesses"]]
        assert names == [[byte_name(i) for i in row] for row in best]
        probabilities = [[probability for _, probability in row] for row in one["guesses"]]
        np.testing.assert_allclose(probabilities, np.take_along_axis(p, best, -1), atol=1e-5)
    assert [shown_run["vocabulary"][at] for at in shown_run["places"]] == shown_run["tokens"]


def byte_name(byte: int) -> str:
    return bytes([byte]).decode("utf-8", "backslashreplace")


# Which models


def test_a_run_is_shown_with_its_methods(shown_run, run_folder, text_file):
    names = ["alibi-L24-s0", "learned-L24-s0", "rotary-L24-s0"]
    assert [one["name"] for one in shown_run["models"]] == names
    assert shown_run["chosen"] == 0
    assert shown_run["notes"] == ["t5-L24-s0 is left out: its training has not finished."]
    assert [one["slopes"] is None for one in shown_run["models"]] == [False, True, True]
    other = model.read(run_folder / "models" / "rotary-L24-s0", text_file, limit_tokens=T)
    assert other["chosen"] == 2
    for ours, theirs in zip(other["models"], shown_run["models"], strict=True):
        assert (ours["weights"], ours["bits"]) == (theirs["weights"], theirs["bits"])
    # Of the learned table the text ends where the table does, if it was asked for itself.
    learned = model.read(run_folder / "models" / "learned-L24-s0", text_file, limit_tokens=T)
    assert len(learned["tokens"]) == 24
    assert learned["notes"][0] == (
        "The page shows the first 24 tokens: the model has no rows for later positions."
    )
    alone = model.read(run_folder / "models" / "none-L24-s1", text_file, limit_tokens=T)
    assert [one["name"] for one in alone["models"]] == ["none-L24-s1"]


def test_a_run_without_a_finished_model_is_refused(tmp_path, text_file):
    (tmp_path / "models" / "alibi-L24-s0").mkdir(parents=True)
    rule = f"explore: model must be a run with a finished model, got {tmp_path}"
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        model.read(tmp_path, text_file)


def test_what_does_not_fit_beside_a_model_is_left_out(
    run_folder, text_file, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    save(folder / "models" / "rotary-L24-s0", train_bpe(b"na na na na", 260))
    (folder / "models" / "learned-L24-s0" / "model.safetensors").write_bytes(b"")
    shown = model.read(folder, text_file, limit_tokens=T)
    assert [one["name"] for one in shown["models"]] == ["alibi-L24-s0"]
    learned, rotary, _ = shown["notes"]
    assert rotary == "rotary-L24-s0 is left out: its tokenizer makes other tokens of the text."
    assert learned.startswith("learned-L24-s0 is left out: ")
    assert str(tmp_path) not in json.dumps(shown)

    monkeypatch.setattr(model, "MAX_WEIGHTS", 2 * 8 * T * (T + 1) // 2 - 1)
    shown = model.read(run_folder, text_file, limit_tokens=T)
    assert [one["weights"] is None for one in shown["models"]] == [False, False, True]
    assert len(shown["models"][2]["bits"]) == T  # losses take no room


def test_the_page_holds_so_many_weights():
    for matrices, causal in ((24, True), (384, True), (1000, False), (10**9, True)):
        fitting = model.most_tokens(matrices, causal)
        cost = [t * (t + 1) / 2 if causal else t * t for t in (fitting, fitting + 1)]
        fits = matrices * cost[0] <= model.MAX_WEIGHTS < matrices * cost[1]
        assert fits or fitting == 1


# Texts and tokens


@pytest.mark.parametrize(
    ("content", "limit", "rule"),
    [
        (None, 8, "text must be a file that can be read"),
        (b"", 8, "text must hold at least one token"),
        (b"ok \xff", 8, "text must be UTF-8"),
        (b"text", 0, r"limit_tokens must be in \[1, 1024\]"),
        (b"text", 1025, r"limit_tokens must be in \[1, 1024\]"),
    ],
)
def test_what_a_model_cannot_read_is_refused(tmp_path, model_folder, content, limit, rule):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^explore: {rule}"):
        model.read(model_folder, path, limit_tokens=limit)


def test_tokens_of_byte_pairs(tmp_path):
    content = "na na na na \U0001f642 \u05e9\u05dc"
    (tmp_path / "text").write_text(content, "utf-8")
    shown = model.read(save(tmp_path / "pairs", train_bpe(b"na na na na", 260)), tmp_path / "text")
    assert (shown["whole"], shown["unit"]) == (True, "byte")
    [one] = shown["models"]
    num_bytes = len(content.encode()) - len(shown["tokens"][0])
    assert one["losses"]["all"] == pytest.approx(sum(one["bits"][1:]) / num_bytes, abs=1e-4)
    assert "".join(shown["tokens"]).startswith("na na na na ")
    assert "na" in [token.strip() for token in shown["tokens"]]
    assert shown["tokens"][-4:] == ["\\xd7", "\\xa9", "\\xd7", "\\x9c"]


def test_tokens_of_other_tokenizers():
    pieces = ["\u2581the", "\u2581cat", "<0xE2>", "s"]
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "s"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    sentences = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert model.token_bytes(sentences, range(4)) == [b" the", b" cat", b"\xe2", b"s"]
    pieces = ["the", "##se", "[UNK]"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert model.token_bytes(words, [0, 1])[0] == b"the"
    end = "<\uff5cend\uff5c>"
    bytes_and_end = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend)
    bytes_and_end.add_special_tokens({"eos_token": end})
    assert model.token_bytes(bytes_and_end, [256]) == [end.encode()]


def test_the_words_of_a_paper_model(tmp_path):
    words = Dictionary.from_counts({"a": 2, "b": 1}, padding_factor=8)
    sizes = {"vocab_size": 8, "cutoffs": (4,), "hidden_size": 16, "num_hidden_layers": 1}
    config = PaperConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    PaperForCausalLM(config).save_pretrained(tmp_path)
    words.write(tmp_path / "dict.txt")
    save_word_tokenizer(words, tmp_path)
    (tmp_path / "text").write_text("b a\nnew\n")
    shown = model.read(tmp_path, tmp_path / "text")
    assert shown["tokens"] == ["b", "a", "\n", "<unk>", "\n"]
    assert (shown["separator"], shown["whole"], shown["unit"]) == (" ", True, "token")
    [one] = shown["models"]
    assert one["slopes"] == linbias.slopes(2).tolist()
    assert one["losses"]["all"] == pytest.approx(np.mean(one["bits"][1:]), abs=1e-4)


# The page


def assert_head(panel, layer: int, head: int) -> None:
    assert panel.get_by_role("heading", name=f"Layer {layer}, head {head}").is_visible()
    chosen = panel.get_by_role("radio", checked=True).and_(panel.locator(".head-cell"))
    assert chosen.get_attribute("aria-label").startswith(f"Layer {layer}, head {head}")


def test_it_opens_on_the_head_that_departs_most(visit, model_file, shown_model):
    panel = open_model(visit, model_file)
    [one] = shown_model["models"]
    departure = np.array(one["departure"])
    layer, head = np.unravel_index(departure.argmax(), departure.shape)
    slope = f"1/{round(1 / linbias.slopes(4)[head])}"
    answer = panel.locator(".answer").inner_text()
    departs = f"departs most from its bias: {departure.max():.0%} of"
    assert answer.startswith(f"Layer {layer}, head {head} (slope {slope}) {departs}")
    assert f"looks {one['reach'][layer][head]:.1f} tokens back" in answer
    assert f"it would look {one['alone'][head]:.1f}" in answer
    assert f"depart by {departure.mean():.0%} on average" in answer
    assert_head(panel, layer, head)
    panel.get_by_role("radio", name="Layer 1, head 1").click()
    panel.get_by_role("button", name=f"Layer {layer}, head {head}").click()
    assert_head(panel, layer, head)


def test_a_models_numbers_are_those_of_the_model(visit, model_file, shown_model, model_folder):
    panel = open_model(visit, model_file, "layer=0&head=0&query=39")
    weights, _ = truth(model_folder)
    chart = panel.get_by_role("slider", name=re.compile("^Weights of query"))
    alone = linbias.attention_weights(np.zeros((4, T, 1)), np.zeros((4, T, 1)))

    def check(layer: int, head: int, query: int) -> None:
        row = weights[layer, head, query, : query + 1]
        distance = query - np.arange(query + 1)
        within = int((np.bincount(distance, row).cumsum() < 0.9).sum())
        story = panel.locator(".query-part .story").inner_text()
        assert f"{row @ distance:.1f} tokens back on average" in story
        assert f"lies within {within}." in story
        assert float(story.rstrip(".").rpartition(": ")[2]) == pytest.approx(row.max(), abs=1e-4)
        assert_head(panel, layer, head)
        chart.press("End")
        text = chart.get_attribute("aria-valuetext")
        found = [float(part) for part in re.findall(r" (\d\.\d+)", text)]
        expected = [row[query], alone[head, query, query]]
        np.testing.assert_allclose(found, expected, atol=1e-4)

    check(0, 0, 39)
    panel.get_by_role("radio", name="Layer 1, head 2").click()
    check(1, 2, 39)
    text = panel.get_by_role("slider", name="Query", exact=True)
    text.locator("[data-token='25']").click()
    check(1, 2, 25)
    text.press("ArrowLeft")
    assert text.get_attribute("aria-valuenow") == "24"
    check(1, 2, 24)
    panel.get_by_role("grid").get_by_role("row").nth(1).focus()
    panel.page.keyboard.press("ArrowDown")
    check(1, 2, 25)
    panel.get_by_role("radio", name="Layer 0, head 3").click()
    check(0, 3, 25)


def test_every_head_is_reached_by_keys(visit, model_file, shown_model):
    panel = open_model(visit, model_file, "layer=0&head=0")
    [one] = shown_model["models"]
    panel.get_by_role("radio", name="Layer 0, head 0").focus()
    keys = panel.page.keyboard
    steps = ("ArrowRight", 0, 1), ("End", 0, 3), ("ArrowDown", 1, 3), ("ArrowDown", 1, 3)
    for key, layer, head in (*steps, ("ArrowLeft", 1, 2), ("ArrowUp", 0, 2)):
        keys.press(key)
        assert_head(panel, layer, head)
        assert panel.page.evaluate("document.activeElement.getAttribute('aria-checked')") == "true"
    heads = panel.locator("button.head-cell")
    assert heads.all_inner_texts() == [f"{x:.0%}" for row in one["departure"] for x in row]
    assert panel.locator(".head-cell.alone").count() == 4


def test_the_methods_of_a_run_stand_side_by_side(visit, run_file, shown_run):
    panel = open_model(visit, run_file, "query=10")
    page = panel.page
    alibi, learned, rotary = shown_run["models"]
    for one in shown_run["models"]:
        method, losses, bits = METHODS[one["method"]], one["losses"], one["bits"]
        column = panel.get_by_role("region", name=method.label, exact=True)
        text = column.inner_text()
        total = column.locator(".loss-total").inner_text()
        assert total == f"{losses['all']:.3f} bits per byte"
        assert f"{losses['within']:.3f} within 24 tokens" in text or one is learned
        assert f"came 11 \u201c\u2068;\u2069\u201d: {bits[11]:.2f} bits" in text
        colour = "node => getComputedStyle(node).backgroundColor"
        rgb = re.findall(r"\d+", column.locator(".swatch").evaluate(colour))
        assert "#{:02X}{:02X}{:02X}".format(*map(int, rgb)) == method.colour
        rows = column.locator("tbody tr").all_inner_texts()
        chances = [f"{100 * p:.1f}%" for _, p in one["guesses"][10]]
        assert [row.split()[-1] for row in rows[:5]] == chances
        came = column.locator(".came").inner_text().split()
        assert came[0].split("\u2069")[0] == "\u2068;"
        assert came[-1] == f"{100 * 2 ** -bits[11]:.1f}%"
        place = column.locator(".token-mark + [data-token]").get_attribute("data-token")
        mark = (place, column.locator(".token-mark").inner_text())
        assert mark == (
            ("24", "no rows past 24") if one is learned else ("25", "trained up to here")
        )
        # The darkest token is the dearest.
        shares = styles(column.locator(".token"), "--share")
        expected = [min(100, round(100 * (cost or 0) / 8)) for cost in bits]
        assert shares[: one["num_tokens"]] == expected
    words = panel.locator(".story").last.inner_text()
    first, second = (
        f"from {one['losses']['within']:.2f} to {one['losses']['beyond']:.2f}"
        for one in (alibi, rotary)
    )
    assert words == (
        f"Past the 24 tokens of training, the loss goes {first} bits per byte with ALiBi, "
        f"{second} with rotary; learned table cannot read on."
    )
    # A token of the loss is the one that follows the query.
    losses = panel.get_by_role("slider", name="Token to be guessed, ALiBi")
    losses.locator("[data-token='20']").click()
    query = panel.get_by_role("slider", name="Query", exact=True)
    assert query.get_attribute("aria-valuenow") == "19"
    losses.press("ArrowRight")
    assert losses.get_attribute("aria-valuetext").endswith(f": {alibi['bits'][21]:.2f} bits")

    choose(panel, "rotary")
    mean = np.array(rotary["reach"])
    layer, head = np.unravel_index(mean.argmax(), mean.shape)
    looks = f"looks farthest: {mean.max():.1f} tokens back"
    assert panel.locator(".answer").inner_text().startswith(f"Layer {layer}, head {head} {looks}")
    assert_head(panel, layer, head)
    page.wait_for_url(re.compile(r"model=2.*query=20"))
    choose(panel, "learned table")
    query = panel.get_by_role("slider", name="Query", exact=True)
    query.press("End")
    column = panel.get_by_role("region", name="learned table")
    assert "Nothing is guessed after token 23" in column.inner_text()
    assert query.get_attribute("aria-valuenow") == "23"


def test_a_model_without_room_says_so(visit, run_folder, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "MAX_WEIGHTS", 8 * T * (T + 1) // 2)
    shown = model.read(run_folder, text_file, limit_tokens=T)
    panel = open_model(visit, page_of(shown, tmp_path), "model=2")
    assert "weights of rotary-L24-s0 do not fit" in panel.inner_text()
    assert "looks farthest" in panel.locator(".answer").inner_text()
    choose(panel, "ALiBi")
    assert panel.get_by_role("radiogroup", name="Heads").is_visible()


def test_a_model_that_looks_ahead_and_has_no_slopes_has_a_note(
    text_file, model_folder, monkeypatch
):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=256, **sizes, intermediate_size=16, max_position_embeddings=24
    )
    network = transformers.BertLMHeadModel(config).eval()
    monkeypatch.setattr(model, "load", lambda *_, **__: network)
    shown = model.read(model_folder, text_file)
    [one] = shown["models"]
    assert one["causal"] is False
    assert {one[name] for name in ("slopes", "alone", "departure", "bits", "losses")} == {None}
    assert re.search(r"\(bert\) has no linear biases.* not causal.* no next token", one["note"])
    assert "no rows for later positions" in shown["notes"][0]
    packed = unpacked(one).reshape(2, 24, 24)
    np.testing.assert_allclose(packed.sum(-1), 1.0, atol=24 / 65535)


def test_a_masked_model_with_slopes_of_both_sides(visit, text_file, tmp_path):
    folder = save(tmp_path / "masked", encoder_position="directional")
    shown = model.read(folder, text_file, limit_tokens=T)
    [one] = shown["models"]
    left, right = variant_slopes("test", "directional", 4)
    assert one["slopes"] == [None if np.isinf(slope) else slope for slope in left]
    assert one["right_slopes"] == [None if np.isinf(slope) else slope for slope in right]
    assert (one["causal"], one["bits"], one["method"]) == (False, None, "directional")
    panel = open_model(visit, page_of(shown, tmp_path), "layer=1&head=3&query=20")
    assert panel.get_by_role("heading", name="Layer 1, head 3, slope 1/256 after").is_visible()
    assert panel.get_by_text(one["note"]).is_visible()
    assert panel.locator(".loss-column").count() == 0
    row = unpacked(one).reshape(2, 4, T, T)[1, 3, 20]
    away = row @ np.abs(20 - np.arange(T))
    story = panel.locator(".query-part .story").inner_text()
    assert f"looks {away:.1f} tokens away on average" in story
    alone = reading.weights_of_bias(np.array(left), np.array(right), T, causal=False)
    chart = panel.get_by_role("slider", name=re.compile("^Weights of query"))
    chart.press("End")  # a key after the query
    last = f"19 after: weight {row[-1]:.4f}, bias alone {alone[3, 20, -1]:.4f}"
    assert chart.get_attribute("aria-valuetext").endswith(last)


def test_a_text_is_shown_as_text(visit, model_file):
    panel = open_model(visit, model_file)
    text = panel.get_by_role("slider", name="Query", exact=True)
    assert text.inner_text().startswith('<b>"a" &amp;</b>\u21b5\n\\xd7')
    assert "<i>text.txt" in panel.locator(".lede").inner_text()
    assert panel.locator(".token-text :not(span), .lede *, b, script").count() == 0


CONTENTS = ["a", "\0\r\n", "\U0001f642", "\u202e\u05e9\u05dc <script>alert(1)</script>"]


@pytest.mark.parametrize("content", CONTENTS)
def test_texts_of_all_kinds_leave_the_page_usable(visit, model_folder, tmp_path, content):
    (tmp_path / "text").write_bytes(content.encode())
    shown = model.read(model_folder, tmp_path / "text")
    assert shown["whole"]
    panel = open_model(visit, page_of(shown, tmp_path), viewport={"width": 320, "height": 700})
    assert panel.page.evaluate("document.documentElement.scrollWidth") == 320
    text = panel.get_by_role("slider", name="Query", exact=True)
    text.press("End")
    text.press("Home")
    assert text.get_attribute("aria-valuenow") == "0"
    losses = panel.get_by_role("slider", name="Token to be guessed, ALiBi")
    losses.press("End")
    if len(content) == 1 and content.isascii():
        assert panel.locator(".loss-total").inner_text() == "\u2013 bits per byte"
        assert "the shown text ends" in panel.locator(".guess-heading").inner_text()
    assert panel.locator(".guesses tbody tr").count() >= 5
    assert all(token.strip("\0\r\n") for token in panel.locator(".token").all_inner_texts())


@pytest.mark.thorough
def test_the_command_puts_models_and_results_into_the_page(text_file, model_folder, tmp_path):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    lengths = {"train_lengths": (16,), "test_lengths": (32,)}
    limits = {"max_bytes": 20_000, "limit_tokens": 64}
    training = TrainSettings(sizes, steps=1)
    settings = ExtrapolateSettings(("alibi", "rotary"), **lengths, **limits, training=training)
    folder, output = tmp_path / "<b>run", tmp_path / "page.html"
    extrapolate(settings, folder, progress=False)
    fixed = ["explore", "--no-open", "-o", output, "--text", text_file]

    def content(*words: Any) -> dict[str, Any]:
        assert run(*fixed, *words).exit_code == 0
        data = '<script type="application/json" id="data">(.*?)</script>'
        return json.loads(re.search(data, output.read_text("utf-8"))[1])

    whole = content(folder)  # a run brings its results
    assert [one["name"] for one in whole["results"]["runs"]] == ["<b>run"]
    names = ["alibi-L16-s0", "rotary-L16-s0"]
    assert [one["name"] for one in whole["model"]["models"]] == names
    one = content(model_folder, "--results", folder)
    assert [one["name"] for one in one["results"]["runs"]] == ["<b>run"]
    assert one["model"]["text"] == text_file.name
    assert [one["name"] for one in one["model"]["models"]] == ["model"]  # not where it lies
    for arguments in (["explore", model_folder], ["explore", "--text", text_file]):
        failed = run(*arguments, "--no-open", "-o", output)
        assert failed.exit_code == 2
        assert "MODEL and --text must come together" in failed.output


def test_a_link_shows_what_its_sender_saw(visit, model_file):
    panel = open_model(visit, model_file, "layer=1&head=2&query=25")
    assert_head(panel, 1, 2)
    text = panel.get_by_role("slider", name="Query", exact=True)
    assert text.get_attribute("aria-valuenow") == "25"
    panel = open_model(visit, model_file, "model=7&layer=9&head=-1&query=x")
    text = panel.get_by_role("slider", name="Query", exact=True)
    assert text.get_attribute("aria-valuenow") == "38"


# All views, of a page that has every one


@pytest.mark.parametrize("width", [320, 390])
def test_no_view_is_wider_than_the_window(visit, run_file, width):
    page = visit(run_file, viewport={"width": width, "height": 800})
    for tab in page.get_by_role("tab").all():
        tab.click()
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab.inner_text()
        for slider in page.get_by_role("tabpanel").get_by_role("slider").all():
            if slider.is_visible():
                box = slider.bounding_box()
                assert 0 <= box["x"] <= box["x"] + box["width"] <= width, tab.inner_text()


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_explorer_breaks_no_rule_of_accessibility(visit, run_file, theme):
    page = visit(run_file, color_scheme=theme, bypass_csp=True)
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
        assert browser.violations(page) == [], tab.inner_text()
    choose(page.get_by_role("tabpanel"), "learned table")
    assert browser.violations(page) == []
