"""Replays recorded inputs: replaces what a rank's script would train on by the rank's share of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from pardemo import compat
from pardemo.script.record.input_follower import BatchPosition, InputFollower, leaves_of
from pardemo.script.record.model_outputs import samples_name
from pardemo.script.record.rank_record import ReplayReport, digest, project_rows
from pardemo.script.record.recorded_inputs import (
    BATCH,
    CALL,
    DRAW,
    LOSS,
    NUMBER,
    ROUTE,
    SCORES,
    RecordedInputs,
    RecordedStep,
)
from pardemo.script.record.recorded_rows import (
    SampleRows,
    mean_distance,
    once_for_each_replica,
    part_of_tokens,
    same_rows,
    take_rows,
    token_rows,
)
from pardemo.script.record.recorder import Recorder
from pardemo.script.words import count_text

#: Relative difference up to which scores belong to the same row in another layout, whatever their dtype.
SCORE_TOLERANCE = 0.05
#: Most elements of a comparison of all rows with all recorded rows.
_MOST = 50_000_000


class InputReplayer(InputFollower):
    """Replaces a rank's inputs by recorded ones.

    The global batch is cut into equal parts over the data-parallel ranks, and these into micro-batches, in order. A
    micro-batch whose samples are recorded ones already keeps them, whichever they are, and what is computed from them.

    Args:
        sizes: the layout's sizes by name: ``ranks``, ``dp``, ``tp``, ``cp`` and others.
    """

    def __init__(self, recorder: Recorder, recorded: RecordedInputs, sizes: Mapping[str, int]):
        super().__init__(recorder)
        self._recorded, self._replicas, self._cuts = recorded, sizes["dp"], sizes.get("cp", 1)
        self._replica = recorder.rank // (sizes["ranks"] // self._replicas)
        self._cut = recorder.rank // sizes.get("tp", 1) % self._cuts
        self._sizes = {1, *sizes.values()}
        self._read: tuple[int, RecordedStep | None] = (-1, None)
        self._times: Counter[str] = Counter()  # how often a slot was seen in this step
        self._micro: SampleRows | None = None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what a tensor of the script's is replaced by
        self._contents: dict[str, torch.Tensor] = {}  # by the tensor's hash
        self._drawn: dict[tuple[str, str], torch.Tensor] = {}  # by the line and the hash of the script's own numbers

    # --- samples

    def called(self, position: BatchPosition, call: str, given: dict[str, Any]) -> dict[str, Any]:
        return self._replay(position, f"{CALL}/{call}", given, begins=call.rpartition(".")[2] == "0")

    def batch(self, position: BatchPosition, given: dict[str, Any]) -> dict[str, Any]:
        return self._replay(position, BATCH, given, begins=True)

    def _replay(self, position: BatchPosition, kind: str, given: dict[str, Any], begins: bool) -> dict[str, Any]:
        step, name = self._step(position.step), samples_name(given)
        local = given.get(name)
        if step is None or type(local) is not torch.Tensor or local.requires_grad:  # as activations do
            return given
        if not self._in_loss:
            self._drawn.clear()
        if begins:
            self._micro = self._begin(step, kind, name, given)
        if self._micro is None or not self._micro.replaced:
            return given
        if begins:
            self.recorder.current.step.draws.clear()  # whatever was drawn for samples is not trained on
        caller, changed = "the Trainer's inputs" if kind == BATCH else "the model's call", {}
        for name, leaf in given.items():
            parts = step.parts(f"{kind}/{name}")
            if type(leaf) in (int, float) or (isinstance(leaf, torch.Tensor) and not leaf.dim()):
                self._compare_number(f"{caller}, {name}", float(leaf), parts)
            elif type(leaf) is torch.Tensor and not leaf.requires_grad:
                new = self._share(position, parts, leaf)
                if new is None:
                    self._report.without_counterpart[f"{caller}, {name}"] = f"a tensor {list(leaf.shape)}"
                else:
                    changed[name] = self._replaced(leaf, new)
        return given | changed

    def _begin(self, step: RecordedStep, kind: str, name: str, given: dict[str, Any]) -> SampleRows | None:
        total, count = sum(map(len, step.parts(f"{kind}/{name}"))), len(given[name])
        if not total:
            self._report.without_counterpart["the model's call"] = "other arguments than in the recorded layout"
            return None
        ways = list(self._ways(total, count, self._times[kind]))
        self._times[kind] += 1
        known, guessed = self._positions(given[name], given)
        for positions in [*known, *guessed] if count else []:
            rows = self._own_rows(step, kind, name, total, ways, given, positions)
            if rows is not None:
                self._report.already_recorded += 1
                self._report.other_rows += not ways or not torch.equal(rows, ways[0])
                return SampleRows(rows, total, False, positions)
        if not ways:
            raise ValueError(
                f"{count_text(total, 'recorded sample')} of a step do not divide into {self._replicas} data-parallel "
                f"ranks with {count} in a micro-batch"
            )
        if not known:
            raise ValueError(
                f"nothing says which tokens of a sample each of {self._cuts} context-parallel ranks has: give the "
                "model position_ids"
            )
        self._report.replayed += 1
        return SampleRows(ways[0], total, True, known[0])

    def _positions(
        self, samples: torch.Tensor, given: dict[str, Any]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Returns which positions of each sample a rank's tokens have, by the model's arguments, and guesses of these.

        The former are [None] where ranks have complete samples. The guesses are a block, and two blocks as in a zigzag.
        Positions that differ between samples, or restart within a sample, do not say where the tokens are.
        """
        if self._cuts == 1:
            return [None], []
        known: list[torch.Tensor | None] = []
        for name, leaf in given.items():
            if "position" in name and isinstance(leaf, torch.Tensor) and leaf.dim() and not leaf.is_floating_point():
                rows = leaf.reshape(-1, leaf.shape[-1]).long()
                known += [rows[0]] if bool((rows == rows[0]).all()) and len(rows[0].unique()) == len(rows[0]) else []
        here = samples.shape[1] if samples.dim() > 1 else 0
        blocks = torch.arange(here * self._cuts).chunk(2 * self._cuts)
        zigzag = [torch.cat([blocks[self._cut], blocks[-1 - self._cut]])] if len(blocks) == 2 * self._cuts else []
        return known, [torch.arange(here * self._cut, here * (self._cut + 1)), *zigzag]

    def _own_rows(
        self, step: RecordedStep, kind: str, samples: str, total: int, ways: list[torch.Tensor], given: dict[str, Any],
        positions: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Finds which recorded rows equal the script's arguments, up to padding; None unless all arguments do.

        All tensors of whole numbers are compared: the first may have equal prompts, and the others the answers to them.
        """
        same = torch.ones(len(given[samples]), total, dtype=torch.bool)
        for name, leaf in given.items():
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != len(same) or "position" in name:
                continue
            if name == samples or not leaf.is_floating_point():
                parts = [part_of_tokens(part, leaf, positions) for part in step.parts(f"{kind}/{name}")]
                if total * leaf.numel() > _MOST or sum(map(len, parts)) != total:
                    return None
                same &= torch.cat([same_rows(leaf, part.to(leaf.dtype)) for part in parts], 1)
        for way in ways:
            if bool(same[torch.arange(len(same)), way].all()):
                return way
        rows = []
        for row in same:  # in any order, as where a Trainer shuffles what it has generated
            free = row.nonzero().reshape(-1).tolist()
            if not free:
                return None
            rows.append(free[0])
            if len(free) > 1:
                same[:, free[0]] = False
        return torch.tensor(rows)

    def _ways(self, total: int, count: int, micro: int) -> Iterator[torch.Tensor]:
        """Lists the rows that a micro-batch of ``count`` rows may have: a block, or every n-th row on n ranks."""
        passes, rest = divmod(total, self._replicas * count) if count else (0, 0)
        if passes and not rest:
            begin, rows = micro % passes * count, torch.arange(total)
            yield rows.view(self._replicas, -1)[self._replica][begin : begin + count]
            if self._replicas > 1:
                yield rows.view(-1, self._replicas)[:, self._replica][begin : begin + count]

    @property
    def _report(self) -> ReplayReport:
        reports, step = self.recorder.replays, self._place().step
        reports += [ReplayReport() for _ in range(len(reports), step + 1)]
        return reports[step]

    def _step(self, number: int) -> RecordedStep | None:
        if self._read[0] != number:
            there = number < self._recorded.steps
            self._read = number, self._recorded.step(number) if there else None
            self._times.clear()
        return self._read[1]

    def _replaced(self, local: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        self._known[id(local)], self._known[id(new)] = (local, new), (new, new)
        self._contents[digest(local)] = new
        return new

    def _share(self, position: BatchPosition, parts: list[torch.Tensor], local: torch.Tensor) -> torch.Tensor | None:
        """Returns the part of a recorded tensor that replaces a tensor of the script's; None where no part does."""
        micro = self._micro
        if micro is None or not parts or any(part.dim() != local.dim() for part in parts):
            return None
        if all(part.shape == local.shape and torch.equal(part.to(local.dtype), local) for part in parts):
            return local  # a constant
        count, share = len(micro.rows), micro.total // self._replicas
        if micro.replaced and local.dim() and len(local) * 2 == count and sum(map(len, parts)) * 2 == micro.total:
            self._refuse_pairs(position)
        parts = once_for_each_replica(parts, self._recorded.replicas)
        # of each sample, along the first or the second axis; where both may be, as many there as were recorded
        axes = [axis for axis in range(min(local.dim(), 2)) if local.shape[axis] % count == 0]
        sizes = {axis: divmod(sum(part.shape[axis] for part in parts), micro.total) for axis in axes}
        exact = next((axis for axis in axes if sizes[axis] == (local.shape[axis] // count, 0)), None)
        axis = exact or 0
        for_each, rest = sizes.get(axis, (0, 0))
        if exact is None and for_each == 1 and len(local) == share and not rest:  # of all the rank's micro-batches
            new = take_rows(parts, self._replica * share + torch.arange(share))
        elif for_each and not rest:
            rows = (micro.rows[:, None] * for_each + torch.arange(for_each)).reshape(-1)
            new = take_rows(parts, rows, axis)
        else:
            new = micro.part_of(parts) if parts[0].shape == local.shape else None
        return None if new is None else part_of_tokens(new, local, micro.positions).to(local.dtype).clone()

    # --- the loss

    def before_view(self, tensor: Any) -> Any:
        return self._known[id(tensor)][1] if id(tensor) in self._known else tensor

    def after_view(self, args: Any, result: Any) -> Any:
        if any(id(leaf) in self._known for _, leaf in leaves_of(args)):
            for _, leaf in leaves_of(result):
                if isinstance(leaf, torch.Tensor):
                    self._replaced(leaf, leaf)
        return result

    def loss_input(self, position: BatchPosition, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        step, micro = self._step(position.step), self._micro
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        if step is None or micro is None:
            return tensor
        new = self._share(position, step.parts(f"{LOSS}/{slot}"), tensor)
        if micro.replaced:
            new = self._contents.get(digest(tensor)) if new is None else new  # as where a layout takes another line
            if new is None:
                self._report.without_counterpart[position.text] = f"a tensor {list(tensor.shape)}"
                return tensor
            self._report.loss_inputs.add(position.text)
            return self._replaced(tensor, new)
        if new is not None and new.shape == tensor.shape and tensor.is_floating_point():
            off = float((tensor - new).abs().max()) / (float(new.abs().max()) or 1.0) if new.numel() else 0.0
            if off > 1e-3:
                self._report.differing.setdefault(position.text, f"{off:.2g}")
        return tensor

    def output_split(self, position: BatchPosition, given: dict[str, Any], result: Any) -> None:
        micro = self._micro
        if micro is None or not micro.replaced:
            return
        rows = {len(leaf) for leaf in given.values() if isinstance(leaf, torch.Tensor) and leaf.dim()}
        halves = {len(leaf) * 2 for _, leaf in leaves_of(result) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(micro.rows) in rows & halves:
            self._refuse_pairs(position)

    def _refuse_pairs(self, position: BatchPosition) -> None:
        raise ValueError(
            f"at {position.text} the loss takes half of the model's rows: pairs, one half behind the other, are not "
            "cut into micro-batches; call the model with each half, or use a Trainer"
        )

    def number(self, position: BatchPosition, slot: str, value: float) -> None:
        step, micro = self._step(position.step), self._micro
        if step is not None and micro is not None and micro.replaced:
            self._compare_number(position.text, value, step.parts(f"{NUMBER}/{slot}"))

    def _compare_number(self, text: str, value: float, recorded: list[torch.Tensor]) -> None:
        """Reports a number that is neither a recorded one nor its multiple, or fraction, by sizes of the layout."""
        micro, parts = self._micro, [float(part) for part in recorded if not part.dim()]
        if micro is None or text in self._report.without_counterpart:
            return
        passes = micro.total // (self._replicas * len(micro.rows))
        sizes = self._sizes | {passes, len(parts) or 1}
        factors = {a * b for a, b in product(sizes, sizes)}
        ratios = factors | {1 / factor for factor in factors}
        wanted = parts or [1.0]  # what only this layout has may be one of its sizes
        if not any(abs(value - part * ratio) <= 1e-6 * abs(value) for part in wanted for ratio in ratios):
            there = f", and {parts[0]:.6g} was recorded" if parts else ""
            self._report.without_counterpart[text] = f"the number {value:.6g}{there}"

    def _end_micro_batch(self) -> None:
        super()._end_micro_batch()
        self._known.clear()
        self._contents.clear()

    # --- draws, and routers' choices

    def drawn(
        self, position: BatchPosition, slot: str, result: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        key = position.text, digest(result)
        if compat.graph_task() == -1:  # else the same is computed again, last layers first
            new = self._recorded_draw(position, f"{DRAW}/{slot}", result, weights)
            if new is None:
                self._report.not_replayed[position.text] = "random numbers"
                return result
            self._report.draws.add(position.text)
            self._drawn[key] = new.to(result.dtype)
        if key not in self._drawn:
            return result
        self.recorder.current.step.draws.pop(position.text, None)
        return self._drawn[key].clone()

    def _recorded_draw(
        self, position: BatchPosition, slot: str, result: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the recorded random numbers of a rank's samples; None where it is unknown which these are.

        Behind the model's call they are those of its micro-batch. Before it they are a block of rows, or every n-th row
        where the weights are nearer to that. Numbers that do not belong to samples are replayed where all recorded
        ones are equal.
        """
        step = self._step(position.step)
        parts, scores = (step.parts(slot), step.parts(f"{slot}{SCORES}")) if step is not None else ([], [])
        if not parts or any(part.dim() != result.dim() for part in parts):
            return None
        if self._micro is not None and self._in_loss:
            new = self._share(position, parts, result)
            return new if new is not None and new.shape == result.shape else None
        local = project_rows(weights) if weights is not None and weights.dim() == 2 else None
        best: tuple[float, torch.Tensor] | None = None
        for rows in self._ways(sum(map(len, parts)), len(result), self._times[slot]) if result.dim() else ():
            new = take_rows(parts, rows)
            if new is not None and new.shape == result.shape:
                off = mean_distance(local, take_rows(scores, rows)) if local is not None and scores else 0.0
                best = (off, new) if best is None or off < best[0] else best
        self._times[slot] += 1
        if best is None and all(torch.equal(part, parts[0]) and part.shape == result.shape for part in parts):
            return parts[0]
        return None if best is None or best[0] > SCORE_TOLERANCE else best[1]

    def routed(self, position: BatchPosition, slot: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        step, micro = self._step(position.step), self._micro
        parts = step.parts(f"{ROUTE}/{slot}") if step is not None else []
        recorded = step.parts(f"{ROUTE}/{slot}{SCORES}") if step is not None else []
        if micro is None or not parts:
            return chosen
        local = project_rows(scores)
        best: tuple[float, torch.Tensor] | None = None
        for rows in token_rows(micro, sum(map(len, parts)), len(chosen), len(parts)):
            off = mean_distance(local, take_rows(recorded, rows))
            new = take_rows(parts, rows)
            if new is not None and new.shape == chosen.shape and (best is None or off < best[0]):
                best = off, new
        if best is None or best[0] > SCORE_TOLERANCE:
            self._report.not_replayed[position.text] = "routes"
            return chosen
        others = int((best[1].sort(-1)[0] != chosen.sort(-1)[0]).any(-1).sum())
        before, rows_before = self._report.routes.get(position.text, (0, 0))
        self._report.routes[position.text] = before + others, rows_before + len(chosen)
        return best[1].to(chosen.dtype) if others else chosen
