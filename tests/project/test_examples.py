"""Every example runs, at tiny sizes, and says how. (flax_extrapolation.py:
tests/jax/test_flax.py.)

An example begins with what it shows and how to run it, and takes sizes as options.
`examples/tour.ipynb` is kept with its outputs, which are compared with what the cells compute.
After a change to it (`pip install nbconvert ipykernel`), run it and take
`application/vnd.jupyter.widget-view+json` out of the explorer's output, which then is its picture:

    jupyter nbconvert --to notebook --execute --inplace \\
        --ExecutePreprocessor.store_widget_state=False examples/tour.ipynb
"""

import ast
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--steps 2 --test-lengths 8 16 --test-bytes 64"
SIZES = {
    "encoder": f"{TINY} --length 8 --batch 2 --width 8 --heads 2 --layers 1",
    "existing_model": f"{TINY} --length 8 --batch 2 --width 8 --layers 1",
    "nanogpt": f"{TINY} --length 8 --batch 2 --width 8 --heads 2 --layers 1",
    "trainer": f"{TINY} --width 8 --layers 1",
}


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_an_example_trains_and_reads_beyond_its_length(name, capsys, monkeypatch):
    example = load(name)
    assert f"\n    python examples/{name}.py" in example.__doc__
    results = example.main(SIZES[name].split())
    assert list(results) == [8, 16]
    assert all(math.isfinite(bits) and 2 < bits < 12 for bits in results.values())
    assert capsys.readouterr().out


def test_every_example_is_tested():
    others = {"flax_extrapolation", "embed_many", "serve", "slide"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SIZES} | others


def run_cell(source, names):
    """What a notebook shows below a cell: what it prints, and the words in its picture."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "tour.ipynb", "exec"), names)
        shown = last and eval(compile(last, "tour.ipynb", "eval"), names)
    picture = ""
    if hasattr(shown, "_repr_svg_"):
        picture = shown._repr_svg_()
    elif shown is not None:
        picture = shown._repr_mimebundle_()[0]["image/svg+xml"]
    return printed.getvalue(), words(picture)


def words(picture):
    return re.findall(r"<text[^>]*>([^<]*)", picture)


def kept(cell):
    """The same, as the file has it."""
    printed = "".join(text for output in cell["outputs"] for text in output.get("text", ()))
    pictures = [output.get("data", {}).get("image/svg+xml", ()) for output in cell["outputs"]]
    return printed, words("".join(line for picture in pictures for line in picture))


def without_numbers(printed, drawn):
    """The form of what is measured; a picture of other numbers has more or fewer of them."""
    number = r"\d[\d.]*"
    return re.sub(number, "#", printed), {re.sub(number, "#", word) for word in drawn}


@pytest.mark.thorough
def test_the_tour_shows_what_its_code_computes():
    text = (EXAMPLES / "tour.ipynb").read_text(encoding="utf-8")
    # The explorer's state takes a megabyte; without it, this would be an error before its picture.
    assert "vnd.jupyter.widget" not in text
    names, num_shown = {}, 0
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            source, expected = "".join(cell["source"]), kept(cell)
            small = re.sub(r"STEPS = \d+", "STEPS = 2", source)
            found = run_cell(small.replace("limit_tokens=8192", "limit_tokens=1024"), names)
            if "results" in source:
                expected, found = without_numbers(*expected), without_numbers(*found)
            assert found == expected, source
            num_shown += any(expected)
    assert num_shown == 13


@pytest.mark.parametrize("variant", ("symmetric", "none"))
def test_the_slide_encoder_answers_for_slides_larger_than_those_of_training(variant, capsys):
    example = load("slide")
    assert "\n    python examples/slide.py" in example.__doc__
    sizes = "--steps 2 --side 5 --batch 2 --width 8 --heads 2 --layers 1"
    sizes += " --test-sides 5 7 --test-slides 6"
    results = example.main([*sizes.split(), "--variant", variant])
    assert list(results) == [5, 7] and all(0 <= share <= 1 for share in results.values())
    assert "right answers" in capsys.readouterr().out


def test_made_up_slides_differ_in_nothing_but_where_the_tumour_is():
    generator = torch.Generator().manual_seed(0)
    tiles, points, padding, one_patch = load("slide").slides(64, 8, generator)
    counts = (~padding).sum(1)
    assert counts.max() == tiles.shape[1] and counts.min() < counts.max() // 2
    assert (tiles.sum(1) == counts // 8).all() and len(set(one_patch.tolist())) == 2
    for kinds, places, n, compact in zip(tiles, points / 512, counts, one_patch, strict=True):
        tumour, places = kinds[:n] == 1, places[:n]
        assert len(set(map(tuple, places.tolist()))) == n and not kinds[n:].any()
        extent = (places[tumour].amax(0) - places[tumour].amin(0)).max()
        assert extent <= 5 or not compact


def test_a_slide_is_read_in_a_batch_of_larger_ones_as_alone():
    example = load("slide")
    torch.manual_seed(0)
    model = example.SlideEncoder(16, 2, 2, "symmetric").eval()
    tiles, pixels, padding, _ = example.slides(5, 6, torch.Generator().manual_seed(0))
    together = model(tiles, pixels / 512, padding)
    for b, n in enumerate((~padding).sum(1)):
        alone = model(tiles[b : b + 1, :n], pixels[b : b + 1, :n] / 512, padding[b : b + 1, :n])
        torch.testing.assert_close(together[b : b + 1], alone)


def test_the_existing_model_reads_padded_rows_as_alone():
    example = load("existing_model")
    torch.manual_seed(0)
    model = example.build(8, 2, trained_length=4).eval()
    tokens = torch.randint(1, 256, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0  # padding on the left
    with torch.no_grad():
        both = model(tokens, attention_mask=mask).logits
        alone = model(tokens[1:, 3:]).logits
    torch.testing.assert_close(both[1:, 3:], alone)
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens, attention_mask=mask, **greedy)
    with torch.no_grad():
        again = model(written, attention_mask=torch.cat([mask, mask[:, :3]], dim=1)).logits
    assert torch.equal(again[:, 8:11].argmax(-1)[0], written[0, 9:])


def test_the_existing_model_is_the_definition():
    """GPT-2 with the bias in a mask, as its own attention takes one."""
    example = load("existing_model")
    torch.manual_seed(0)
    model = example.build(8, 1, trained_length=4).eval()
    tokens = torch.randint(1, 256, (1, 9))
    from linbias import bias, slopes

    mask = torch.tensor(bias(slopes(4), 9, 9, [math.inf] * 4), dtype=torch.float32)[None]
    with torch.no_grad():
        ours = model(tokens).logits
        model.set_attn_implementation("eager")
        theirs = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ("bloom", "linbias"))
def test_the_server_loads_models_that_read_pages(family, tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    from linbias.data.tokenizers import byte_tokenizer
    from linbias.models import LinbiasConfig, LinbiasForCausalLM, install

    install()
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1}
    model = {
        "bloom": lambda: BloomForCausalLM(BloomConfig(**sizes, n_head=2)),
        "linbias": lambda: LinbiasForCausalLM(LinbiasConfig(**sizes, num_attention_heads=2)),
    }[family]()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    manager = load("serve").ModelManager(
        device="cpu", dtype="bfloat16", continuous_batching=True, force_model=str(tmp_path)
    )
    (served,) = (timed.model for timed in manager.loaded_models.values())
    manager.shutdown()
    assert served.dtype == torch.bfloat16
    (answer,) = served.generate_batch([[5, 6, 7]], max_new_tokens=3).values()
    assert answer.error is None and len(answer.generated_tokens) <= 3


def write_corpus(folder):
    """An encoder, and the file of a corpus for it."""
    from linbias.data.tokenizers import byte_tokenizer
    from linbias.models import LinbiasBertConfig, LinbiasBertModel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LinbiasBertConfig(vocab_size=256, **sizes)
    LinbiasBertModel(config).save_pretrained(folder / "encoder")
    byte_tokenizer().save(folder / "encoder")
    file = folder / "corpus.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in range(5)))
    return file


def test_a_corpus_is_embedded_with_its_passages(tmp_path):
    from linbias.models import embed

    file, made = write_corpus(tmp_path), tmp_path / "vectors"
    words = [str(word) for word in (tmp_path / "encoder", made, file, "--spans", 4)]
    (written,) = load("embed_many").main(words)
    assert load("embed_many").main(words) == []  # it is there
    columns = parquet.read_table(written).to_pydict()
    for one, *found in zip(
        embed(tmp_path / "encoder", columns["text"], spans=4),
        *(columns[name] for name in ("vector", "spans", "span_vectors")),
        strict=True,
    ):
        assert [[*map(list, one.spans)], len(columns["text"])] == [found[1], 5]
        np.testing.assert_allclose(found[0], one.vector, atol=1e-6)
        np.testing.assert_allclose(found[2], one.span_vectors, atol=1e-6)


@pytest.mark.processes
def test_processes_share_a_corpus(tmp_path):
    file, made = write_corpus(tmp_path), tmp_path / "vectors"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, EXAMPLES / "embed_many.py", tmp_path / "encoder", made, file]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    texts = [parquet.read_table(path).to_pydict()["text"] for path in sorted(made.iterdir())]
    assert [len(rows) for rows in texts] == [3, 2]
    assert [text for rows in texts for text in rows] == [f"text {i}" for i in range(5)]
