"""Write evidence/records/conformance.jsonl: every adapter against the vectors, in its own process.

    python conformance/run.py [NAME ...]

Each is a file in adapters/ with `attention`, or a function in biases.py or models.py there. One
with a file in requirements/ gets a virtual environment in build/conformance/, with this one's
packages behind its own. A deviation that its authors chose is "another convention", with the
reason.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from adapters import biases, models
from linbias._machine import now, num_cores, processor

HERE = Path(__file__).parent
ROOT = HERE.parent
RECORDS = ROOT / "evidence" / "records" / "conformance.jsonl"
# By name, the module and the function.
ADAPTERS = {
    **{
        name: f"{module.__name__}:{name}"
        for module in (biases, models)
        for name, x in vars(module).items()
        if hasattr(x, "RUNS")
    },
    **{
        path.stem: f"adapters.{path.stem}:attention"
        for path in (HERE / "adapters").glob("*.py")
        if path.stem not in ("parts", "biases", "models")
    },
}
# What could not be run here, and why.
NOT_RUN = {
    "flash-attn 2 (package)": "its kernels need CUDA; their formulas are above",
    "vLLM": "not in this checker; whole models are compared in it by make serve",
    "TransformerEngine": "its source package could not be built here",
}
DESCRIBE = """
import importlib, json, sys
from importlib import metadata
module, function = sys.argv[1].split(":")
m = importlib.import_module(module)
m = m if function == "attention" else getattr(m, function)
version = m.PACKAGE and metadata.version(m.PACKAGE)
print(json.dumps({"implementation": m.NAME, "version": version, "runs": m.RUNS,
                  "dtypes": getattr(m, "DTYPES", ["float32"]),
                  "conventions": getattr(m, "CONVENTIONS", {})}))
"""


def environment(name: str) -> str:
    """The interpreter for an adapter."""
    requirements = HERE / "requirements" / f"{name}.txt"
    if not requirements.exists():
        return sys.executable
    folder = ROOT / "build" / "conformance" / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        seen = [
            path for path in sys.path if Path(path).is_dir() and "python" not in Path(path).name
        ]
        Path(packages, "zz_behind.pth").write_text("\n".join([str(ROOT / "src"), *seen]) + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements]
        subprocess.run(install, check=True)
        done.touch()
    return str(python)


def run(name: str) -> list[dict]:
    """The lines of one adapter."""
    python, call = environment(name), ADAPTERS[name]
    options = {"cwd": HERE, "text": True, "env": {**os.environ, "PYTHONPATH": str(HERE)}}
    command = [python, "-W", "ignore", "-c", DESCRIBE, call]
    told = subprocess.run(command, capture_output=True, timeout=300, check=False, **options)
    if told.returncode:
        raise SystemExit(f"{name}: {told.stderr.strip().splitlines()[-1]}")
    about = json.loads(told.stdout.strip().splitlines()[-1])
    lines = []
    for dtype in about.pop("dtypes"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [python, "-W", "ignore", "check.py", "--call", call, "--dtype", dtype]
            command += ["--json", file.name]
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=600, check=False, **options)
            records = json.loads(Path(file.name).read_text())
        key = {"adapter": name, "dtype": dtype}
        reasons = {}
        for record in records:
            if record["verdict"] == "not claimed":
                reasons.setdefault(record["note"], []).append(record["row"])
        machine = {"machine": f"{processor()} {num_cores()} cores", "date": now()[:10]}
        about_run = {x: about[x] for x in ("implementation", "version", "runs")}
        rows: list[dict] = []
        lines.append({**key, **about_run, **machine, "not_claimed": reasons, "rows": rows})
        for record in records:
            if record["verdict"] == "not claimed":
                continue
            why = about["conventions"].get(record["row"])
            if why and record["verdict"] == "wrong":
                record |= {"verdict": "another convention", "note": why}
            error = None if record["error"] is None else float(f"{record['error']:.2g}")
            row = {"row": record["row"], "verdict": record["verdict"], "error": error}
            rows.append(row | ({"note": record["note"]} if record["note"] else {}))
    return lines


def main() -> None:
    lines = []
    for name in sys.argv[1:] or sorted(ADAPTERS):
        found = run(name)
        rows = [row for line in found for row in line["rows"]]
        bad = [row for row in rows if row["verdict"] in ("wrong", "failed")]
        print(f"{name}: {len(rows)} rows, {len(bad)} wrong or failed", flush=True)
        lines += found
    if not sys.argv[1:]:
        lines += [{"implementation": name, "not_run": why} for name, why in NOT_RUN.items()]
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        RECORDS.write_text(text, encoding="utf-8")
        print(f"{RECORDS.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
