"""The mutants of `make mutants` can still be made: what they change is still there, once."""

import mutants


def test_every_change_can_be_made_and_has_its_line_in_the_table():
    listed = mutants.read_mutants()
    assert len(listed) >= 120
    assert mutants.mistakes(listed) == []
    table = mutants.TABLE.read_text(encoding="utf-8")
    assert [m.breaks for m in listed if f"| {m.breaks} |" not in table] == []
