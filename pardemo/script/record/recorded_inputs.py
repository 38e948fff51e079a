"""Writes what each step of a layout trains on into a folder of safetensors and JSON, and reads such folders.

Reading a folder executes nothing: tensors are safetensors, the rest is JSON, and each file has a checksum there.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pardemo import compat
from pardemo.script.record.input_follower import BatchPosition, InputFollower
from pardemo.script.record.model_outputs import REFERENCE, SAMPLES, ModelCall, samples_name
from pardemo.script.record.rank_record import project_rows
from pardemo.script.record.recorder import Recorder
from pardemo.signed_folders import checksums

#: The index of a folder, which is written last; its format, and the version that is written and read.
INDEX, FORMAT, VERSION = "recording.json", "pardemo recorded inputs", 2
#: Bytes of the largest tensor of the loss that is recorded: a larger one is a table, and no batch.
LARGEST = 256 << 20
#: Beginnings of slots: calls of models, a Trainer's inputs, the loss's tensors and numbers, draws, routes.
CALL, BATCH, LOSS, NUMBER, DRAW, ROUTE = "call", "batch", "loss", "number", "draw", "route"
#: The end of slots that have the scores by which rows were drawn or routed, as two projections and the norm.
SCORES = "|scores"


class InputRecorder(InputFollower):
    """Records what a rank trains on, and writes it to ``folder``, a file for each step."""

    def __init__(self, recorder: Recorder, folder: str):
        super().__init__(recorder)
        self._folder = folder
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._beside: dict[int, torch.Tensor] = {}  # tensors that the loss has read in this micro-batch, once each
        self._call: ModelCall | None = None
        recorder.on_finish = self._write

    def _keep(self, position: BatchPosition, slot: str, value: torch.Tensor | float) -> None:
        plain = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        self._kept.setdefault(position.step, {})[f"{position.micro}|{slot}"] = plain.to("cpu").contiguous().clone()

    def _keep_all(self, position: BatchPosition, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        for name, leaf in given.items():
            if type(leaf) in (int, float, torch.Tensor) and not getattr(leaf, "requires_grad", False):
                self._keep(position, f"{kind}/{name}", leaf)
        return given

    def called(self, position: BatchPosition, call: str, given: dict[str, Any]) -> dict[str, Any]:
        return self._keep_all(position, f"{CALL}/{call}", given)

    def begins(self, position: BatchPosition, call: str, model: torch.nn.Module) -> None:
        if (position.step, position.micro, call) == (0, 0, "0") and os.environ.get("WORLD_SIZE") == "1":
            self._call = self.following.enter_context(ModelCall(self.recorder, model))

    def returned(self, given: dict[str, Any], output: Any, again: Callable[[], Any]) -> None:
        if (call := self._call) is not None:
            self._call = None
            call.following.close()
            call.note_rounding(given.get(samples_name(given)), output, again)
            call.write(Path(self._folder, REFERENCE))
            named = {name.rpartition(".")[2]: leaf for name, leaf in given.items() if type(leaf) is torch.Tensor}
            samples = {f"argument{name}" if name.isdigit() else name: leaf for name, leaf in named.items()}
            save_file({name: leaf.detach().clone().contiguous() for name, leaf in samples.items()},
                      Path(self._folder, SAMPLES))  # fmt: skip

    def batch(self, position: BatchPosition, given: dict[str, Any]) -> dict[str, Any]:
        return self._keep_all(position, BATCH, given)

    def loss_input(self, position: BatchPosition, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._beside and tensor.nbytes <= LARGEST:
            self._beside[id(tensor)] = tensor
            self._keep(position, f"{LOSS}/{slot}", tensor)
        return tensor

    def number(self, position: BatchPosition, slot: str, value: float) -> None:
        self._keep(position, f"{NUMBER}/{slot}", value)

    def drawn(
        self, position: BatchPosition, slot: str, result: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if compat.graph_task() != -1:  # for the backward pass the same is computed again
            return result
        self._keep(position, f"{DRAW}/{slot}", result)
        if weights is not None and weights.dim() == 2:
            self._keep(position, f"{DRAW}/{slot}{SCORES}", project_rows(weights))
        return result

    def routed(self, position: BatchPosition, slot: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        if compat.graph_task() != -1:
            return chosen
        self._keep(position, f"{ROUTE}/{slot}", chosen)
        self._keep(position, f"{ROUTE}/{slot}{SCORES}", project_rows(scores))
        return chosen

    def _end_micro_batch(self) -> None:
        super()._end_micro_batch()
        self._beside.clear()

    def _write(self) -> None:
        step = len(self.recorder.steps)
        save_file(self._kept.pop(step, {}), Path(self._folder, step_file(step, self.recorder.rank)))


def step_file(step: int, rank: int) -> str:
    """Returns the name of the file of a rank and a step, from 0."""
    return f"step{step + 1}.rank{rank}.safetensors"


@dataclass(frozen=True)
class RecordedInputs:
    """The index of a folder of recorded inputs: their layout and their number of steps.

    ``replicas``: the data-parallel size; ranks that share a model have the same samples.
    """

    folder: str
    layout: dict[str, int | str]
    ranks: int
    replicas: int
    steps: int
    double: bool

    @property
    def name(self) -> str:
        """The layout as on the command line, ``ranks=1 batch=8``."""
        return " ".join(f"{key}={value}" for key, value in self.layout.items())

    def as_json(self) -> dict[str, Any]:
        """Returns the index without checksums, as ``pardemo prove --record --json`` prints it."""
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        return {"format": FORMAT, "version": VERSION} | values

    def write(self) -> None:
        """Writes the index; it has to be the last file, as a folder without it has no recorded inputs."""
        text = json.dumps(self.as_json() | {"files": checksums(Path(self.folder))}, indent=1)
        Path(self.folder, INDEX).write_text(text, encoding="utf-8")

    def step(self, number: int) -> "RecordedStep":
        """Reads all tensors of a step, from 0."""
        ranks = range(0, self.ranks, self.ranks // self.replicas)
        return RecordedStep([load_file(Path(self.folder, step_file(number, rank))) for rank in ranks])


def read_recorded_inputs(folder: str) -> RecordedInputs:
    """Reads the index of a folder of recorded inputs, and checks that its files are those that were written.

    Raises:
        ValueError: the folder has no recorded inputs, or of another version, or lacks files; one line.
    """
    index = Path(folder, INDEX)
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise KeyError("format")
        if values["version"] != VERSION:
            raise ValueError(f"{folder} was recorded in version {values['version']}, and this one reads {VERSION}")
        ranks, replicas, steps = sizes = [values[name] for name in ("ranks", "replicas", "steps")]
        files, layout = dict(values["files"]), dict(values["layout"])
        right = all(type(size) is int and size > 0 for size in sizes) and ranks % replicas == 0
        if not right or not files.keys() >= {step_file(step, 0) for step in range(min(steps, 2**16))}:
            raise KeyError("files")
        result = RecordedInputs(folder, layout, ranks, replicas, steps, bool(values["double"]))
    except FileNotFoundError:
        raise ValueError(f"{folder} has no recorded inputs: record some by pardemo prove --record {folder}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{index} cannot be read as pardemo prove --record writes it") from None
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    now = checksums(Path(folder))
    for name, sum_ in files.items():
        if now.get(name) != sum_:
            raise ValueError(f"{folder}: {name} is {'not what was written' if name in now else 'missing'}")
    for name in (step_file(step, rank) for step in range(steps) for rank in range(ranks)):
        try:
            with safe_open(Path(folder, name), framework="pt") as stored:
                names = list(stored.keys())
        except (SafetensorError, OSError):
            names = [""]
        if not all(re.match(r"\d+\|", key) for key in names):
            raise ValueError(f"{folder}: {name} has no recorded inputs of a step")
    return result


class RecordedStep:
    """The tensors of a recorded step, by their slots.

    A slot's tensors are in the order of the global batch: that of the data-parallel ranks, and of their micro-batches.
    """

    def __init__(self, by_replica: list[dict[str, torch.Tensor]]):
        self._parts: dict[str, list[torch.Tensor]] = {}
        for tensors in by_replica:
            for key in sorted(tensors, key=lambda name: int(name.partition("|")[0])):
                self._parts.setdefault(key.partition("|")[2], []).append(tensors[key])

    def parts(self, slot: str) -> list[torch.Tensor]:
        """Returns a slot's tensors, one for each micro-batch of each data-parallel rank; [] for an unknown slot."""
        return self._parts.get(slot, [])

    @cached_property
    def slots(self) -> list[str]:
        """The names of all slots, also those of scores."""
        return list(self._parts)
