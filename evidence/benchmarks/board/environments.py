"""An environment for each engine that has a list of packages, on top of the one that runs."""

import hashlib
import json
import os
import re
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

    Packages are a list as `pip install -r` takes it, where lines `#: NAME=value` set variables for
    pip; without one the engine runs where this runs.
    """
    if not packages.exists():
        return Path(sys.executable)
    state = folder / "state.json"
    want = hashlib.sha256(packages.read_bytes()).hexdigest()
    known = json.loads(state.read_text()) if state.exists() else {}
    if known.get("packages") != want:
        known = {"packages": want, "failed": install(packages, folder)}
        state.write_text(json.dumps(known))
    if known["failed"]:
        raise NotInstalled(known["failed"])
    return folder / "bin" / "python"


def install(packages: Path, folder: Path) -> str | None:
    """Make the environment; return why pip failed, if it did."""
    print(f"installing {packages.stem}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    own = next(folder.glob("lib/python*/site-packages"))
    paths = (*site.getsitepackages(), *site.getusersitepackages().split(":"))
    ours = [path for path in paths if Path(path).is_dir()]
    (own / "ours.pth").write_text(f"import site; list(map(site.addsitedir, {ours!r}))\n")
    settings = re.findall(r"^#:\s*(\S+?)=(.*?)\s*$", packages.read_text(), re.MULTILINE)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", packages]
    how = {"capture_output": True, "text": True, "timeout": SECONDS}
    try:
        done = subprocess.run(command, check=False, env=os.environ | dict(settings), **how)
    except subprocess.TimeoutExpired:
        return f"pip took more than {SECONDS // 60} minutes"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith(("[notice]", "hint:"))]
    return errors[-1][:300] if errors else f"pip ended with {done.returncode}"
