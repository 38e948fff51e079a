"""One table of letters for the whole book: each means one thing, in every chapter.

A chapter's metadata names the letters that it uses (``"pardemo": {"letters": {"N": "", "S": "here 8 MiB"}}``), with
what it adds to one, or nothing; ``python .ci/letters.py`` writes its small table into its first cell.
"""

import json
import re
from pathlib import Path
from typing import Any

from pardemo import project

#: What each letter means, in the order in which tables show them.
LETTERS = {
    "N": "ranks (processes, one for each GPU)",
    "t": "ranks that share each layer (tensor parallel)",
    "p": "stages of a pipeline, one rank or one group of ranks each",
    "d": "replicas of the model (data parallel)",
    "c": "ranks that share each sample's sequence (context parallel)",
    "H": "nodes (节点; machines with their own memory, also called hosts)",
    "G": "ranks of a node: N = H·G",
    "Ψ": "parameters of the model",
    "Θ": "parameters that are trained, where most are frozen",
    "K": "bytes that the optimizer keeps for each parameter: 12 for Adam in mixed precision",
    "S": "bytes of a whole tensor, such as all gradients",
    "b": "samples in a micro-batch",
    "m": "micro-batches (微批) of a step, on each replica",
    "s": "tokens in a sample",
    "h": "features of a token: the model's width (hidden size, 隐藏层大小)",
    "l": "layers of the model",
    "a": "attention heads (注意力头)",
    "kv": "heads of keys and values, where they are fewer than a",
    "V": "entries of the vocabulary (词表)",
    "v": "chunks (stages) on each rank, where a rank has several",
    "T": "tokens of a micro-batch on one GPU",
    "E": "experts of a layer",
    "k": "experts that each token goes to",
    "e": "ranks that share a layer's experts (expert parallel)",
    "F": "operations a second that a GPU reaches",
    "B": "bandwidth (带宽) of a link, bytes a second, each way",
    "α": "latency (延迟): seconds that a message takes however short it is",
    "A": "bytes of one activation [b·s, h], as it travels between two stages or is all-reduced",
    "U": "bytes of one activation of a rank's own tokens, where N ranks share a sequence: A/N",
    "φ": "(t−1)/t · A: what a rank sends in half a ring all-reduce of an activation",
    "τ": "seconds of a stage for one micro-batch: τF forward, τI for its input's gradient, τW for its weights'",
    "X": "a layer's input [b·s, h]",
    "Z": "a layer's output [b·s, h]",
    "W": "a weight matrix; a layer's several ones have an index: W₁, W₂",
    "r": "the inner width of a LoRA adapter",
    "κ": "F/(B·T): how many times as long as a forward pass one gather of all parameters takes",
    "w": "seconds of training between two saves",
    "δ": "seconds that a save holds the training up",
    "μ": "mean time between two failures of a job, in seconds",
    "ρ": "seconds from a failure until the job trains again",
}
HEAD = "| letter | what it is |\n|---|---|\n"
_TABLE = re.compile(r"\| letter \| what it is \|\n\|---\|---\|(?:\n\|.*)*")


def table(used: dict[str, str]) -> str:
    """A chapter's small table, in Markdown.

    Args:
        used: the chapter's letters, each with what the chapter adds to its meaning, or an empty text.

    Raises:
        ValueError: a letter is not one of the book's.
    """
    unknown = sorted(set(used) - set(LETTERS))
    if unknown:
        raise ValueError(f"no letter {unknown[0]!r} in the book's table; it has: {' '.join(LETTERS)}")
    rows = (
        f"| {letter} | {LETTERS[letter]}{'; ' if used[letter] else ''}{used[letter]} |"
        for letter in LETTERS
        if letter in used
    )
    return HEAD + "\n".join(rows)


def used_by(notebook: dict[str, Any]) -> dict[str, str]:
    """The letters that a notebook's metadata names."""
    return dict(notebook["metadata"].get("pardemo", {}).get("letters", {}))


def with_table(text: str, used: dict[str, str]) -> str:
    """A first cell with its table as it is now; a text without a table stays as it is."""

    return _TABLE.sub(lambda _: table(used), text, count=1)


def write(path: Path) -> bool:
    """Writes a notebook's table anew; whether anything changed."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    used, changed = used_by(notebook), False
    for cell in notebook["cells"] if used else []:
        before = "".join(cell["source"])
        after = with_table(before, used) if cell["cell_type"] == "markdown" else before
        if after != before:
            cell["source"], changed = after.splitlines(keepends=True), True
    if changed:
        text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
        project.write_text(path, text)
    return changed


if __name__ == "__main__":
    for notebook_path in project.notebooks().values():
        write(notebook_path)
