"""Finds the release or the commit of a library since which a reproduction shows a difference, by halving."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from pardemo.script.search.reproduction import printed

#: Seconds for an installation, and for another command.
INSTALL_S, COMMAND_S = 900, 120
#: What a reproduction says of a version: it shows the difference, it does not, or it could not be run.
WRONG, RIGHT, UNKNOWN = "wrong", "right", "unknown"
Note = Callable[[str], None]


def first_wrong(versions: Sequence[str], judge: Callable[[str], str]) -> tuple[str, str]:
    """Returns the last version that is right and the first that is wrong, by halving; empty where there is none.

    A version that cannot be judged makes way for its neighbours.

    Args:
        versions: from the oldest on, of which the last is taken for wrong.
        judge: says :data:`WRONG`, :data:`RIGHT` or :data:`UNKNOWN` of one.
    """
    low, high = -1, len(versions) - 1  # low: the last that is known to be right; high: the first known to be wrong
    left = set(range(high))
    at = 0.0
    while left:
        number = min(left, key=lambda number: (abs(number - at), number))
        verdict = judge(versions[number])
        if verdict == WRONG:
            high = number
        elif verdict == RIGHT:
            low = number
        left = {other for other in left if low < other < high and other != number}
        at = (low + high) / 2
    return versions[low] if low >= 0 else "", versions[high]


def releases(package: str, since: str) -> list[str]:
    """Returns a package's final releases that pip's index has for this Python, from ``since`` to the installed one.

    Raises:
        ValueError: it is not installed, pip knows no such package, or no release before the installed one; one line.
    """
    try:
        installed = metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        raise ValueError(f"--package {package} is not installed: say a package that the script uses") from None
    line = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    listed = re.search(r"^Available versions: (.+)$", _output(line, f"pip index versions {package}"), re.MULTILINE)
    final = {version.strip().partition("+")[0] for version in (listed[1].split(",") if listed else ())}
    known = [version for version in final if re.fullmatch(r"[\d.]+", version)]
    before = [version for version in known if _key(since) <= _key(version) < _key(installed)]
    if not before:
        raise ValueError(f"pip knows no release of {package} from {since} to before {installed}, which is installed")
    return [*sorted(before, key=_key), installed]


def commits(clone: Path, since: str) -> list[str]:
    """Returns the commits of a clone from ``since`` to its HEAD, on the way of first parents.

    Raises:
        ValueError: it is no clone, has no such commit, or none behind it; one line.
    """
    first = _git(clone, "rev-list", "--max-count=1", f"{since}^{{commit}}", "--").strip()
    listed = [first, *_git(clone, "rev-list", "--first-parent", "--reverse", f"{first}..HEAD").split()]
    if len(listed) < 2:
        raise ValueError(f"{since} has no later commits on the way to HEAD of {clone}")
    return listed


def since_release(script: Path, ranks: tuple[int, int], package: str, versions: Sequence[str], note: Note) -> str:
    """Says since which release of a package a reproduction shows its difference, in a sentence.

    Each release is installed by pip without its dependencies into a folder of its own, which stands before the
    environment's packages.

    Args:
        versions: of :func:`releases`. note: gets a line on each.
    """
    skipped: list[str] = []

    def judge(version: str) -> str:
        with tempfile.TemporaryDirectory(prefix="pardemo-release-") as folder:
            line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder,
                    "--disable-pip-version-check", f"{package}=={version}"]  # fmt: skip
            try:
                _output(line, "it cannot be installed", INSTALL_S)
            except ValueError as error:
                return _unknown(f"{package} {version}", str(error), skipped, note)
            return _judged(f"{package} {version}", script, ranks, folder, skipped, note)

    right, wrong = first_wrong(versions, judge)
    return _sentence(package, right, wrong, skipped)


def since_commit(script: Path, ranks: tuple[int, int], clone: Path, versions: Sequence[str], note: Note) -> str:
    """Says since which commit of a clone a reproduction shows its difference, in a sentence.

    Each commit is checked out into a folder of its own, which stands before the environment's packages; the clone's
    working tree stays as it is.

    Args:
        versions: of :func:`commits`. note: gets a line on each.

    Raises:
        ValueError: git cannot check one out; one line.
    """
    skipped: list[str] = []

    def judge(commit: str) -> str:
        with tempfile.TemporaryDirectory(prefix="pardemo-commit-") as folder:
            tree = Path(folder, "tree")
            _git(clone, "worktree", "add", "--quiet", "--detach", str(tree), commit)
            try:
                inside = tree / "src" if (tree / "src").is_dir() else tree
                return _judged(commit[:12], script, ranks, str(inside), skipped, note)
            finally:
                _git(clone, "worktree", "remove", "--force", str(tree))

    if judge(versions[-1]) != WRONG:
        return f"HEAD of the clone does not show it{_skipped(skipped)}."
    right, wrong = first_wrong(versions, judge)
    title = _git(clone, "log", "-1", "--format=%s", wrong).strip()
    return _sentence("commit", right[:12], f"{wrong[:12]} ({title})", skipped)


def _judged(name: str, script: Path, ranks: tuple[int, int], folder: str, skipped: list[str], note: Note) -> str:
    """Runs a reproduction with a folder before all other packages, and says what it shows."""
    paths = os.pathsep.join([folder, *(entry for entry in sys.path if entry)])
    output, error = printed(script, ranks, {"PYTHONPATH": paths})
    if error:
        return _unknown(name, error, skipped, note)
    verdict = WRONG if "DIFFERENT" in output else RIGHT
    note(f"    {name}: {'shows it' if verdict == WRONG else 'does not show it'}")
    return verdict


def _unknown(name: str, reason: str, skipped: list[str], note: Note) -> str:
    skipped.append(f"{name.split()[-1]} ({reason})")
    note(f"    {name}: {reason}")
    return UNKNOWN


def _sentence(name: str, right: str, wrong: str, skipped: list[str]) -> str:
    begin = f"Not in {name} {right}, and since {wrong}" if right else f"Already in {name} {wrong}, the oldest tried"
    return f"{begin}{_skipped(skipped)}."


def _skipped(skipped: list[str]) -> str:
    return f"; not tried: {', '.join(skipped)}" if skipped else ""


def _key(version: str) -> list[int]:
    """Orders releases: ``2.9`` comes before ``2.11``."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _git(clone: Path, *words: str) -> str:
    return _output(["git", "-C", str(clone), *words], f"git {words[0]} in {clone}")


def _output(line: Sequence[str], name: str, timeout_s: float = COMMAND_S) -> str:
    """Runs a command and returns what it prints.

    Raises:
        ValueError: it fails or takes longer; one line, which begins with ``name``.
    """
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name}: not over after {timeout_s:g} s") from None
    except OSError as error:
        raise ValueError(f"{name}: {error}") from None
    if run.returncode:
        raise ValueError(f"{name}: {(run.stderr.strip().splitlines() or ['it says nothing'])[-1]}")
    return run.stdout
