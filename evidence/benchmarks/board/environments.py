"""A virtual environment for each engine that has a list of packages, on top of the one that runs this: what it lacks is taken from there."""

import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

SECONDS = 2700  # some engines are compiled


class NotInstalled(Exception):
    """Why there is no environment: the last line of pip."""


def interpreter(packages: Path, folder: Path) -> Path:
    """The Python of an environment, made if it is not there yet or its list has changed.

    Args:
        packages: A list as `pip install -r` takes it, where lines `#: NAME=value` set variables for pip. If there is no such
            file, the engine runs where this runs.
        folder: Where the environment is, or goes.

    Raises:
        NotInstalled: It cannot be made now, or could not be with this list.
    """
    if not packages.exists():
        return Path(sys.executable)
    python, state = folder / "bin" / "python", folder / "state.json"
    text = packages.read_text()
    want = hashlib.sha256(text.encode()).hexdigest()
    known = json.loads(state.read_text()) if state.exists() else {}
    if known.get("packages") != want:
        known = {"packages": want, "failed": install(text, packages, folder)}
        state.write_text(json.dumps(known))
    if known["failed"]:
        raise NotInstalled(known["failed"])
    return python


def install(text: str, packages: Path, folder: Path) -> str | None:
    """Make the environment; return why pip failed, if it did."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = next(folder.glob("lib/python*/site-packages"))
    ours = [path for path in (*site.getsitepackages(), *site.getusersitepackages().split(":")) if Path(path).is_dir()]  # fmt: skip
    (own / "ours.pth").write_text(f"import site; list(map(site.addsitedir, {ours!r}))\n")
    settings = dict(line[2:].strip().split("=", 1) for line in text.splitlines() if line.startswith("#:"))  # fmt: skip
    command = [python, "-m", "pip", "install", "--quiet", "-r", packages]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip took more than {SECONDS // 60} minutes"
    (folder / "pip.log").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(("[notice]", "hint:"))]  # fmt: skip
    return errors[-1].strip()[:300] if errors else f"pip ended with {done.returncode}"
