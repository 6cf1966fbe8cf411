"""Write what "auto" takes for short calls, src/linbias/kernels/fastest.py, from the records of benchmarks/bench_short.py.

python benchmarks/bench_short.py --records records/NEW.jsonl    # once per kind of CPU, on a quiet machine
python runs/fastest.py                                          # from every file in records/, the newest record counts
"""

import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src/linbias/kernels/fastest.py"
# A gain below it is no reason to keep a bias in memory, and may be noise.
LEAST_GAIN = 1.1

Key = tuple[str, str, bool, int]  # target, dtype, whether gradients are taken, head size


def newest(folder: Path) -> dict[tuple[Key, int], dict[str, float]]:
    """Median milliseconds of each implementation, by key and length."""
    found: dict[tuple[Key, int], dict[str, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem[-10:], path.name)):
        target = None
        for record in map(json.loads, path.read_text().splitlines()):
            if record.get("implementation") == "cpu" and "B" in record:
                target = record.get("target")  # the core comes first in each case
            if record.get("implementation") in ("cpu", "sdpa") and target and "B" in record:
                gradients = record["mode"] == "forward+backward"
                key = target, record["dtype"], gradients, record["D"]
                found[key, record["T"]][record["implementation"]] = record["p50_ms"]
    return found


def table(times: dict[tuple[Key, int], dict[str, float]]) -> dict[Key, int]:
    """The longest length up to which `sdpa` is faster at every length that was measured; 0: at none."""
    longest: dict[Key, int] = {}
    stopped = set()
    for (key, length), ms in sorted(times.items()):
        if len(ms) < 2:
            continue
        longest.setdefault(key, 0)
        if key not in stopped and ms["cpu"] > LEAST_GAIN * ms["sdpa"]:
            longest[key] = length
        else:
            stopped.add(key)
    return longest


def main() -> None:
    lines = [
        '"""Up to which length PyTorch\'s attention is faster than the compiled core: `python runs/fastest.py` writes this.',
        "",
        "By CPU target, dtype, whether gradients are taken, and head size: the number of queries, which is that of keys.",
        '"""',
        "",
        "SDPA_UP_TO = {",
        *(f"    {key!r}: {length},".replace("'", '"') for key, length in table(newest(ROOT / "records")).items()),
        "}",
        "",
    ]  # fmt: skip
    TABLE.write_text("\n".join(lines))
    print(TABLE.relative_to(ROOT))


if __name__ == "__main__":
    main()
