"""``python tests/fresh_environments.py [light] [full] [versions]``: the package, built, installed alone, and used.

Builds the sdist and from it the wheel, lets twine look at both, makes an environment for each kind, installs the wheel
(``light``: alone; ``full``: with the extra [all]) and runs it in a folder that is no clone. With ``--write`` the table
of packages in docs/light-core.md is made anew. ``versions`` installs the light core with each Python and torch of
:data:`VERSIONS` (``--version 3.13:2.15.0`` names others), and measures, proves and plans there; with ``--write`` its
rows of docs/light-core.md are made anew. It takes minutes and a package index, so ``make test`` leaves it out;
``.github/workflows/package.yml`` runs it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "light-core.md"
PLACE = re.compile(r"(<!-- packages -->\n).*?(<!-- /packages -->)", re.DOTALL)
TRIED = re.compile(r"(<!-- versions -->\n)(.*?)(<!-- /versions -->)", re.DOTALL)
REQUIREMENT = {"light": "{wheel}", "full": "{wheel}[all]"}
SEARCH = ("plan", "--search", "--model", "llama3-8b", "--gpu", "H100", "--gpus", "8")
#: Two ranks, a ring whose bytes are counted, a step under ZeRO, hosts with links that have limits.
CORE = textwrap.dedent(
    """
    import sys, torch
    from pardemo import Cluster, MemoryMeter, WireMeter, World
    from pardemo.collectives import ring_all_reduce
    from pardemo.zero import Zero2

    def experiment():
        tensor = torch.ones(1 << 20)
        with WireMeter() as wire:
            ring_all_reduce(tensor)
        assert (tensor == 2).all()
        model = torch.nn.Linear(64, 64)
        engine = Zero2(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
        with MemoryMeter() as memory:
            engine(torch.ones(2, 64)).sum().backward()
            engine.step()
        return wire.sent_bytes

    def main():
        for cluster in (None, Cluster(2, 1, between="100 Mbit/s")):
            with World(2, cluster=cluster) as world:
                sent = world.run(experiment, timeout_s=120)
                assert all(abs(nbytes / (4 << 20) - 1) < 0.01 for nbytes in sent), sent
        loaded = {"transformers", "pandas", "matplotlib", "deepspeed"} & set(sys.modules)
        assert not loaded, loaded
        print("ring, meters, ZeRO, cluster: as predicted")

    if __name__ == "__main__":
        main()
    """
)
#: Python and torch. torch's CPU build where the index has one, else the one for CUDA, which runs on CPUs as well.
VERSIONS = ("3.11:2.12.1", "3.11:2.13.0", "3.11:2.14.1", "3.11:2.15.0", "3.12:2.14.1", "3.13:2.12.1", "3.13:2.15.0")
#: What is said of a version whose Python is not installed: no row of the table.
NOT_HERE = "its Python is not here"
#: A script as people have it, which by ``--broken`` sums gradients where a mean was meant.
SCRIPT = textwrap.dedent(
    """
    import argparse, os, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    options = argparse.ArgumentParser()
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--broken", action="store_true")
    given = options.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
    net = model if given.broken else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(6, 8, 256, generator=torch.Generator().manual_seed(1))
    for batch in data:
        mine = batch[rank * given.batch : (rank + 1) * given.batch]
        optimizer.zero_grad()
        net(mine).square().mean().backward()
        if given.broken:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    dist.destroy_process_group()
    """
)
LAYOUTS = ("--layout", "ranks=1 batch=8", "--layout", "ranks=2 batch=4")
#: What is done with it with each version: command, exit status, and what it has to say.
USED = {
    "measure": (("measure", "--ranks", "2", "--", "script.py"), 0, r"(?s).*542.*"),
    "prove": (("prove", "--double", *LAYOUTS, "--", "script.py", "--batch", "{batch}"), 0, r"(?s).*\nequal\b.*"),
    "prove, of a sum": (
        ("prove", "--double", *LAYOUTS, "--", "script.py", "--batch", "{batch}", "--broken"), 1,
        r"(?s).*\[sum-for-mean\].*",
    ),
    "plan": (("plan", "--price", "1"), 0, r"(?s).* micro-.*"),
}  # fmt: skip
#: Command -> status and what it says, in a folder that is no clone.
SAYS = {
    "light": {
        ("run", "01"): (2, r"pardemo run: no notebooks in .*: they come with the repository, .* git clone \S+"),
        ("plan", "--price", "1"): (0, r"(?s).* micro-.*"),
        ("plan", "--dry-run"): (2, r"pardemo plan needs \S+, which the extra \[finetune\] brings: .*"),
        ("finetune", "tiny-cpu"): (2, r"pardemo finetune needs \S+, which the extra \[finetune\] brings: .*"),
        ("doctor",): (0, r"(?s).*not installed: pip install 'pardemo\[book\] @ git\+.*"),
        SEARCH: (0, r"(?s)full training of llama3-8b, 8\.0B parameters.*"),
    },
    "full": {
        ("run", "01"): (2, r"pardemo run: no notebooks in .*: they come with the repository, .* git clone \S+"),
        ("finetune", "tiny-cpu"): (2, r"pardemo finetune: .*they come with the repository, .* git clone \S+"),
        ("plan", "--model", "gpt2", "--full", "--gpus", "2", "--batch", "1", "--zero", "2"): (0, r"(?s).* micro-.*"),
        SEARCH: (0, r"(?s)full training of llama3-8b, 8\.0B parameters.*"),
    },
}  # fmt: skip


def main() -> int:
    """Returns 0 where all is as it should be; AssertionError or CalledProcessError says what is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kinds", nargs="*", choices=[[], *REQUIREMENT, "versions"], metavar="KIND",
        help="light, full, versions; the first two by default",
    )  # fmt: skip
    parser.add_argument("--version", action="append", metavar="PYTHON:TORCH", help="of versions: only these")
    parser.add_argument("--write", action="store_true", help="make the table in docs/light-core.md anew")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    arguments = parser.parse_args()
    kinds = arguments.kinds or list(REQUIREMENT)
    versions = arguments.version or VERSIONS
    folder = Path(tempfile.mkdtemp(prefix="pardemo-fresh-"))
    try:
        wheel = build(folder)
        tables = {kind: check(kind, wheel, folder) for kind in kinds if kind in REQUIREMENT}
        rows = [check_version(each, wheel, folder) for each in versions] if "versions" in kinds else []
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.write and tables:
        write(tables)
    if arguments.write:
        write_versions(rows)
    return int(any(result != "passed" for *_, result in rows))


def build(folder: Path) -> Path:
    """The wheel, built from the sdist of what git knows here; both pass ``twine check``."""
    source = folder / "source"
    for name in run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    python = environment(folder / "tools", "build", "twine")
    run(python, "-m", "build", "--outdir", str(folder / "dist"), str(source))
    files = sorted((folder / "dist").iterdir())
    run(python, "-m", "twine", "check", "--strict", *map(str, files))
    print("built:", ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in files), flush=True)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    return wheel


def check(kind: str, wheel: Path, folder: Path) -> list[tuple[str, str, int]]:
    """Installs and uses the wheel; returns name, version and bytes of each package that is there then."""
    python = environment(folder / kind, REQUIREMENT[kind].format(wheel=wheel))
    run(python, "-m", "pip", "check")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    script = elsewhere / "core.py"
    script.write_text(CORE)
    print(f"{kind}:", run(python, str(script), cwd=elsewhere).strip(), flush=True)
    for command, (status, pattern) in SAYS[kind].items():
        done = subprocess.run(
            [python, "-m", "pardemo", *command], cwd=elsewhere, capture_output=True, text=True, timeout=600, check=False
        )
        said = (done.stdout if status == 0 else done.stderr).strip()
        assert done.returncode == status, f"{kind}: pardemo {' '.join(command)}: {done.returncode}\n{done.stderr}"
        assert re.fullmatch(pattern, said), f"{kind}: pardemo {' '.join(command)}: {said}"
        print(f"{kind}: pardemo {' '.join(command)}: {said.splitlines()[0]}", flush=True)
    packages = installed(python)
    print(f"{kind}: {len(packages)} packages, {sum(row[2] for row in packages) / 1e6:,.0f} MB", flush=True)
    return packages


def check_version(version: str, wheel: Path, folder: Path) -> tuple[str, str, str]:
    """Uses the wheel with one Python and one torch; returns both and ``passed``, or what failed in one line.

    The environment is taken away at once: torch's build for CUDA takes 5.6 GB.
    """
    python_version, torch_version = version.split(":")
    interpreter = python_of(python_version)
    if interpreter is None:
        print(f"no python{python_version} here", file=sys.stderr)
        return python_version, torch_version, NOT_HERE
    place = folder / version.replace(":", "-")
    try:
        python = environment(place, f"torch=={torch_version}", str(wheel), interpreter=interpreter)
        exact = run(python, "-c", "import platform; print(platform.python_version())").strip()
        elsewhere = place / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "core.py").write_text(CORE)
        (elsewhere / "script.py").write_text(SCRIPT)
        run(python, "core.py", cwd=elsewhere)
        failed = []
        for name, (command, status, pattern) in USED.items():
            done = subprocess.run(
                [python, "-m", "pardemo", *command], cwd=elsewhere, capture_output=True, text=True, timeout=600,
                check=False,
            )  # fmt: skip
            if done.returncode != status or not re.fullmatch(pattern, done.stdout.strip()):
                print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
                failed.append(name)
        result = "failed: " + ", ".join(failed) if failed else "passed"
    except subprocess.CalledProcessError as error:
        exact, result = python_version, f"failed: {' '.join(map(str, error.cmd[1:4]))}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"Python {exact}, torch {torch_version}: {result}", flush=True)
    return exact, torch_version, result


def python_of(version: str) -> str | None:
    """That Python, as 3.12, on PATH or among pyenv's, whose own ``python3.12`` starts nothing until one is chosen."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = (shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}"))))
    for python in filter(None, found):
        if subprocess.run([python, "-c", "import ensurepip, venv"], check=False, capture_output=True).returncode == 0:
            return python
    return None


def environment(folder: Path, *requirements: str, interpreter: str = sys.executable) -> str:
    """A new environment with these; returns its Python."""
    run(interpreter, "-m", "venv", str(folder))
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)
    return python


def installed(python: str) -> list[tuple[str, str, int]]:
    """The packages of an environment but for pip and setuptools, the largest first."""
    code = """
        import json
        from importlib import metadata
        size = lambda path: path.stat().st_size if path.is_file() else 0
        rows = [
            (one.metadata["Name"], one.version, sum(size(file.locate()) for file in one.files or ()))
            for one in metadata.distributions()
        ]
        print(json.dumps(sorted(rows, key=lambda row: -row[2])))
    """
    return [tuple(row) for row in json.loads(run(python, "-c", textwrap.dedent(code))) if row[0] not in ("pip",)]


def write(tables: dict[str, list[tuple[str, str, int]]]) -> None:
    """The table of the light installation, and a line for the full one."""
    lines = []
    if rows := tables.get("light"):
        lines += ["| package | version | MB |", "|---|---|---|"]
        lines += [f"| {name} | {version} | {nbytes / 1e6:,.1f} |" for name, version, nbytes in rows]
        lines += ["", said("light", "pip install .", rows)]
    if rows := tables.get("full"):
        lines += ["", said("full", "pip install '.[all]'", rows)]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PLACE.sub(lambda place: place[1] + "\n".join(lines) + "\n" + place[2], text), encoding="utf-8")


def write_versions(rows: list[tuple[str, str, str]]) -> None:
    """The rows of the versions that were tried now; others stay."""
    rows = [row for row in rows if row[2] != NOT_HERE]
    if not rows:
        return
    text = PAGE.read_text(encoding="utf-8")
    lines = TRIED.search(text)[2].splitlines()[2:]
    kept = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    tried = {(minor(row[0]), row[1]): row for row in (*kept, *rows)}
    lines = ["| Python | torch | `World`, ring, ZeRO, cluster, `measure`, `prove`, `plan` |", "|---|---|---|"]
    lines += [f"| {' | '.join(tried[key])} |" for key in sorted(tried)]
    PAGE.write_text(TRIED.sub(lambda place: place[1] + "\n".join(lines) + "\n" + place[3], text), encoding="utf-8")


def minor(version: str) -> tuple[int, ...]:
    """3 and 13 of ``3.13.0``."""
    return tuple(map(int, version.split(".")[:2]))


def said(kind: str, command: str, rows: list[tuple[str, str, int]]) -> str:
    total = sum(nbytes for *_, nbytes in rows)
    return f"{kind.capitalize()} (`{command}`): {len(rows)} packages, {total / 1e6:,.0f} MB."


def run(*command: str, cwd: Path | None = None) -> str:
    """What the command prints. Raises CalledProcessError, after what it said, where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ})
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
