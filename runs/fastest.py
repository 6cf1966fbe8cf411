"""Write what "auto" takes for short calls, src/linbias/kernels/fastest.py, from the records of benchmarks/bench_short.py.

python benchmarks/bench_short.py    # once per kind of CPU, on a quiet machine; adds to records/
python runs/fastest.py              # from every file in records/; of the same case, the newest counts
"""

import itertools
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src/linbias/kernels/fastest.py"
# A gain below it is no reason to keep a bias in memory, and may be noise.
LEAST_GAIN = 1.1

Key = tuple[str, str, bool, int]  # target, dtype, whether gradients are taken, head size


def newest(folder: Path) -> dict[tuple[Key, int], dict[str, float]]:
    """Median milliseconds of each implementation, by key and length."""
    found: dict[tuple[Key, int], dict[str, float]] = {}
    lines = [
        line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    pairs = itertools.pairwise(
        sorted(map(json.loads, lines), key=lambda record: record.get("date", ""))
    )
    for core, sdpa in pairs:  # of one run they follow each other
        if core.get("implementation") == "cpu" and sdpa.get("implementation") == "sdpa":
            key = core["target"], core["dtype"], core["mode"] == "forward+backward", core["D"]
            found[key, core["T"]] = {"cpu": core["p50_ms"], "sdpa": sdpa["p50_ms"]}
    return found


def table(times: dict[tuple[Key, int], dict[str, float]]) -> dict[Key, tuple[int, int]]:
    """From the shortest length that was measured to the longest up to which `sdpa` is faster at each; 0: at none."""
    lengths: dict[Key, tuple[int, int]] = {}
    stopped = set()
    for (key, length), ms in sorted(times.items()):
        shortest, longest = lengths.setdefault(key, (length, 0))
        if key not in stopped and ms["cpu"] > LEAST_GAIN * ms["sdpa"]:
            longest = length
        else:
            stopped.add(key)
        lengths[key] = shortest, longest
    return lengths


def main() -> None:
    lines = [
        '"""At which lengths PyTorch\'s attention is faster than the compiled core: `python runs/fastest.py` writes this.',
        "",
        "By CPU target, dtype, whether gradients are taken, and head size: the shortest number of queries, which is that of",
        "keys, that was measured, and the longest up to which it is faster; 0 where it is at none.",
        '"""',
        "",
        "SDPA_IS_FASTER: dict[tuple[str, str, bool, int], tuple[int, int]] = {",
        *(f"    {key!r}: {found!r},".replace("'", '"') for key, found in table(newest(ROOT / "records")).items()),
        "}",
        "",
    ]  # fmt: skip
    TABLE.write_text("\n".join(lines))
    print(TABLE.relative_to(ROOT))


if __name__ == "__main__":
    main()
