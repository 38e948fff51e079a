"""The options of ``pardemo plan``, and which of them go with which question: any other one would be ignored."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pardemo import options as numbers
from pardemo.planner import hardware
from pardemo.planner.layouts import command as layout_command
from pardemo.planner.layouts.command import RANK, SEQUENCE
from pardemo.planner.layouts.tuning import BASES, STATES

if TYPE_CHECKING:
    from pardemo.finetune.recipe import Recipe
    from pardemo.planner.table import Plan, PlanRow, Request


#: What is taken where an option is left out. The parser fills none of them in, so that set options can be told from
#: others.
LEFT_OUT = {
    "recipe": "baichuan2-13b-lora-bf16", "gpu": "A800-80GB", "samples": 80_000, "labels": 1.0, "tp": 1, "pp": 1,
}  # fmt: skip
PLAN = "a fine-tune's plan"
_JOB = ("model", "full", "target", "rank", "sequence", "per_step", "gpu", "gpus", "hosts", "link", "write", "snapshot")
#: The options of each question, and of the plan that is made where none of the others is asked.
TAKES = {
    PLAN: (
        *_JOB, "recipe", "batch", "samples", "epochs", "labels", "price", "tp", "pp", "zero",
        "checkpointing",
        "base", "optimizer", "fused_loss", "embeddings", "dry_run", "backwards", "all", "json",
    ),
    "--search": (*_JOB, "program", "precision", "price", "measured", "all", "json"),
    "--explain": (*_JOB, "program", "precision", "price", "measured", "json"),
    "--against": ("gpu", "picture", "json"),
    "--validate": ("json",),
    "--measure": ("gpus", "json"),
}  # fmt: skip
#: Options of a fine-tune's plan that a layout says in words of its own.
_IN_A_LAYOUT = {
    "tp": "tp=8", "pp": "pp=4", "zero": "sharding=zero1", "batch": "micro_batch=2", "checkpointing": "recompute=full",
}  # fmt: skip


def options(plan: argparse.ArgumentParser) -> None:
    """Adds all options but those of layouts and of how the answer is printed."""
    plan.add_argument("--model", metavar="MODEL", help="a folder, a config.json, or a name, as baichuan2-13b")
    plan.add_argument("--recipe", metavar="RECIPE", help=f"a recipe ({LEFT_OUT['recipe']})")
    plan.add_argument(
        "--full",
        action="store_true",
        help="train all parameters instead of the recipe's LoRA (as --search and --explain do unless told --target "
        "or --rank)",
    )
    plan.add_argument(
        "--target", metavar="NAMES", help="LoRA's modules, as q_proj,v_proj; with --search and --explain: train LoRA"
    )
    plan.add_argument(
        "--rank", type=int, metavar="N", help=f"of LoRA's matrices (the recipe's; of --search and --explain {RANK})"
    )
    plan.add_argument(
        "--base", choices=tuple(BASES), metavar="KIND", help="of LoRA's frozen weights: nf4 (QLoRA), int8, … (bf16)"
    )
    plan.add_argument("--optimizer", choices=tuple(STATES), metavar="NAME", help="adamw-8bit, paged-adamw, … (adamw)")
    plan.add_argument("--fused-loss", action="store_true", help="logits made piece by piece in the loss (Liger's)")
    plan.add_argument(
        "--embeddings", action="store_true", help="LoRA, and embedding and head whole (PEFT's modules_to_save)"
    )
    plan.add_argument(
        "--dry-run", action="store_true", help="also run the recommended row's engine on fake tensors, and compare"
    )
    plan.add_argument("--batch", type=int, metavar="N", help="only this micro-batch (default: those that divide)")
    plan.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help=f"tokens of a sample (the recipe's cutoff_len; of --search and --explain {SEQUENCE:,})",
    )
    plan.add_argument("--samples", type=int, metavar="N", help="samples of the data set (80,000)")
    plan.add_argument(
        "--epochs", type=float, metavar="E", help="how often the fine-tune goes through them (the recipe's, 5)"
    )
    plan.add_argument(
        "--per-step",
        type=int,
        metavar="N",
        help="samples of an optimizer step (the recipe's; of --search one a GPU, of --explain what the layout makes)",
    )
    plan.add_argument("--labels", type=float, metavar="SHARE", help="of the tokens, with a label (1)")
    plan.add_argument("--gpu", metavar="GPU", help="A800-80GB, H100, …, or a profile.json (A800-80GB)")
    plan.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="in all (default: the recipe's ranks; --search and --explain want it said)",
    )
    plan.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="that they are on (1; of --search and --explain hosts of 8, or of the profile's size)",
    )
    plan.add_argument(
        "--link", metavar="LINK", help="between hosts: a name, or Gbit/s (the profile's, or ethernet-100g)"
    )
    plan.add_argument("--price", type=float, metavar="X", help="of a GPU and hour, in any currency")
    plan.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks (1)")
    plan.add_argument("--pp", type=int, metavar="N", help="pipeline stages (1)")
    plan.add_argument(
        "--zero", nargs="+", choices=("0", "1", "2", "3", "fsdp2"), metavar="STAGE", help="only these; fsdp2 is FSDP2"
    )
    plan.add_argument("--checkpointing", choices=("on", "off"), help="only so (default: both)")
    plan.add_argument("--backwards", action="store_true", help="also: longest sequence, largest batch, fewest GPUs")
    plan.add_argument(
        "--write",
        metavar="DIR",
        help="write configurations and launch commands there: of the best row or layout, or the explained one",
    )
    plan.add_argument(
        "--snapshot",
        metavar="FILE",
        help="write that row's or layout's planned memory there (x.pickle), for torch's memory viewer",
    )
    plan.add_argument(
        "--validate", action="store_true", help="instead: the planner against runs whose outcome is known"
    )
    plan.add_argument("--measure", metavar="FILE", help="instead: measure this machine's rates, for --gpu FILE")


def asked(arguments: argparse.Namespace) -> str:
    """The question among :data:`TAKES`; then what was left out is filled in.

    Raises:
        ValueError: two were asked, or one with an option that it has no use for; a number that is impossible.
    """
    set_options = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    questions = [question for question in TAKES if question.removeprefix("--") in set_options]
    if len(questions) > 1:
        raise ValueError(f"{' and '.join(questions)} are two questions; ask one of them")
    question = questions[0] if questions else PLAN
    every = [name for takes in TAKES.values() for name in takes]
    if foreign := [name for name in dict.fromkeys(every) if name in set_options and name not in TAKES[question]]:
        raise ValueError(_refusal(question, foreign))
    _check_numbers(arguments)
    for name, value in LEFT_OUT.items():
        if getattr(arguments, name) is None and question != "--against":  # its files name their GPUs themselves
            setattr(arguments, name, value)
    return question


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuses what is impossible before torch is loaded, which takes seconds."""
    numbers.at_least(arguments, 1, "gpus", "hosts", "sequence", "per_step", "batch", "samples", "tp", "pp", "rank")
    if arguments.epochs is not None and not arguments.epochs > 0:
        raise ValueError(f"--epochs must be above 0, not {arguments.epochs:g}")
    numbers.at_least(arguments, 0, "price")
    if arguments.target is not None and not arguments.target.strip():
        raise ValueError("--target is empty; it names LoRA's modules, as q_proj,v_proj or all-linear")
    if arguments.full and arguments.embeddings:
        raise ValueError("--full trains embedding and head with all the rest; leave out --embeddings")
    if arguments.full and (said := [name for name in ("target", "rank") if getattr(arguments, name) is not None]):
        raise ValueError(f"--full trains all parameters, and {option(said[0])} is LoRA's; leave out one of them")
    if arguments.labels is not None and not 0 < arguments.labels <= 1:
        raise ValueError(f"--labels is a share above 0 and up to 1, not {arguments.labels}")
    if arguments.price == float("inf"):
        raise ValueError("--price must be a number, not inf")
    if arguments.link is not None:
        hardware.link(arguments.link)


def _refusal(question: str, foreign: list[str]) -> str:
    """The message for options that a question does not take: where they belong, and how else to say it."""
    name = foreign[0]
    others = [other for other, takes in TAKES.items() if name in takes]
    belongs = f"{option(name)} goes with {' or '.join(others)}"
    if question == PLAN:
        return belongs
    message = f"{question} has no use for {', '.join(map(option, foreign))}: {belongs}"
    if question in ("--search", "--explain") and (
        words := [_IN_A_LAYOUT[word] for word in foreign if word in _IN_A_LAYOUT]
    ):
        message += f"; one layout is asked for as --explain {','.join(words)}"
    return message


def option(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


HEAD = (
    "", "engine", "offload", "checkpointing", "batch × acc.", "peak GB", "fits", "step s", "tokens/s/GPU", "hours",
    "money", "GB sent/step",
)  # fmt: skip
SHOWN = 20  # rows of the table
#: Where the recipes that come with pardemo expect the built-in models that ``pardemo finetune`` trains.
FOLDERS = {"baichuan2-7b": "models/Baichuan2-7B-Chat", "baichuan2-13b": "models/Baichuan2-13B-Chat"}
#: Of ``zero_optimization``, what each row says for itself.
_OF_A_ROW = ("stage", "offload_optimizer", "offload_param", "stage3_gather_16bit_weights_on_model_save")


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    plan = commands.add_parser(
        "plan", help="a full-size job before renting it: memory, time, money, configuration files"
    )
    options(plan)
    layout_command.add(plan)
    plan.add_argument(
        "--all",
        action="store_true",
        help=f"print all rows, not the first {SHOWN}; with --search all of the front of time and memory",
    )
    plan.add_argument("--json", action="store_true", help="print rows as JSON")
    plan.set_defaults(action=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    _quiet()
    question = asked(arguments)
    if layouts := layout_command.action(question):
        return layouts(arguments)
    if arguments.validate:
        return _validate(arguments.json)
    if arguments.measure:
        from pardemo.planner import measured

        return measured.command(arguments.measure, arguments.gpus, arguments.json)

    light = not (arguments.write or arguments.snapshot or arguments.dry_run)
    request, base = _request(arguments, light)
    from pardemo.planner import table

    if arguments.write:
        from pardemo.planner import files

        files.check(request, base)
    snapshot_file = layout_command.snapshot_file(arguments)
    plan = table.plan(request)
    if plan.best is None:
        least = min(plan.rows, key=lambda row: row.peak_bytes)
        raise ValueError(
            f"{request.cluster.gpus} × {request.cluster.gpu.name} hold it under no choice; the least is "
            f"{least.peak_bytes / 1e9:.1f} GB of {request.cluster.room / 1e9:.1f}; " + table.smallest_cluster(request)
        )
    answers = _answers(plan) if arguments.backwards else {}
    written = files.write(arguments.write, request, plan.best, base) if arguments.write else []
    dry = None
    if arguments.dry_run or snapshot_file:  # a snapshot has the tensors that an engine really makes
        from pardemo.planner import checked

        _progress(f"the dry run of {plan.best.engine}, which takes seconds to a minute")
        dry = checked.beside(request, plan.best)
    if snapshot_file and dry is not None:
        from pardemo.meters.snapshot import write
        from pardemo.planner import checked

        write(snapshot_file, checked.of_row(request, replace(plan.best, memory=dry.run)))
    if arguments.json:
        told = {"written": written, "snapshot": arguments.snapshot, "not_planned": _not_planned(arguments)}
        beside = {} if dry is None else {"dry_run": dry.as_json()}
        print(json.dumps(as_json(plan) | answers | beside | told, indent=1))
    else:
        print(as_text(plan, None if arguments.all else SHOWN))
        for left_out in _not_planned(arguments):
            print(f"not planned: {left_out}")
        for name, value in answers.items():
            print(f"{name.replace('_', ' ')}: {value:,}" if value is not None else f"{name.replace('_', ' ')}: none")
        if dry is not None:
            print(dry.as_text())
        if written:
            print(f"written to {arguments.write}: {', '.join(written)}")
        layout_command.print_snapshot(arguments)
    return 0


def _not_planned(arguments: argparse.Namespace) -> list[str]:
    """What the model's configuration says and the plan leaves out; weights in few bits it has by ``--base``."""
    from pardemo.planner.layouts import configurations

    found = configurations.not_planned(arguments.model) if arguments.model else []
    if arguments.base:
        return [told for told in found if "quantization_config" not in told]
    return [f"{told}; --base nf4 plans them so" if "quantization_config" in told else told for told in found]


def _request(arguments: argparse.Namespace, light: bool = False) -> tuple["Request", Any]:
    """The request that the options describe, and its recipe; ``light``: without Transformers where that will do."""
    from pardemo.finetune import recipe
    from pardemo.planner import profile
    from pardemo.planner.job import Adapter, RankJob
    from pardemo.planner.table import ENGINES, Hardware, Request

    base = recipe.load(arguments.recipe)
    train = base.train
    gpus = base.world.ranks if arguments.gpus is None else arguments.gpus
    gpu_profile = profile.find(arguments.gpu, gpus)
    cluster = Hardware(
        gpu_profile.gpu,
        gpus,
        1 if arguments.hosts is None else arguments.hosts,
        gpu_profile.link(arguments.link),
        arguments.price,
    )
    base = _on_model(base, arguments.model)
    config = _config(arguments.model or _model_of(base.model.path), light)
    if config.model_type == "baichuan":
        config.loss_head = base.model.loss_head
    target = tuple(arguments.target.split(",")) if arguments.target else tuple(base.lora.target_modules)
    if not arguments.full and arguments.target is None and config.model_type != "baichuan":  # the recipe's: Baichuan2's
        target = _target(config)
    rank = arguments.rank or base.lora.r
    adapter = None if arguments.full else Adapter(rank, target, base.lora.lora_alpha, base.lora.lora_dropout)
    zero = (base.deepspeed or {}).get("zero_optimization", {})
    job = RankJob(
        config, batch=train.per_device_train_batch_size, sequence=arguments.sequence or base.data.cutoff_len,
        adapter=adapter, checkpointing=train.activation_checkpointing, labels=arguments.labels,
        clipping=train.max_grad_norm,
        zero={key: value for key, value in zero.items() if key not in _OF_A_ROW},
        precision="fp16" if train.fp16 or not cluster.gpu.bf16 else "bf16",
        base=arguments.base or "bf16", optimizer=arguments.optimizer or "adamw", fused_loss=arguments.fused_loss,
        embeddings=arguments.embeddings,
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
    return Request(
        job, cluster, per_step, steps, arguments.tp, arguments.pp,
        engines=tuple(name if name == "fsdp2" else f"zero-{name}" for name in arguments.zero or ()) or ENGINES,
        checkpointing=(True, False) if arguments.checkpointing is None else (arguments.checkpointing == "on",),
        batches=() if arguments.batch is None else (arguments.batch,),
        rows=arguments.samples, epochs=arguments.epochs or (0.0 if train.max_steps else float(train.num_train_epochs)),
    ), base  # fmt: skip


def _config(name: str, light: bool) -> Any:
    """The model's configuration: its sizes alone where ``light`` is enough, else Transformers' own."""
    if light:
        from pardemo.planner.layouts import configurations

        return configurations.find(name)
    from pardemo.planner import models

    return models.find(name)


def _target(config: Any) -> tuple[str, ...]:
    """LoRA's modules where none are said."""
    from pardemo.planner.layouts.configurations import usual_target

    if (known := usual_target(config.model_type)) is not None:
        return known
    if isinstance(config, SimpleNamespace):  # sizes alone, which Transformers makes no model of
        raise ValueError(f"{config.model_type}: name LoRA's modules, as --target q_proj,v_proj, or q_b_proj,kv_b_proj")
    from pardemo.planner import models

    return models.lora_target(config)


def _on_model(base: "Recipe", model: str | None) -> "Recipe":
    """The recipe with the model that is asked for; a built-in one is where the recipes expect it."""
    if model is None or model.lower() == _model_of(base.model.path):
        return base
    path = FOLDERS.get(model.lower(), model)
    if path == model and Path(model).expanduser().exists():
        path = str(Path(model).expanduser().resolve())
    return replace(base, model=replace(base.model, path=path))


def _model_of(path: str) -> str:
    """The recipe's folder, or the built-in model of its name where the folder is not there yet."""
    from pardemo.finetune.recipe import locate
    from pardemo.planner.layouts.configurations import MODELS

    folder = locate(path)
    name = folder.name.lower()
    built_in_name = next((built_in for built_in in MODELS if name.startswith(built_in)), None)
    return built_in_name if built_in_name is not None and not folder.is_dir() else str(folder)


def _answers(plan: "Plan") -> dict[str, int | None]:
    from pardemo.planner import table

    return {
        "longest_sequence": table.longest_sequence(plan.request, plan.best),
        "largest_micro_batch": table.largest_batch(plan.request, plan.best),
        "fewest_gpus": table.fewest_gpus(plan.request),
    }


def as_json(plan: "Plan") -> dict[str, Any]:
    """All rows, the recommended one, and why."""
    from pardemo.planner import table

    rows = [row_json(row) for row in plan.rows]
    best = plan.rows.index(plan.best) if plan.best else None
    cluster = plan.request.cluster
    return {
        "gpu": cluster.gpu.name, "gpus": cluster.gpus, "hosts": cluster.hosts, "steps": plan.request.steps,
        "epochs": plan.request.epochs or None, "samples": plan.request.rows or None,
        "rows": rows, "recommended": best, "why": table.why(plan),
    }  # fmt: skip


def row_json(row: "PlanRow") -> dict[str, Any]:
    """A row for JSON, with between what its time and memory lie in four of five cases."""
    from pardemo.planner.layouts.intervals import of_fine_tune

    seconds, held = of_fine_tune("seconds", row.time.seconds), of_fine_tune("bytes", row.peak_bytes)
    return {
        "seconds": row.time.seconds, "seconds_low": seconds.low, "seconds_high": seconds.high,
        "peak_bytes_low": held.low, "peak_bytes_high": held.high, "interval": seconds.why,
        "engine": row.engine, "zero": row.stage, "offload": row.offload, "checkpointing": row.checkpointing,
        "micro_batch": row.batch,
        "accumulation": row.accumulation, "peak_bytes": round(row.peak_bytes), "fits": row.fits,
        "step_s": row.time.seconds, "tokens_per_s_per_gpu": row.tokens_per_s, "hours": row.hours, "money": row.money,
        "sent_bytes_per_step": round(row.sent_bytes), "limit": row.time.limit,
        "lines": {name: round(value) for name, value in row.memory.lines.items()},
        "building_bytes": None if row.memory.building_bytes is None else round(row.memory.building_bytes),
    }  # fmt: skip


def as_text(plan: "Plan", most: int | None = None) -> str:
    """The table for the terminal, ``most`` rows of it, the recommended one marked, and its memory line by line."""
    from pardemo.planner import table
    from pardemo.planner.layouts.intervals import of_fine_tune
    from pardemo.planner.layouts.published.finetune_runs import TIGHT
    from pardemo.planner.table import title
    from pardemo.tables import text_table

    best, request = plan.best, plan.request
    cluster, shown = request.cluster, plan.rows[:most]
    output = [text_table([HEAD, *(_cells(row, row is best) for row in shown)])]
    if len(shown) < len(plan.rows):
        output.append(f"… {len(plan.rows) - len(shown)} rows more, slower or too large: --all")
    output.append("")
    steps = f"{request.steps:,} steps of {request.samples_per_step} samples{table.epochs(request)}"
    on = f"{cluster.gpus} × {cluster.gpu.name} ({cluster.gpu.source})"
    output.append(f"{on}, {steps}, {request.job.precision}{table.beside(plan)}")
    output.append(f"→ {title(best.engine)}, offload {best.offload}, micro-batch {best.batch}: {table.why(plan)}")
    seconds = of_fine_tune("seconds", best.time.seconds)
    output.append(
        f"  {best.time.seconds:.2f} s a step, in 4 of 5 cases {seconds.low:.2f} to {seconds.high:.2f} ({seconds.why})"
    )
    if best.peak_bytes > TIGHT * cluster.room:
        output.append(
            f"  tight: {best.peak_bytes / 1e9:.1f} of {cluster.room / 1e9:.1f} GB; of reported runs as full as that, "
            "more ended out of memory than ran"
        )
    lines = {name: value for name, value in best.memory.lines.items() if value >= 5e6}
    output.append("  GB at its peak: " + ", ".join(f"{name} {value / 1e9:.2f}" for name, value in lines.items()))
    output += [f"  {line}" for line in _building(plan)]
    if request.job.adapter is None and cluster.gpus > 1:
        output.append("  as Transformers' Trainer runs it; --search plans the job as Megatron-core does (TP, PP, CP)")
    return "\n".join(output)


def _building(plan: "Plan") -> list[str]:
    """What each engine that cuts parameters takes while the model is still whole, and how to go without."""
    from pardemo.planner.estimate import BUILT_SHARDED
    from pardemo.planner.table import title

    room, lines = plan.request.cluster.room, []
    for engine, how in BUILT_SHARDED.items():
        if row := next((row for row in plan.rows if row.engine == engine), None):
            needed = row.memory.building_bytes
            fits = "fits" if needed <= room else f"does not fit: {how}"
            lines.append(f"{title(engine)}: built whole on the GPU before it is cut {needed / 1e9:.1f} GB, {fits}")
    return lines


def _cells(row: "PlanRow", recommended: bool) -> tuple[str, ...]:
    from pardemo.planner.table import title

    return (
        "→" if recommended else "", title(row.engine), row.offload, "on" if row.checkpointing else "off",
        f"{row.batch} × {row.accumulation}", f"{row.peak_bytes / 1e9:.1f}", "yes" if row.fits else "no",
        f"{row.time.seconds:.2f}", f"{row.tokens_per_s:,.0f}", f"{row.hours:.1f}",
        "" if row.money is None else f"{row.money:,.2f}", f"{row.sent_bytes / 1e9:.3f}",
    )  # fmt: skip


def _validate(as_json: bool) -> int:
    from pardemo.planner import validate
    from pardemo.tables import text_table

    rows = validate.validate(_progress)
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    shown = [("what", "predicted", "known", "unit", "error", "promised", "", "source")]
    shown += [
        (row["what"], f"{row['predicted']:.4g}", f"{row['known']:.4g}", row["unit"], f"{100 * row['error']:+.1f} %",
         _promise(row), {True: "met", False: "not met", None: ""}[row["met"]], row["source"])
        for row in rows
    ]  # fmt: skip
    print(text_table(shown))
    return 0


def _promise(row: dict[str, Any]) -> str:
    """What the planner promises of a row's error: ± 3 %, at most, nothing."""
    if row["within"] is None:
        return "no promise of ours"
    return row["bound"] or f"± {100 * row['within']:g} %"


def _progress(text: str) -> None:
    print(f"plan: {text} …", file=sys.stderr, flush=True)


def _quiet() -> None:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
