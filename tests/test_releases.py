"""The list of broken and mended releases is whole, its scripts are scripts, and what was measured is what it lists."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SPEC = importlib.util.spec_from_file_location("releases_run", HERE / "releases" / "run.py")
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)
CASES = run.cases()
FIELDS = {
    "thread": str, "what": str, "package": str, "broken": str, "mended": str, "pins": list, "script": str,
    "options": list, "layouts": list, "cause": str,
}  # fmt: skip


def options_of(script: Path) -> set[str]:
    """What the script's parser takes: the first argument of each ``add_argument``."""
    calls = [node for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    added = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {call.args[0].value for call in added}


def rows_of_a_step(layout: str) -> int:
    """Ranks of whole models times a micro-batch times the accumulated micro-batches."""
    values = {key: int(value) for key, _, value in (part.partition("=") for part in layout.split())}
    return values["ranks"] // values.get("pp", 1) * values["batch"] * values["accumulate"]


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_whole(name: str) -> None:
    case = CASES[name]
    assert {field: type(value) for field, value in case.items()} == FIELDS
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case["thread"])
    older, newer = ([int(part) for part in case[which].split(".")] for which in ("broken", "mended"))
    assert older < newer
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in case["pins"])
    assert len(case["layouts"]) == 2
    assert len({rows_of_a_step(layout) for layout in case["layouts"]}) == 1


@pytest.mark.parametrize("name", CASES)
def test_its_script_takes_what_it_is_given(name: str) -> None:
    case = CASES[name]
    script = HERE / "releases" / case["script"]
    words = run.command(case)
    given = words[words.index("--") + 2 :]
    assert {word for word in given if word.startswith("--")} <= options_of(script)
    fields = {part.partition("=")[0] for layout in case["layouts"] for part in layout.split()} - {"ranks"}
    assert {f"{{{field}}}" for field in fields} <= set(given)


def test_what_was_measured_is_what_is_listed() -> None:
    kept = json.loads(run.RESULT.read_text(encoding="utf-8"))
    assert list(kept) == list(CASES)
    for name, case in CASES.items():
        came = kept[name]
        assert came["command"] == shlex.join(["python", *run.command(case)])
        assert [came[which]["release"] for which in ("broken", "mended")] == [case["broken"], case["mended"]]
        assert came["mended"]["equal"]
        assert not came["broken"]["equal"]
        found = came["broken"]["findings"]
        assert (found[0]["cause"] if found else "") == case["cause"]
    assert run.table(kept) in run.PAGE.read_text(encoding="utf-8")


def test_a_verdict_in_a_line() -> None:
    finding = {
        "what": "gradients",
        "cause": "mean-of-means",
        "why": "parts weigh the same",
        "factor": None,
        "rest": 0.5,
    }
    assert run.said({"equal": True, "findings": [], "not compared": []}) == "trains alike"
    assert run.said({"equal": False, "findings": [], "not compared": ["no step"]}) == "not compared: no step"
    said = run.said({"equal": False, "findings": [finding], "not compared": []})
    assert said == "gradients, mean-of-means, rest 0.5: parts weigh the same"


def test_environments_lie_outside(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", str(HERE / "releases" / "environments")])
    with pytest.raises(SystemExit) as stopped:
        run.main()
    assert stopped.value.code == 2
    assert "is in this project" in capsys.readouterr().err


def test_the_night_keeps_old_releases_outside_of_the_project() -> None:
    spec = importlib.util.spec_from_file_location("nightly", HERE.parent / ".ci" / "nightly.py")
    nightly = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nightly)
    _, script, folder = nightly.PARTS["releases"].command
    assert (HERE.parent / script).is_file()
    assert not Path(folder).resolve().is_relative_to(HERE.parent)
