"""Makes a fine-tune's plan from the options of ``pardemo plan``, and writes it as text and JSON."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pardemo.finetune import recipe
from pardemo.planner import profile
from pardemo.planner.estimate import BUILT_SHARDED
from pardemo.planner.fine_tune import plan_table
from pardemo.planner.fine_tune.plan_table import PLANNED_ENGINES, Plan, PlanRow, Request, engine_title
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations, layout_command
from pardemo.planner.layouts.configurations import usual_target
from pardemo.planner.layouts.intervals import of_fine_tune
from pardemo.planner.layouts.job import check_not_hybrid
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.published.finetune_runs import TIGHT
from pardemo.planner.layouts.tuning import Tuning
from pardemo.planner.progress import progress
from pardemo.tables import text_table

HEAD = (
    "", "engine", "offload", "checkpointing", "batch × acc.", "peak GB", "fits", "step s", "tokens/s/GPU", "hours",
    "money", "GB sent/step",
)  # fmt: skip
#: Where the recipes that come with pardemo expect the built-in models that ``pardemo finetune`` trains.
FOLDERS = {"baichuan2-7b": "models/Baichuan2-7B-Chat", "baichuan2-13b": "models/Baichuan2-13B-Chat"}
#: Of ``zero_optimization``, what each row says for itself.
_OF_A_ROW = ("stage", "offload_optimizer", "offload_param", "stage3_gather_16bit_weights_on_model_save")


def answer_plan(arguments: argparse.Namespace, shown: int | None) -> int:
    """Makes the plan, writes what is asked for, and prints ``shown`` rows of the table."""
    request, base = request_of(arguments)
    if arguments.write:
        from pardemo.planner.fine_tune import files

        files.refuse_unwritable(request, base)
    snapshot_file = layout_command.snapshot_file(arguments)
    plan = plan_table.plan(request)
    best = plan.best
    if best is None:
        least = min(plan.rows, key=lambda row: row.peak_bytes)
        raise ValueError(
            f"{request.machine.gpus} × {request.machine.gpu.name} hold it under no choice; the least is "
            f"{least.peak_bytes / 1e9:.1f} GB of {request.machine.most_bytes / 1e9:.1f}; "
            f"{plan_table.smallest_cluster(request)}"
        )
    answers: dict[str, int | None] = {}
    if arguments.backwards:
        answers = {
            "longest_sequence": plan_table.longest_sequence(request, best),
            "largest_micro_batch": plan_table.largest_batch(request, best),
            "fewest_gpus": plan_table.fewest_gpus(request),
        }
    written = files.write_plan(arguments.write, request, best, base) if arguments.write else []
    dry = None
    if arguments.dry_run or snapshot_file:  # a snapshot has the tensors that an engine really makes
        from pardemo.planner.fine_tune import dry_run_comparison

        progress(f"the dry run of {best.engine}, which takes seconds to a minute")
        dry = dry_run_comparison.compare_with_dry_run(request, best)
        if snapshot_file:
            from pardemo.meters import snapshot

            snapshot.write_snapshot(snapshot_file, dry_run_comparison.blocks_of_row(request, best, dry.run))
    not_planned = _not_planned(arguments)
    if arguments.json:
        more = {"written": written, "snapshot": arguments.snapshot, "not_planned": not_planned}
        print(json.dumps(as_json(plan) | answers | ({"dry_run": dry.as_json()} if dry else {}) | more, indent=1))
        return 0
    print(as_text(plan, shown))
    for left_out in not_planned:
        print(f"not planned: {left_out}")
    for name, value in answers.items():
        print(f"{name.replace('_', ' ')}: {'none' if value is None else f'{value:,}'}")
    if dry is not None:
        print(dry.as_text())
    if written:
        print(f"written to {arguments.write}: {', '.join(written)}")
    layout_command.print_snapshot(arguments)
    return 0


def _not_planned(arguments: argparse.Namespace) -> list[str]:
    """Returns what the model's configuration says and the plan leaves out; ``--base`` plans weights in few bits."""
    left_out = configurations.not_planned(arguments.model) if arguments.model else []
    if arguments.base:
        return [text for text in left_out if "quantization_config" not in text]
    return [f"{text}; --base nf4 plans them so" if "quantization_config" in text else text for text in left_out]


def request_of(arguments: argparse.Namespace) -> tuple[Request, recipe.Recipe]:
    """Returns the request that the options describe, and its recipe; loads Transformers only where that is needed."""
    base = recipe.load(arguments.recipe)
    train = base.train
    gpus = base.world.ranks if arguments.gpus is None else arguments.gpus
    machine = profile.find_profile(arguments.gpu, gpus).machine(gpus, arguments.hosts, arguments.link)
    base = _on_model(base, arguments.model)
    name = arguments.model or _model_of(base.model.path)
    if arguments.write or arguments.snapshot or arguments.dry_run:
        from pardemo.planner import models

        config: Any = models.find(name)
    else:
        config = configurations.find_configuration(name)
    check_not_hybrid(configurations.shape_of_config(config))
    if config.model_type == "baichuan":
        config.loss_head = base.model.loss_head
    zero = (base.deepspeed or {}).get("zero_optimization", {})
    job = RankJob(
        config, batch=train.per_device_train_batch_size, sequence=arguments.sequence or base.data.cutoff_len,
        tuning=_tuning(arguments, base, config),
        checkpointing=train.activation_checkpointing, labels=arguments.labels, clipping=train.max_grad_norm,
        zero={key: value for key, value in zero.items() if key not in _OF_A_ROW},
        precision="fp16" if train.fp16 or not machine.gpu.bf16 else "bf16",
    )  # fmt: skip
    per_step = arguments.per_step or base.step_samples
    # rounded up over ranks, micro-batches and accumulation in turn, which is the same as at once
    at_once = [
        f"train.per_device_train_batch_size={per_step}", "train.gradient_accumulation_steps=1", "world.ranks=1",
        "deepspeed=null",
    ]  # fmt: skip
    if arguments.epochs is not None:
        at_once += [f"train.num_train_epochs={arguments.epochs:g}", "train.max_steps=null"]
    steps = recipe.steps(recipe.override(base, at_once), arguments.samples).total
    epochs = arguments.epochs or (0.0 if train.max_steps else float(train.num_train_epochs or 0))
    return Request(
        job, machine, per_step, steps, arguments.tp, arguments.pp,
        engines=tuple(name if name == "fsdp2" else f"zero-{name}" for name in arguments.zero or ()) or PLANNED_ENGINES,
        checkpointing=(True, False) if arguments.checkpointing is None else (arguments.checkpointing == "on",),
        batches=() if arguments.batch is None else (arguments.batch,), samples=arguments.samples, epochs=epochs,
        price=arguments.price,
    ), base  # fmt: skip


def _tuning(arguments: argparse.Namespace, base: recipe.Recipe, config: Any) -> Tuning:
    """Returns what is trained: all with ``--full``, else the recipe's LoRA on the modules that are named, or usual."""
    weights = {"base": arguments.base or "bf16", "optimizer": arguments.optimizer or "adamw",
               "fused_loss": arguments.fused_loss}  # fmt: skip
    if arguments.full:
        return Tuning(**weights)
    if arguments.target:
        target = tuple(arguments.target.split(","))
    elif config.model_type == "baichuan":  # the recipes' own model
        target = tuple(base.lora.target_modules)
    elif (usual := usual_target(config.model_type)) is not None:
        target = usual
    elif isinstance(config, SimpleNamespace):  # sizes alone, which Transformers makes no model of
        raise ValueError(f"{config.model_type}: name LoRA's modules, as --target q_proj,v_proj, or q_b_proj,kv_b_proj")
    else:
        from pardemo.planner import models

        target = models.lora_target(config)
    return Tuning(
        arguments.rank or base.lora.r, target, base.lora.lora_dropout, alpha=base.lora.lora_alpha,
        embeddings=arguments.embeddings, **weights,
    )  # fmt: skip


def _on_model(base: recipe.Recipe, model: str | None) -> recipe.Recipe:
    """Returns the recipe with the model that is asked for; a built-in one is where the recipes expect it."""
    if model is None or model.lower() == _model_of(base.model.path):
        return base
    path = FOLDERS.get(model.lower(), model)
    if path == model and Path(model).expanduser().exists():
        path = str(Path(model).expanduser().resolve())
    return recipe.override(base, [f"model.path={path}"])


def _model_of(path: str) -> str:
    """Returns the recipe's folder, or the built-in model of its name if there is no such folder yet."""
    folder = recipe.locate(path)
    built_in = next((name for name in configurations.MODELS if folder.name.lower().startswith(name)), None)
    return str(folder) if built_in is None or folder.is_dir() else built_in


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns all rows, the recommended one and the reasons for it, for JSON."""
    request, machine = plan.request, plan.request.machine
    return {
        "gpu": machine.gpu.name, "gpus": machine.gpus, "hosts": machine.hosts, "host_gpus": machine.host_gpus,
        "link_bytes_per_s": machine.link_bytes_per_s, "steps": request.steps,
        "epochs": request.epochs or None, "samples": request.samples or None,
        "rows": [row_json(row) for row in plan.rows],
        "recommended": plan.rows.index(plan.best) if plan.best else None, "why": plan_table.explain_best(plan),
    }  # fmt: skip


def row_json(row: PlanRow) -> dict[str, Any]:
    """Returns a row for JSON, with the intervals that hold its time and memory in four of five cases."""
    seconds, held, layout = row.interval, of_fine_tune("bytes", row.peak_bytes), row.layout
    return {
        "seconds": row.seconds, "seconds_low": seconds.low, "seconds_high": seconds.high,
        "peak_bytes_low": held.low, "peak_bytes_high": held.high, "interval": seconds.why,
        "engine": row.engine, "zero": row.stage, "offload": layout.host_states,
        "checkpointing": layout.recompute == "full", "micro_batch": layout.micro_batch,
        "accumulation": layout.accumulation, "peak_bytes": round(row.peak_bytes), "fits": row.fits,
        "step_s": row.seconds, "tokens_per_s_per_gpu": row.step.tokens_per_s, "hours": row.hours, "money": row.money,
        "sent_bytes_per_step": round(row.sent_bytes), "limit": row.step.limit,
        "lines": {name: round(value) for name, value in row.memory.lines.items()},
        "building_bytes": None if row.memory.building_bytes is None else round(row.memory.building_bytes),
    }  # fmt: skip


def as_text(plan: Plan, most: int | None = None) -> str:
    """Returns the table for the terminal: ``most`` rows, the recommended one marked, and its memory line by line."""
    best, request = plan.best, plan.request
    if best is None:
        raise ValueError("a plan in which nothing fits has no table")
    machine, shown = request.machine, plan.rows[:most]
    output = [text_table([HEAD, *(_cells(row, row is best) for row in shown)])]
    if len(shown) < len(plan.rows):
        output.append(f"… {len(plan.rows) - len(shown)} rows more, slower or too large: --all")
    steps = f"{request.steps:,} steps of {request.samples_per_step} samples{plan_table.describe_epochs(request)}"
    seconds = best.interval
    output += [
        "",
        f"{_describe(machine)}, {steps}, {request.job.precision}{plan_table.describe_weights(plan)}",
        f"→ {engine_title(best.engine)}, offload {best.layout.host_states}, micro-batch {best.layout.micro_batch}: "
        f"{plan_table.explain_best(plan)}",
        f"  {best.seconds:.2f} s a step, in 4 of 5 cases {seconds.low:.2f} to {seconds.high:.2f} ({seconds.why})",
    ]
    if best.peak_bytes > TIGHT * machine.most_bytes:
        output.append(
            f"  tight: {best.peak_bytes / 1e9:.1f} of {machine.most_bytes / 1e9:.1f} GB; of reported runs as full as "
            "that, more ended out of memory than ran"
        )
    lines = {name: value for name, value in best.memory.lines.items() if value >= 5e6}
    output.append("  GB at its peak: " + ", ".join(f"{name} {value / 1e9:.2f}" for name, value in lines.items()))
    for engine, how in BUILT_SHARDED.items():  # which has the model whole before it cuts it
        built = next((row.memory.building_bytes for row in plan.rows if row.engine == engine), None)
        if built is not None:
            fits = "fits" if built <= machine.most_bytes else f"does not fit: {how}"
            output.append(
                f"  {engine_title(engine)}: built whole on the GPU before it is cut {built / 1e9:.1f} GB, {fits}"
            )
    if not request.job.tuning.lora and machine.gpus > 1:
        output.append("  as Transformers' Trainer runs it; --search plans the job as Megatron-core does (TP, PP, CP)")
    return "\n".join(output)


def _describe(machine: Machine) -> str:
    """Names the GPUs and their source; of several hosts also their size and the rate between them."""
    text = f"{machine.gpus} × {machine.gpu.name} ({machine.gpu.source})"
    if machine.hosts == 1:
        return text
    gigabits = 8 * machine.link_bytes_per_s / 1e9
    return f"{text} on {machine.hosts} hosts of {machine.host_gpus}, {gigabits:.4g} Gbit/s between hosts"


def _cells(row: PlanRow, recommended: bool) -> tuple[str, ...]:
    layout = row.layout
    return (
        "→" if recommended else "", engine_title(row.engine), layout.host_states,
        "on" if layout.recompute == "full" else "off", f"{layout.micro_batch} × {layout.accumulation}",
        f"{row.peak_bytes / 1e9:.1f}", "yes" if row.fits else "no", f"{row.seconds:.2f}",
        f"{row.step.tokens_per_s:,.0f}", f"{row.hours:.1f}", "" if row.money is None else f"{row.money:,.2f}",
        f"{row.sent_bytes / 1e9:.3f}",
    )  # fmt: skip
