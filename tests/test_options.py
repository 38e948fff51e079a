"""Numbers on the command line that are impossible: each refused in one line, before a command loads torch."""

import argparse
import json
import subprocess
import sys

import pytest

from pardemo import cli

#: A command with one bad number, and what is said of it.
BAD = [
    ("run --cell-timeout 0", "--cell-timeout must be above 0, not 0"),
    ("doctor --ranks 0", "--ranks must be at least 1, not 0"),
    ("finetune tiny-cpu --ranks 0", "--ranks must be at least 1, not 0"),
    ("predict tiny-cpu --ranks -1", "--ranks must be at least 1, not -1"),
    ("predict tiny-cpu --limit 0", "--limit must be at least 1, not 0"),
    ("data build --train -1", "--train must be 0 or more, not -1"),
    ("data build --test -1", "--test must be 0 or more, not -1"),
    *((f"data build --{name} -1", f"--{name} must be 0 or more, not -1")
      for name in ("min-input", "max-input", "min-output", "max-output")),
    *((f"plan --{name} 0", f"--{name} must be at least 1, not 0")
      for name in ("batch", "sequence", "samples", "per-step", "gpus", "hosts", "tp", "pp")),
    ("plan --epochs 0", "--epochs must be above 0, not 0"),
    *((f"plan --search --model gpt2 --gpus 8 --{name} 0", f"--{name} must be at least 1, not 0")
      for name in ("hosts", "sequence", "per-step")),
    ("measure --ranks 0 -- train.py", "--ranks must be at least 1, not 0"),
    ("measure --steps 0 -- train.py", "--steps must be at least 1, not 0"),
    *((f"measure --full-size gpt2 --{name} 0 -- train.py", f"--{name} must be at least 1, not 0")
      for name in ("gpus", "sequence", "micro-batch")),
    ("measure --timeout 0 -- train.py", "--timeout must be above 0, not 0"),
    ("prove --steps 0 --layout ranks=1 -- train.py", "--steps must be at least 1, not 0"),
    *((f"prove --search --{name} 0 -- train.py", f"--{name} must be at least 1, not 0")
      for name in ("ranks", "samples")),
    ("prove --search --minutes 0 -- train.py", "--minutes must be above 0, not 0"),
    ("prove --timeout 0 --layout ranks=1 -- train.py", "--timeout must be above 0, not 0"),
    ("plan --measure profile.json --gpus 0", "--gpus must be at least 1, not 0"),
    ("plan --labels 0", "--labels is a share above 0 and up to 1, not 0.0"),
    ("plan --labels nan", "--labels is a share above 0 and up to 1, not nan"),
    ("plan --rank 0", "--rank must be at least 1, not 0"),
    ("prove --stop --grace -1", "--grace must be 0 or above, not -1"),
    ("plan --price -1", "--price must be 0 or more, not -1.0"),
    ("plan --price nan", "--price must be 0 or more, not nan"),
    ("plan --price inf", "--price must be a number, not inf"),
    ("plan --link 0", "a link's rate must be above 0 Gbit/s, not 0"),
]  # fmt: skip
#: Numbers of which each is possible.
ANY = {("data build", "--seed"), ("prove", "--seed")}

WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None  # importing it raises
from pardemo import cli
said = []
for command in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        said.append([cli.main(command.split()), error.getvalue()])
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """What each command says, and its status, in a process that cannot load torch."""
    commands = [command for command, _ in BAD]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], input=json.dumps(commands), capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("command", "told"), BAD)
def test_a_bad_number_is_refused_in_one_line_before_torch_is_loaded(said, command, told):
    assert said[command] == [2, f"pardemo {command.split()[0]}: {told}\n"]


def numbers_of(parser, command=""):
    """Each command's options that take a number."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from numbers_of(inner, f"{command} {name}".strip())
        elif action.type in (int, float):
            yield command, action.option_strings[0]


def test_every_option_that_takes_a_number_is_among_them():
    tried = {(command, option) for command, option in numbers_of(cli._parser())
             if any(bad.startswith(f"{command} ") and f" {option} " in bad for bad, _ in BAD)}  # fmt: skip
    assert set(numbers_of(cli._parser())) - ANY == tried


#: Commands beside ``pardemo``: modules that are commands of their own, a bad option, and what is said of it.
COMMANDS = [
    ("pardemo.finetune", "tiny-cpu --ranks 0", "--ranks must be at least 1, not 0"),
    ("pardemo.finetune", "tiny-cpu --ranks x", "argument --ranks: invalid int value: 'x'"),
    ("pardemo.book.chapters.baichuan2_plan.cuda_peak", "--outt x", "unrecognized arguments: --outt x"),
    ("pardemo.world", "a:b", "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
]
DOOR_WITHOUT_TORCH = """
import contextlib, io, json, runpy, sys
sys.modules["torch"] = None  # importing it raises
said = []
for module, options in json.load(sys.stdin):
    sys.argv = [module, *options.split()]
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            runpy.run_module(module, run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
    said.append([status, error.getvalue()])
print(json.dumps(said))
"""


def test_the_other_doors_refuse_a_bad_option_before_torch_is_loaded():
    asked = json.dumps([command[:2] for command in COMMANDS])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DOOR_WITHOUT_TORCH], input=asked, capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for (module, options, told), (status, error) in zip(COMMANDS, json.loads(done.stdout), strict=True):
        assert status == 2, (module, options, error)
        assert told in error.splitlines()[-1], (module, options, error)
