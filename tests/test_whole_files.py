"""What a run leaves is whole, or it is not there under its name: a run may be killed between any two lines.

And one run at a time writes to a folder.
"""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pardemo import project, signed_folders
from pardemo.finetune import train


@pytest.fixture
def killed_before_the_last_move(monkeypatch):
    """A file is written under another name and then moved; this run does not get that far."""

    def killed(*_):
        raise InterruptedError

    monkeypatch.setattr(os, "replace", killed)


@pytest.fixture
def own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("PARDEMO_KEY", str(tmp_path / "configuration" / "key"))
    return tmp_path / "configuration" / "key"


@pytest.mark.usefixtures("own_key", "killed_before_the_last_move")
def test_a_seal_that_was_not_finished_is_no_seal(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 1000)
    with pytest.raises(InterruptedError):
        signed_folders.sign(folder, step=3)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert signed_folders.fault(folder) == "it was never finished"


def test_a_key_has_its_name_when_it_is_whole(own_key, monkeypatch):
    """A run that reads half a key would refuse every checkpoint of the run that wrote the other half."""
    before = []

    def link(source, target):
        before.append((os.path.getsize(source), os.path.exists(target)))
        os.rename(source, target)
        open(source, "w").close()

    monkeypatch.setattr(os, "link", link)
    assert len(signed_folders._key()) == signed_folders.KEY_BYTES
    assert before == [(signed_folders.KEY_BYTES, False)]
    assert signed_folders._key() == own_key.read_bytes(), "and stays"
    assert own_key.stat().st_mode & 0o077 == 0, "the user's alone"


class Saves:
    """A trainer that writes an adapter, or half of one."""

    model = torch.nn.Linear(2, 2)

    def __init__(self, disk_is_full=False):
        self.disk_is_full = disk_is_full

    accelerator = SimpleNamespace(wait_for_everyone=lambda: None)

    def is_world_process_zero(self):
        return True

    def save_model(self, folder):
        os.mkdir(folder)
        self.place = os.stat(folder).st_ino
        for name in ("adapter_config.json", "training_args.bin", "README.md", "adapter_model.safetensors"):
            if self.disk_is_full and name == "adapter_model.safetensors":
                raise OSError("No space left on device")
            project.write_atomically(Path(folder) / name, lambda file: file.write_text("new"))


def test_an_adapter_is_moved_to_its_place_when_it_is_whole(tmp_path):
    trainer = Saves()
    adapter = train._save_adapter(trainer, tmp_path)
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert adapter.stat().st_ino == trainer.place, "moved: a copy would be there by halves for a while"
    assert list(tmp_path.iterdir()) == [adapter]


def test_an_adapter_that_could_not_be_written_leaves_the_one_before(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_text("old")
    with pytest.raises(OSError, match="No space left"):
        train._save_adapter(Saves(disk_is_full=True), tmp_path)
    assert [(path.name, path.read_text()) for path in (tmp_path / "adapter").iterdir()] == [
        ("adapter_model.safetensors", "old")
    ]


HOLDS = """
import sys, time
from pathlib import Path
from pardemo import project
with project.only_writer(Path(sys.argv[1]), "wait"):
    print(flush=True)
    time.sleep(600)
"""


def test_a_killed_run_holds_its_folder_no_longer(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE)
    with owner:
        owner.stdout.readline()
        with pytest.raises(
            ValueError, match=rf"^another run \(process {owner.pid}\) writes to {tmp_path}: wait for it"
        ):
            project.only_writer(tmp_path, "go").__enter__()
        owner.kill()
    with project.only_writer(tmp_path, "go"):
        assert (tmp_path / project.LOCK).read_text() == str(os.getpid())
    assert not (tmp_path / project.LOCK).exists()


def test_a_lock_that_its_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    flock, path = fcntl.flock, tmp_path / project.LOCK

    def after_the_owner(file, how):
        monkeypatch.undo()
        path.unlink()  # its owner ends between our opening it and our lock
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_owner)
    with project.only_writer(tmp_path, "go"):
        assert path.read_text() == str(os.getpid())
        with pytest.raises(ValueError, match="another run"):
            project.only_writer(tmp_path, "go").__enter__()


def test_files_are_replaced_whole_or_not_at_all(tmp_path):
    target = tmp_path / "file.txt"
    target.write_text("before")

    def fails(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        project.write_atomically(target, fails)
    assert target.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_a_full_disk_is_told_with_the_files_name(tmp_path):
    def fills(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write tells it

    with pytest.raises(OSError, match=r"claims\.csv"):
        project.write_atomically(tmp_path / "claims.csv", fills)
    assert list(tmp_path.iterdir()) == []
