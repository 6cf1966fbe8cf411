"""What examples/flax_extrapolation.py prints, in docs/jax.md.

python runs/flax_example.py
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from markers import fill

from linbias import _machine

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "jax.md"
RECORDS = ROOT / "records"


def main() -> None:
    start = time.perf_counter()
    command = [sys.executable, ROOT / "examples" / "flax_extrapolation.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    record = {
        "seconds": time.perf_counter() - start,
        **{"printed": done.stdout, "machine": _machine.processor(), "date": _machine.now()},
        "cores": _machine.num_cores(),
    }
    RECORDS.joinpath("flax_example.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = "\n".join(f"    {line}".rstrip() for line in done.stdout.strip().splitlines())
    text = (
        f"{lines}\n\n{record['machine']}, {record['cores']} cores, {record['seconds'] / 60:.1f} minutes, "
        f"{record['date']}, `python runs/flax_example.py`."
    )
    fill(DOCUMENT, {"example": text})


if __name__ == "__main__":
    main()
