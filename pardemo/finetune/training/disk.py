"""Why something could not be written, in words: libraries say ``enforce fail at inline_container`` of a full disk."""

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pardemo.tables import amount

if TYPE_CHECKING:
    from torch import nn

#: Of the system, torch and safetensors: what they raise where the system does not take all of a file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNS = ("inline_container", *(f"os error {number}" for number in NO_ROOM))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def adapter_bytes(model: "nn.Module") -> int:
    """Bytes of the parameters that are trained, whole: under ZeRO-3 a rank holds a shard of each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)


def checkpoint_bytes(model: "nn.Module") -> int:
    """About what a checkpoint of DeepSpeed's takes: the adapter twice, AdamW's moments and copy of it in fp32."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return 2 * adapter_bytes(model) + 12 * sum(getattr(p, "ds_numel", p.numel()) for p in trained)


def reason(error: Exception, part: Path, nbytes: int) -> str:
    """One line that says why ``part``, a folder that takes about ``nbytes``, was not written.

    Where there is no room: the disk, the bytes that are needed and those that there are. Else what the error says.
    """
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if getattr(error, "errno", None) not in NO_ROOM and not any(sign in str(error) for sign in SIGNS):
        return first
    disk = part.absolute()
    while not os.path.ismount(disk):
        disk = disk.parent
    room = shutil.disk_usage(disk).free + folder_bytes(part)
    needed = f"it takes about {amount(nbytes, 1)}, and"
    if room < nbytes:
        return f"{needed} the disk at {disk} has {amount(room, 1)} left for it"
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if longest != resource.RLIM_INFINITY:
        return f"{needed} no file of this process may be larger than {amount(longest, 1)} (ulimit -f)"
    return f"{needed} the disk at {disk}, with {amount(room, 1)} left, did not take all of it: a quota? ({first})"
