"""Try this commit in another Debian, with its Python and its compiler, as root.

    make debian SUITE=sid GOALS='run test'
    python release/debian.py sid make run
    python release/debian.py sid --packages python3.15-dev,python3.15-venv make PYTHON=python3.15

The first call puts the suite into build/debian/SUITE by debootstrap: 1 GB, and later what pip
installs there. Each call brings the checkout's last commit to /linbias inside and keeps what was
built there, .venv too. Nothing stays mounted: the mounts end with the command.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = "ca-certificates,g++,git,make,python3-dev,python3-venv"
# How this machine reaches the network and its package index.
LENT = ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/pip.conf", "/etc/xdg/pip", "~/.config/pip")
ENTER = """
set -e
root=$1; lent=$2; shift 2
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for path in $lent; do
  mkdir -p "$root${path%/*}"
  if [ -d "$path" ]; then mkdir -p "$root$path"; else touch "$root$path"; fi
  mount --bind "$path" "$root$path"
done
exec chroot "$root" sh -c 'cd /linbias && exec "$@"' sh "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", help="one of Debian's: trixie, forky, sid")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run in /linbias")
    parser.add_argument("--packages", help="Debian's packages to install besides, with commas")
    parser.add_argument("--mount", action="append", default=[], help="a folder to be seen inside")
    arguments = parser.parse_args()
    folder = ROOT / "build/debian" / arguments.suite
    lent = [str(Path(path).expanduser()) for path in (*LENT, *arguments.mount)]
    if not folder.exists():
        bootstrap(arguments.suite, folder)

    def inside(*words: str) -> int:
        namespace = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
        there = " ".join(path for path in lent if Path(path).exists())
        enter = ("sh", "-c", ENTER, "sh", str(folder), there)
        return subprocess.run([*namespace, *enter, *words], check=False).returncode

    update(folder / "linbias")
    if arguments.packages:
        inside("apt-get", "install", "--yes", "--quiet", *arguments.packages.split(","))
    sys.exit(inside(*arguments.command))


def bootstrap(suite: str, folder: Path) -> None:
    """Make a Debian that is whole or not there."""
    if shutil.which("debootstrap") is None:
        sys.exit("release/debian.py needs debootstrap: apt-get install debootstrap, and root")
    unfinished = folder.with_name(f"{suite}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    words = ("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(unfinished))
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    unfinished.rename(folder)


def update(checkout: Path) -> None:
    """Bring the last commit, and leave what git ignores."""
    if not checkout.exists():
        subprocess.run(["git", "init", "--quiet", checkout], check=True)
    for words in (
        ["fetch", "--quiet", ROOT, "HEAD"],
        ["reset", "--quiet", "--hard", "FETCH_HEAD"],
    ):
        subprocess.run(["git", "-C", checkout, *words], check=True)


if __name__ == "__main__":
    main()
