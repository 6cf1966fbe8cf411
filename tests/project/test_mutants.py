"""The mutants of `make mutants` can still be made: what they change is still there, once."""

import pytest

import mutants


def test_every_change_can_be_made():
    listed = mutants.read_mutants()
    assert len(listed) >= 120
    assert mutants.mistakes(listed) == []


def test_a_target_that_this_machine_cannot_run_is_no_result(tmp_path, monkeypatch):
    program = tmp_path / "attention_test"
    says = "echo attention_test: target must be one of avx2, got $1"
    program.write_text(f"#!/bin/sh\n{says}\nexit 2\n")
    program.chmod(0o700)
    monkeypatch.setattr(mutants.Workspace, "build", lambda self, target: program)
    workspace = object.__new__(mutants.Workspace)
    workspace.seconds = 60.0
    message = r"this machine cannot run core neon: .*must be one of avx2, got neon"
    with pytest.raises(mutants.NoResult, match=message):
        workspace.run("core neon")
