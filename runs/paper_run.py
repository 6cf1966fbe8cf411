"""The whole path of the paper in one command, timed: the table in docs/paper.md.

python runs/paper_run.py --wikitext-2 FOLDER        # with its train.txt, valid.txt and test.txt
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from markers import fill

from linbias import _machine

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "paper.md"
RECORDS = ROOT / "records"
COLUMNS = ("split", "length", "context_window", "num_tokens", "perplexity")
FORMATS = ("", ",", ",", ",", ".2f")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wikitext-2", type=Path, required=True)
    options = parser.parse_args()
    texts = [options.wikitext_2 / f"{split}.txt" for split in ("train", "valid", "test")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "linbias", "paper", "run", *texts, "-o", f"{folder}/out"]
        start = time.perf_counter()
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
        seconds = time.perf_counter() - start
    record = {
        **{"seconds": seconds, "machine": _machine.processor(), "cores": _machine.num_cores()},
        **{"versions": _machine.versions(), "date": _machine.now()},
        **json.loads(done.stdout),
    }
    RECORDS.joinpath("paper_run.json").write_text(json.dumps(record, indent=1) + "\n")
    fill(DOCUMENT, {"run": table(record)})


def table(record: dict) -> str:
    lines = [
        "| split | length | context | tokens | perplexity |",
        "|---" * len(COLUMNS) + "|",
        *(
            "| "
            + " | ".join(f"{r[c]:{form}}" for c, form in zip(COLUMNS, FORMATS, strict=True))
            + " |"
            for r in record["evaluations"]
        ),
    ]
    training = record["training"]
    return "\n".join(lines) + (
        f"\n\n{training['num_parameters'] / 1e6:.2f} M parameters, {training['steps']:,} steps. In all "
        f"{record['seconds'] / 60:.1f} minutes, {training['seconds'] / 60:.1f} of them training; {record['machine']}, "
        f"{record['cores']} cores, {record['date']}, `python runs/paper_run.py --wikitext-2 FOLDER`."
    )


if __name__ == "__main__":
    main()
