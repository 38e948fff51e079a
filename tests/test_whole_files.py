"""What a fine-tune leaves is whole, or it is not there under its name: a run may be killed between any two lines.

(That files are replaced whole is :func:`pardemo.project.write_atomically`'s, tested with the runner's files.)
"""

import os
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
