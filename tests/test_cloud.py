"""What starts the book elsewhere names what is really here."""

import json
import os
import re
import subprocess

import pytest
import yaml

import pardemo
from pardemo import project

ROOT = project.PACKAGE.parent


def test_binder_installs_what_the_makefile_installs():
    script = ROOT / ".binder" / "postBuild"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    installs = re.findall(r"pip install .*", script.read_text())
    made = re.findall(r"pip install .*", (ROOT / "Makefile").read_text())
    quiet = r" --(?:quiet|no-cache-dir|no-compile|disable-pip-version-check)"
    assert [re.sub(quiet, "", line) for line in installs] == [re.sub(quiet, "", line) for line in made]
    python = (ROOT / ".binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    assert f">={python}" in (ROOT / "pyproject.toml").read_text()


def test_the_dev_container_makes_the_environment():
    told = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    target = told["postCreateCommand"].removeprefix("make ")
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)
    assert "--cap-add=NET_ADMIN" in told["runArgs"], "network namespaces for the cluster"


def test_the_cell_for_colab_installs_from_files_that_are_there():
    text = (ROOT / "docs" / "cloud.md").read_text()
    (cell,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert re.search(r"-r (\S+)", cell)[1] == "requirements.txt"
    assert "--no-deps --no-build-isolation -e ." in cell
    assert re.search(r"git clone --depth 1 (\S+)", cell)[1] == project.REPOSITORY
    name = project.REPOSITORY.removeprefix("https://github.com/")
    for page in (text, (ROOT / "README.md").read_text()):
        assert f"](https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/notebooks)" in page
    assert not re.search(r"OWNER|REPOSITORY", text)


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_what_is_there(path):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        assert job["timeout-minutes"] <= {"nightly": 358, "newest": 240}.get(path.stem, 90)  # a job ends after 360
        for step in job["steps"]:
            for target in re.findall(r"^\s*make (\w+)", step.get("run", ""), flags=re.M):
                assert target in targets
            for script in re.findall(r"(?:^|\s)((?:tests|\.ci)/[\w./-]+)", step.get("run", "")):
                assert (ROOT / script).is_file(), script


def test_contributors_are_told_commands_that_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(re.findall(r"\bmake (\w+)", text)) - {"run"} <= set(targets)
    for name in re.findall(r"`((?:docs|tests|pardemo|\.ci|\.github)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).is_file(), name


def test_one_version_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == pardemo.__version__
    assert f"## {pardemo.__version__}" in (ROOT / "CHANGELOG.md").read_text()
