"""What ``pardemo prove --out`` leaves: a page, the verdict for programs, tensors of what nobody explains."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from pardemo.measure import files as measured
from pardemo.prove import page
from pardemo.prove.proof import Proof
from pardemo.prove.unexplained import Kept

PAGE, VERDICT, TENSORS = "prove.html", "prove.json", "tensors"
#: How a file of tensors is called, and a folder in which all is written first.
_TENSORS, _WRITTEN = re.compile(r"finding\d+\.safetensors"), ".prove-"


def folder(path: str) -> Path:
    """The folder for a proof, made where there is none. It may have an earlier proof, which makes room for the new one.

    Raises:
        ValueError: it has other things, cannot be one, or cannot be written to; said before anything runs.
    """
    made = measured.folder(path)
    strange = sorted(one.name for one in made.iterdir() if not _ours(one))
    if strange:
        raise ValueError(f"--out: {path} has other things in it, as {strange[0]}: say a folder of its own")
    return made


def _ours(path: Path) -> bool:
    """Whether a proof has written this."""
    if path.name == TENSORS and path.is_dir() and not path.is_symlink():
        return all(_TENSORS.fullmatch(one.name) for one in path.iterdir())
    return path.name in (PAGE, VERDICT) or path.name.startswith(_WRITTEN)


def write(folder: Path, made: Proof, script: str) -> None:
    """Writes all into a folder inside this one, and moves it out when it is whole, the page last.

    The page and the verdict of an earlier proof go first: where a page is, all that it names is of the same proof.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {finding: number for number, finding in enumerate(made.findings, 1)}
    made.files = {finding: f"{TENSORS}/finding{numbers[finding]}.safetensors" for finding in made.kept}
    for left in folder.glob(f"{_WRITTEN}*"):  # by a proof that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WRITTEN) as temporary:
        whole = Path(temporary)
        for finding, kept in made.kept.items():
            _save(whole / made.files[finding], kept)
        (whole / VERDICT).write_text(json.dumps(made.as_json(), indent=1), "utf-8")
        (whole / PAGE).write_text(page.page(made, script), "utf-8")
        (folder / PAGE).unlink(missing_ok=True)
        (folder / VERDICT).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORS, ignore_errors=True)
        for name in (TENSORS, VERDICT, PAGE):
            if (whole / name).exists():
                os.replace(whole / name, folder / name)


def _save(path: Path, kept: Kept) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in kept.tensors.items()}  # none shares memory
    save_file(tensors, path, {"left out": json.dumps(kept.left_out), "sketches": json.dumps(kept.sketches)})
