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

#: Seconds for an installation, and for a command of git.
INSTALL_S, GIT_S = 900, 120
#: What a reproduction says of a version: it shows the difference, it does not, or it could not be run.
WRONG, RIGHT, UNKNOWN = "wrong", "right", "unknown"


def first_wrong(versions: Sequence[str], judge: Callable[[str], str]) -> tuple[str, str]:
    """Returns the last version that is right and the first that is wrong, by halving; empty where there is none.

    A version that cannot be judged makes way for its neighbours.

    Args:
        versions: from the oldest on, of which the last is taken for wrong.
        judge: says :data:`WRONG`, :data:`RIGHT` or :data:`UNKNOWN` of one.
    """
    low, high = -1, len(versions) - 1  # low: the last that is known to be right; high: the first known to be wrong
    unknown: set[int] = set()
    at = 0
    while True:
        verdict = judge(versions[at])
        if verdict == UNKNOWN:
            unknown.add(at)
        elif verdict == WRONG:
            high = at
        else:
            low = at
        left = [place for place in range(low + 1, high) if place not in unknown]
        if not left:
            return versions[low] if low >= 0 else "", versions[high]
        middle = (low + high) / 2
        at = min(left, key=lambda number: abs(number - middle))


def since_release(script: Path, ranks: tuple[int, int], package: str, since: str, note: Callable[[str], None]) -> str:
    """Says since which release of a package a reproduction shows its difference, in a sentence.

    Each release is installed by pip without its dependencies into a folder of its own, which stands before the
    environment's packages.

    Args:
        since: the oldest release to try. note: gets a line on each release.

    Raises:
        ValueError: pip knows no such package, or no release from ``since`` to the installed one; one line.
    """
    installed = metadata.version(package).partition("+")[0]
    known = [version for version in releases(package) if _key(since) <= _key(version) < _key(installed)]
    if not known:
        raise ValueError(f"pip knows no release of {package} from {since} to before {installed}, which is installed")
    skipped: list[str] = []

    def judge(version: str) -> str:
        with tempfile.TemporaryDirectory(prefix="pardemo-release-") as folder:
            line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder,
                    "--disable-pip-version-check", f"{package}=={version}"]  # fmt: skip
            if error := _failure(line, INSTALL_S):
                skipped.append(f"{version} (cannot be installed: {error})")
                note(f"    {package} {version}: cannot be installed: {error}")
                return UNKNOWN
            return _judged(f"{package} {version}", script, ranks, folder, skipped, note)

    right, wrong = first_wrong([*known, installed], lambda version: WRONG if version == installed else judge(version))
    return _sentence(package, right, wrong, skipped)


def since_commit(script: Path, ranks: tuple[int, int], clone: Path, since: str, note: Callable[[str], None]) -> str:
    """Says since which commit of a clone a reproduction shows its difference, in a sentence.

    Each commit is checked out into a folder of its own, which stands before the environment's packages; the clone's
    working tree stays as it is.

    Args:
        since: the oldest commit to try, an ancestor of the clone's HEAD.

    Raises:
        ValueError: it is no clone, or has no such commit; one line.
    """
    commits = [_git(clone, "rev-parse", "--verify", "--quiet", f"{since}^{{commit}}").strip()]
    commits += _git(clone, "rev-list", "--first-parent", "--reverse", f"{commits[0]}..HEAD").split()
    if len(commits) < 2:
        raise ValueError(f"{since} has no later commits on the way to HEAD of {clone}")
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

    if judge(commits[-1]) != WRONG:
        return f"HEAD of the clone does not show it{_skipped(skipped)}."
    right, wrong = first_wrong(commits, lambda commit: WRONG if commit == commits[-1] else judge(commit))
    title = _git(clone, "log", "-1", "--format=%s", wrong).strip()
    return _sentence("commit", right[:12], f"{wrong[:12]} ({title})", skipped)


def _judged(
    name: str, script: Path, ranks: tuple[int, int], folder: str, skipped: list[str], note: Callable[[str], None]
) -> str:
    """Runs a reproduction with a folder before all other packages, and says what it shows."""
    paths = os.pathsep.join([folder, *(entry for entry in sys.path if entry)])
    output, error = printed(script, ranks, {"PYTHONPATH": paths})
    verdict = UNKNOWN if error else WRONG if "DIFFERENT" in output else RIGHT
    if error:
        skipped.append(f"{name.split()[-1]} ({error})")
    note(f"    {name}: {error or ('shows it' if verdict == WRONG else 'does not show it')}")
    return verdict


def _sentence(name: str, right: str, wrong: str, skipped: list[str]) -> str:
    begin = f"Not in {name} {right}, and since {wrong}" if right else f"Already in {name} {wrong}, the oldest tried"
    return f"{begin}{_skipped(skipped)}."


def _skipped(skipped: list[str]) -> str:
    return f"; not tried: {', '.join(skipped)}" if skipped else ""


def releases(package: str) -> list[str]:
    """Returns the final releases of a package that pip's index has for this Python, the oldest first.

    Raises:
        ValueError: pip names none; one line.
    """
    line = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", package]
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ValueError(f"pip index versions {package} was not over after {GIT_S} s") from None
    listed = re.search(r"^Available versions: (.+)$", run.stdout, re.MULTILINE)
    if run.returncode or listed is None:
        last = (run.stderr.strip().splitlines() or ["it names none"])[-1]
        raise ValueError(f"pip index versions {package}: {last}")
    final = [version.strip().partition("+")[0] for version in listed[1].split(",")]
    return sorted({version for version in final if re.fullmatch(r"[\d.]+", version)}, key=_key)


def _key(version: str) -> list[int]:
    """Orders releases: ``2.9`` comes before ``2.11``."""
    return [int(number) for number in re.findall(r"\d+", version)]


def _failure(line: Sequence[str], timeout_s: float) -> str:
    """Runs a command; returns the last line of its errors where it fails."""
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"not over after {timeout_s:g} s"
    return (run.stderr.strip().splitlines() or ["it says nothing"])[-1] if run.returncode else ""


def _git(clone: Path, *words: str) -> str:
    """Runs a command of git in a clone; returns what it prints.

    Raises:
        ValueError: it fails; one line.
    """
    try:
        run = subprocess.run(
            ["git", "-C", str(clone), *words], capture_output=True, text=True, timeout=GIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"git {words[0]} in {clone} was not over after {GIT_S} s") from None
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"there is no {words[-1]}"])[-1]
        raise ValueError(f"git {words[0]} in {clone}: {last}")
    return run.stdout
