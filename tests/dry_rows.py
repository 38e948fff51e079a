"""A plan's rows, and small jobs, with the memory that dry runs of their engines take."""

from pardemo.planner import hardware, models
from pardemo.planner.dry_run.footprint import Footprint
from pardemo.planner.dry_run.runner import dry_run
from pardemo.planner.fine_tune import dry_run_comparison, plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.configurations import usual_target
from pardemo.planner.layouts.job import Job, fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuning import Tuning

#: Models of few layers, which say what many do; with their layers.
MODELS = {"llama3.1-8b": 3, "qwen3-4b": 4, "mistral-7b": 3, "gpt2": 6}
ENGINES = (("plain", 1), ("zero-0", 2), ("zero-1", 8), ("zero-2", 4), ("fsdp2", 4))


def dry_rows(request):
    """A row of each engine, way of checkpointing, offload and micro-batch that is asked for."""
    rows = []
    for row in plan_table.plan(request).rows:
        run = dry_run_comparison.compare_with_dry_run(request, row).run
        vars(row)["memory"] = run
        vars(row).pop("peak_bytes", None)  # of the formulas
        rows.append(row)
    return rows


def small_jobs() -> list[tuple[str, str, int, bool, bool]]:
    """Sixty: models × engines × (LoRA recomputed, LoRA, full recomputed): name, engine, ranks, LoRA, recomputed."""
    ways = ((True, True), (True, False), (False, True))
    return [(name, *engine, *way) for way in ways for name in MODELS for engine in ENGINES]


def planned_and_run(
    name: str, engine: str, ranks: int, lora: bool, again: bool, layers: int | None = None
) -> tuple[Job, Layout, Footprint]:
    """A model of ``layers``, two samples of 1,024 tokens, twice a step: the job as it is planned, and its dry run."""
    config = models.find(name)
    config.num_hidden_layers = layers or MODELS[name]
    tuning = Tuning(8, usual_target(config.model_type) or ()) if lora else Tuning()
    job = RankJob(config, 2, 1024, tuning, again, engine, ranks, accumulation=2, clipping=1.0)
    planned, layout = fine_tune(
        configurations.shape_of_config(config), Machine(hardware.gpu("A100-80GB"), ranks), tuning,
        engine, ranks, 2, 1024,
        checkpointing=again, accumulation=2,
    )  # fmt: skip
    return planned, layout, dry_run(job)
