"""Before anything is installed: what `make run` needs of the machine, with the remedy for what is missing."""

import shutil
import sys


def problems() -> list[str]:
    found: list[str] = []
    if sys.version_info < (3, 11):  # noqa: UP036  (runs before anything is installed)
        found.append(f"Python {sys.version.split()[0]}: 3.11 or newer is needed (make PYTHON=python3.11 run)")
    if not sys.platform.startswith("linux"):
        found.append(f"{sys.platform}: sandboxes need Linux namespaces; use a Linux machine or virtual machine")
    if shutil.which("bwrap") is None:
        found.append("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman: the package has this name)")
    return found


if __name__ == "__main__":
    for problem in problems():
        print(f"rl360: {problem}", file=sys.stderr)
    raise SystemExit(1 if problems() else 0)
