"""Importing pardemo changes nothing of the process: what does so is a function, called where it is needed."""

import json
import subprocess
import sys

import pytest

from pardemo import project

#: What other libraries change when they are imported is theirs: they are there before the first look.
BEFORE = """
import importlib, json, logging, os, pkgutil, sys, warnings
import IPython, accelerate, datasets, matplotlib.pyplot, pandas, scipy.special, torch.distributed.pipelining
import transformers.integrations.deepspeed

def state():
    levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict}
    return {
        # but for what DeepSpeed sets itself, which a test before this one may have left
        "environment": {k: v for k, v in os.environ.items() if k != "PYTORCH_NVML_BASED_CUDA_CHECK"},
        "filters": [str(one) for one in warnings.filters],
        "levels": levels | {"root": logging.root.level},
        "handlers": len(logging.root.handlers),
        "style": {name: str(value) for name, value in matplotlib.rcParams.items()},
        "functions": [str(f) for f in (torch.compile, torch.nn.functional.linear, warnings.showwarning)],
    }
"""
OF_ALL = f"""{BEFORE}
before = state()
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{{package}}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
after = state()
after["levels"] = {{name: level for name, level in after["levels"].items() if name in before["levels"]}}
changed = {{what: [one for one in after[what].items() if one not in before[what].items()]
           if isinstance(after[what], dict) else after[what] for what in after if after[what] != before[what]}}
print(json.dumps(changed))
"""
OF_DEEPSPEED = f"""{BEFORE}
import pardemo.peers.deepspeed.engine as engine
ops, logger = vars(engine.deepspeed.ops), logging.getLogger("DeepSpeed")
machine = torch.device("cuda" if torch.cuda.is_available() else "cpu")
found = ["DS_ACCELERATOR" in os.environ, engine.computes_on(machine), "__compatible_ops__" in ops]
found += [logger.level]
engine.prepare()
filters = len(warnings.filters)
found += ["DS_ACCELERATOR" in os.environ, ops["__compatible_ops__"], logger.level]
engine.prepare()
print(json.dumps([*found, len(warnings.filters) - filters]))
"""


def asked(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code, *arguments],
        capture_output=True, text=True, timeout=300, check=False,
        cwd=project.root(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.nightly
def test_importing_peers_drawings_and_the_book_changes_nothing(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    changed, _ = asked(OF_ALL, "pardemo.peers", "pardemo.draw", "pardemo.book", "pardemo.cells")
    assert changed == {}


def test_deepspeed_is_set_up_by_a_call_and_once(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    found, told = asked(OF_DEEPSPEED)
    imported, prepared, again = found[:4], found[4:7], found[7]
    assert imported == [False, True, False, 30], "its device is the machine's; its logger as it made it"
    assert prepared == [False, {}, 40]
    assert again == 0
    assert "accelerator" not in told


def test_the_doctor_reads_settings_without_a_word_of_deepspeeds(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    done = subprocess.run(
        [sys.executable, "-m", "pardemo", "doctor", "--deepspeed", tmp_path / "ds.json", "--ranks", "8"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{tmp_path}/ds.json: DeepSpeed will take it, on 8 ranks"]
    assert done.stderr == ""
