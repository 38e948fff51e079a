"""Compares CUDA's peak with the dry run's: LoRA of the 13B model, as in the article, on one GPU of 80 GB or more.

``python -m pardemo.book.chapters.baichuan2_plan.cuda_peak [--out FILE]`` writes a row, to
``outputs/reference/plan_cuda.json`` where no file is named. The weights are random: what a step takes does not depend
on them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pardemo import project

if TYPE_CHECKING:  # the command reads its options before it loads torch and Transformers
    from pardemo.planner.job import RankJob

NEEDED_BYTES = 75e9
TOLERANCE = 0.05


def job() -> "RankJob":
    """Returns the article's job: batch 8 × 1024, LoRA r = 8 on W_pack, dropout 0.1, checkpointing, all logits."""
    from pardemo.baichuan2 import Baichuan2Config
    from pardemo.planner.job import RankJob
    from pardemo.planner.layouts.tuning import Tuning

    return RankJob(Baichuan2Config.b13(loss_head="full"), batch=8, sequence=1024, tuning=Tuning(8, ("W_pack",)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=project.root() / "outputs" / "reference" / "plan_cuda.json")
    out = parser.parse_args(arguments).out

    import torch

    if not torch.cuda.is_available():
        print("cuda_peak: no GPU here: not measured", file=sys.stderr)
        return 2
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    if memory < NEEDED_BYTES:
        print(f"cuda_peak: {name} has {memory / 1e9:.0f} GB; 80 GB are needed", file=sys.stderr)
        return 2
    from pardemo.planner.dry_run import measured_peak, runner

    predicted = runner.dry_run(job()).peak_bytes
    measured = measured_peak.measure(job())
    error = predicted / measured - 1
    row = {
        "gpu": name,
        "torch": torch.__version__,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "error": error,
        "tolerance": TOLERANCE,
        "met": abs(error) <= TOLERANCE,
    }
    project.write_json(out, row)
    print(json.dumps(row, indent=1))
    return 0 if row["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
