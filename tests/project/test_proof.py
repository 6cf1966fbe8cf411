"""The proof holds, rests on what its page says, and docs/math.md names what is there."""

import os
import re

import numpy as np
import pytest

import attack_proved
import prove
from attack_proved import SUBJECTS, attack
from documents import ROOT

README = (ROOT / "proof" / "README.md").read_text(encoding="utf-8")
MATH = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "proof").glob("*.v")}
# Beside what they prove: (`tail_bound`), (`output_error`, `lse_error`)
NAMED = re.compile(r"\((`[\w']+`(?:,\s+`[\w']+`)*)\)")


def need(reason: str | None) -> None:
    """Nothing where there is no reason against it; in CI nothing is missing."""
    if reason is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@pytest.fixture(scope="module")
def coq():
    try:
        prove.find_coq()
    except prove.NotInstalled as missing:
        need(str(missing))


@pytest.fixture(scope="module")
def program(coq):
    need(attack_proved.why_not())


@pytest.mark.processes
def test_every_statement_holds_and_rests_on_the_axioms_that_the_page_lists(coq):
    found = prove.axioms(prove.check())
    listed = README.partition("## What it rests on")[2].partition("\n## ")[0]
    assert sorted(found) == sorted(re.findall(r"^- `([\w.']+)`:", listed, re.MULTILINE))
    assert len(found) > 1


def without_comments(text: str) -> str:
    return re.sub(r"\(\*.*?\*\)", " ", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_assumed_or_left_unproved(name):
    """Hypotheses of a section are those of its theorems; anything else would be an axiom."""
    words = r"\b(Admitted|admit|give_up|Abort|Axioms?|Parameters?|Conjectures?|bypass_check)\b"
    words += r"|\bUnset \w+ Checking\b"
    assert re.findall(words, without_comments(SOURCES[name])) == []


def test_the_proof_stays_small():
    assert sum(map(bool, "".join(SOURCES.values()).splitlines())) <= 2600  # 2,500, and section 11


def named_by_sections() -> dict[str, list[str]]:
    """By section of docs/math.md, the theorems that it names."""
    _, *parts = re.split(r"^## (?=\d)", MATH, flags=re.MULTILINE)
    sections = {}
    for part in parts:
        title, _, text = part.partition("\n")
        found = [name for names in NAMED.findall(text) for name in re.findall(r"`(.+?)`", names)]
        assert found or "not proved" in text, f"{title}: name a theorem, or say what is not proved"
        sections[title] = found
    return sections


def test_every_section_names_theorems_or_says_that_it_has_none():
    sections = named_by_sections()
    assert len(sections) == 11
    theorems = {name for names in prove.theorems().values() for name in names}
    missing = {f"{t}: {name}" for t, found in sections.items() for name in found}
    assert {x for x in missing if x.split(": ")[1] not in theorems} == set()


def nearest(x):
    """The bfloat16 nearest to float32, halves away from 0; from 0x7f7f8000 on what fits."""
    bits = x.view(np.uint32)
    large = (bits & 0x7FFFFFFF) >= 0x7F7F8000
    return ((bits + np.where(large, 0, 0x8000).astype(np.uint32)) & 0xFFFF0000).view(np.float32)


def largest_errors(exponent: int) -> tuple[float, float, float]:
    """Of one, two and three terms of every float32 with an exponent, as shares of it."""
    x = np.arange(exponent << 23, (exponent + 1) << 23, dtype=np.uint32).view(np.float32)
    errors, rest = [], x
    for _ in range(3):
        rest = rest - nearest(rest)
        errors.append(float(np.max(np.abs(rest.astype(np.float64)) / x)))
    return errors[0], errors[1], errors[2]


def test_terms_of_float32_are_as_near_as_section_11_says():
    one, two, three = largest_errors(127)
    assert one <= 1 / 257 and two <= 2**-17 and three == 0
    assert 2 * one + one**2 < 2**-7 and (one + two) ** 2 + 2 * two + two**2 < 2**-15
    one, two, three = largest_errors(254)  # of the largest numbers some are cut
    assert 1 / 257 < one < 1 / 256 and three == 0
    assert 2 * one + one**2 < 1.003 * 2**-7
    assert (one + two) ** 2 + 2 * two + two**2 < 1.003 * 2**-15


def test_the_page_of_the_proof_lists_every_file_and_theorems_that_exist():
    files, _, theorems = README.partition("## Theorems")
    assert set(re.findall(r"\]\((\w+\.v)\)", files)) == set(SOURCES)
    rows = re.findall(r"^\| \[(\w+)\.v\]\(\1\.v\) \| `([\w']+)` \|", theorems, re.MULTILINE)
    assert len(rows) == theorems.count("\n| [") > 10
    assert [row for row in rows if row[1] not in prove.theorems()[row[0]]] == []


@pytest.fixture
def small(coq, tmp_path, monkeypatch):
    """A proof of two files, and a function that replaces a text in one of them."""
    (tmp_path / "A.v").write_text("Theorem one : 1 = 1.\nProof. reflexivity. Qed.\n")
    (tmp_path / "B.v").write_text(
        "From linbias Require Import A.\nTheorem two : 1 = 1.\nProof. exact one. Qed.\n"
    )
    monkeypatch.setattr(prove, "FOLDER", tmp_path)
    monkeypatch.setattr(prove, "BUILD", tmp_path / "build")

    def change(name: str, old: str, new: str) -> None:
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new))

    return change


@pytest.mark.processes
def test_what_changed_is_checked_again_with_what_needs_it(small, monkeypatch):
    assert "Closed under the global context" in prove.check()
    compiled, run = [], prove._output
    monkeypatch.setattr(prove, "_output", lambda words: compiled.append(words[-1]) or run(words))
    prove.check()
    assert compiled == []
    small("B.v", "exact one.", "apply one.")
    prove.check()
    assert [path.rsplit("/")[-1] for path in compiled] == ["B.v", "Everything.v"]
    small("A.v", "Qed.", "Qed. (* again *)")
    prove.check()
    assert [path.rsplit("/")[-1] for path in compiled[2:]] == ["A.v", "B.v", "Everything.v"]


@pytest.mark.processes
def test_what_is_wrong_is_refused_and_what_is_assumed_is_told(small):
    small("A.v", "1 = 1.", "1 = 2.")
    for _ in range(2):
        with pytest.raises(prove.Refused, match=r'File ".*A.v", line 2(.|\n)*Unable to unify'):
            prove.check()
    small("A.v", "Proof. reflexivity. Qed.", "Admitted.")
    with pytest.raises(prove.Refused, match=r'File ".*B.v", line 3'):
        prove.check()
    small("B.v", "1 = 1.", "1 = 2.")
    assert prove.axioms(prove.check()) == ["A.one"]
    (prove.FOLDER / "A.v").rename(prove.FOLDER / "C.v")
    with pytest.raises(prove.Refused, match=r'File ".*B.v", line 1(.|\n)*A'):
        prove.check()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    prove.find_coq.cache_clear()
    message = r"neither coqc nor rocq on the path \(Debian: apt-get install coq libcoq-flocq\)"
    with pytest.raises(prove.NotInstalled, match=message):
        prove.find_coq()


@pytest.mark.processes
@pytest.mark.parametrize("subject", SUBJECTS)
def test_near_to_far_reads_what_the_proved_program_reads_and_kernels_no_less_than_they_must(
    program, subject
):
    end = 240 if subject == "near_to_far" else 60  # its blocks are small, and the program quick
    for number in range(SUBJECTS.index(subject), end, len(SUBJECTS)):
        outcome = attack(0, number)
        assert outcome.subject == subject and not outcome.failure
        assert outcome.entry["tiles"] and outcome.entry["ratio"] <= 1


@pytest.mark.processes
@pytest.mark.parametrize("number", (3, 46, 494))
def test_a_certificate_that_is_wrong_by_a_factor_is_noticed(program, number):
    outcome = attack(0, number, factor=100)
    assert outcome.entry["ratio"] > 1 and outcome.failure
