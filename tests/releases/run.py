"""``python tests/releases/run.py FOLDER [NAME …] [--write]``: broken releases beside those that mended them.

For each case of ``releases.toml`` makes two environments in FOLDER, with the broken and with the mended release and
what it is pinned to, and runs the case's script under ``pardemo prove`` in both; those that are there are used again.
With ``--write`` what came out is kept in outputs/reference/releases.json, and the table of
docs/records/broken-releases.md is made anew. It takes minutes and a package index, so the tests leave it out.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULT = ROOT / "outputs" / "reference" / "releases.json"
PAGE = ROOT / "docs" / "records" / "broken-releases.md"
PLACE = re.compile(r"(<!-- releases -->\n).*?(<!-- /releases -->)", re.DOTALL)
#: What ``pardemo prove`` needs in each environment, at the versions of requirements.txt, and what old releases ask for.
BASE = ("torch", "numpy", "psutil", "cloudpickle")
OLD_SETUPTOOLS = "setuptools==80.9.0"  # pkg_resources and distutils are of it, which old releases import
#: Seconds for a layout: DeepSpeed compiles an operation of its own at its first start in an environment.
TIMEOUT_S = 600


def cases() -> dict[str, dict]:
    """The cases of ``releases.toml``, by name."""
    return tomllib.loads((HERE / "releases.toml").read_text(encoding="utf-8"))


def main() -> int:
    """0 where each broken release differs and each mended one does not; 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the environments, outside of this project")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases; all by default")
    parser.add_argument("--write", action="store_true", help="keep what came out, and write the table")
    args = parser.parse_args()
    folder, known = args.folder.resolve(), cases()
    if folder.is_relative_to(ROOT):
        parser.error(f"{args.folder} is in this project: old releases must not lie beside it")
    if unknown := set(args.names) - known.keys():
        parser.error(f"there is no {min(unknown)}: choose of {', '.join(known)}")

    came, right = {}, True
    for name in args.names or known:
        case = known[name]
        came[name] = {key: case[key] for key in ("thread", "package", "script", "what")}
        came[name]["command"] = shlex.join(["python", *command(case)])
        for which in ("broken", "mended"):
            python = environment(folder, [f"{case['package']}=={case[which]}", *case["pins"]])
            verdict = proven(python, case)
            came[name][which] = {"release": case[which], **verdict}
            print(f"{name}, {case['package']} {case[which]}: {said(verdict)}", flush=True)
        if args.write:
            keep(came, known)
        right = right and not came[name]["broken"]["equal"] and came[name]["mended"]["equal"]
    return 0 if right else 1


def environment(folder: Path, requirements: list[str]) -> Path:
    """The Python of an environment that has ``requirements``; torch is that of an environment they all share."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.M))
    shared = installed(folder / "base", [*(f"{name}=={pinned[name]}" for name in BASE), OLD_SETUPTOOLS])
    where = [shared, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    return installed(folder / "+".join(requirements).replace("==", "-"), requirements, packages)


def installed(place: Path, requirements: list[str], beside: str = "") -> Path:
    """The Python of the environment in ``place``, made where it is not there yet; packages ``beside`` are seen, too."""
    python, done = place / "bin" / "python", place / "installed"
    if not done.is_file():
        venv.create(place, with_pip=True, clear=True)
        if beside:
            packages = next((place / "lib").glob("python*/site-packages"))
            (packages / "beside.pth").write_text(beside + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        done.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    return python


def command(case: dict) -> list[str]:
    """The arguments of Python that prove a case; each value of a layout but its ranks goes to the script."""
    fields = [part.partition("=")[0] for part in case["layouts"][0].split()]
    passed = [word for field in fields if field != "ranks" for word in (f"--{field}", f"{{{field}}}")]
    layouts = [word for layout in case["layouts"] for word in ("--layout", layout)]
    script = (HERE / case["script"]).relative_to(ROOT).as_posix()
    return ["-m", "pardemo", "prove", *layouts, "--", script, *passed, *case["options"]]


def proven(python: Path, case: dict) -> dict:
    """What ``pardemo prove`` says of a case under ``python``.

    Raises:
        RuntimeError: it said nothing; with the end of its error stream.
    """
    place = python.parent.parent
    environ = os.environ | {
        "PYTHONPATH": str(ROOT), "PATH": f"{python.parent}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(place / "extensions"), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    words = command(case)
    words[3:3] = ["--json", f"--timeout={TIMEOUT_S}"]
    run = subprocess.run([python, *words], cwd=ROOT, env=environ, capture_output=True, text=True)
    if not run.stdout.strip():
        raise RuntimeError(f"{shlex.join(words)} under {place.name}: {run.stderr[-2000:]}")
    made = json.loads(run.stdout)
    findings = [
        {key: one[key] for key in ("step", "what", "cause", "why", "factor", "rest", "module")}
        | {"parameters": len(one["parameters"])}
        for one in made["findings"]
    ]
    failed = [one["error"] for one in made["layouts"] if one["error"]]
    return {"equal": made["equal"], "findings": findings, "not compared": failed}


def said(verdict: dict, why: bool = True) -> str:
    """A verdict in a line: its first finding, with its sentence if ``why``, or that there is none."""
    if verdict["equal"]:
        return "trains alike"
    if not verdict["findings"]:
        return f"not compared: {verdict['not compared'][0]}"
    first = verdict["findings"][0]
    numbers = [f"{name} {first[name]:.4g}" for name in ("factor", "rest") if first[name] is not None]
    line = ", ".join(dict.fromkeys([first["what"], first["cause"] or "no cause known", *numbers]))
    return f"{line}: {first['why']}" if why else line


def keep(came: dict[str, dict], known: dict[str, dict]) -> None:
    """Puts what came out into the committed file, in the order of ``releases.toml``, and writes the page's table."""
    before = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    kept = {name: (before | came)[name] for name in known if name in before | came}
    RESULT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PLACE.sub(lambda place: place[1] + table(kept) + place[2], page), encoding="utf-8")


def table(kept: dict[str, dict]) -> str:
    """The page's table, in Markdown: a row for each case."""
    lines = ["| what the release does | thread | broken | `pardemo prove` says of it | mended | and of that |"]
    lines.append("|---|---|---|---|---|---|")
    for case in kept.values():
        repository, _, number = case["thread"].partition("#")
        thread = f"[{repository.partition('/')[2]} {number}](https://github.com/{repository}/issues/{number})"
        broken, mended = (f"{case['package']} {case[which]['release']}" for which in ("broken", "mended"))
        row = [case["what"], thread, broken, said(case["broken"], False), mended, said(case["mended"], False)]
        lines.append(f"| {' | '.join(cell.replace('|', ',') for cell in row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
