"""What starts the book elsewhere names what is really here."""

import json
import os
import re
import subprocess

from pardemo import project

ROOT = project.PACKAGE.parent


def test_binder_installs_what_the_makefile_installs():
    script = ROOT / ".binder" / "postBuild"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    installs = re.findall(r"pip install .*", script.read_text())
    made = re.findall(r"pip install .*", (ROOT / "Makefile").read_text())
    quiet = r" --(?:quiet|no-cache-dir|disable-pip-version-check)"
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
