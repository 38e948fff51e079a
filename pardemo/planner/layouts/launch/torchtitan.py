"""torchtitan's job config for a layout: ``torchtitan.toml``, and the same in Python, ``torchtitan_config.py``.

Names are those of ``torchtitan/config/job_config.py`` in pytorch/torchtitan at commit 6404b932421f5ce382e7dac5ad381b2c1
7b1373c, and of ``models/deepseek_v3/train_configs/deepseek_v3_671b.toml`` at 0a8d2b0a6b4ebadee4f99e7cbc924714adf4a0d1
(``hf_assets_path``, ``[compile]``, ``expert_tensor_parallel_degree``). Its releases until 0.2.2 read such a file; its
main branch since February 2026 (pull request 2386) is configured in Python.
"""

import json

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch.facts import Model
from pardemo.planner.layouts.layout import Layout

FILE = "torchtitan.toml"
ENVIRONMENT = {"TORCHTITAN": "torchtitan"}
Section = dict[str, int | float | bool | str | list[str]]

#: By flavor: layers, hidden width, the MLP's. ``torchtitan/models/llama3/__init__.py`` at
#: 00f555e1114a8286eb1d4e379cae67d56156b61d, ``qwen3/__init__.py`` at 0310b491596bfe537aa9981d61b638e858ebf0c5.
FLAVORS = {
    "llama3": {"8B": (32, 4096, 14336), "70B": (80, 8192, 28672), "405B": (126, 16384, 53248)},
    "qwen3": {
        "4B": (36, 2560, 9728), "8B": (36, 4096, 12288), "14B": (40, 5120, 17408), "32B": (64, 5120, 25600),
        "30B-A3B": (48, 2048, 768),
    },
}  # fmt: skip
_WORDS = {"llama3": 128256, "qwen3": 151936}
_NAMES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "deepseek_v3": "deepseek_v3"}
_SCHEDULES = {False: "1F1B", True: "Interleaved1F1B"}


def why_not(job: Job, layout: Layout, model: Model) -> str | None:
    """Why torchtitan cannot run the layout; None where it can.

    Its rules: ``_validate`` of ``torchtitan/distributed/parallel_dims.py`` at 0119de156de558030726b8539ef0078d8aaaec99,
    ``parallelize.py`` of its models ("DDP has not supported > 1D parallelism"), torch's schedules.
    """
    if name_of(model) is None:
        return f"torchtitan has no model like {model.name} ({model.kind})"
    if layout.sharding in ("zero1", "zero2"):
        return f"torchtitan has no {layout.sharding}"
    if layout.offload:
        return "torchtitan.toml has no offload of activations, layer by layer"
    if layout.context != "ring":
        return f"torchtitan has no {layout.context} among context-parallel ranks"
    if layout.sharding == "none" and layout.replicas > 1 and layout.tp * layout.cp * layout.pp > 1:
        return "torchtitan's replicas without FSDP go with no other parallelism"
    if layout.tp > 1 and not layout.sequence_parallel:
        return "torchtitan's tensor parallelism is sequence parallel as well"
    if not model.latent and job.shape.groups % layout.tp:
        return f"{job.shape.groups} key-value heads do not divide by TP {layout.tp}"
    if layout.schedule != "1f1b":
        return f"torchtitan has no {layout.schedule} schedule"
    if layout.pp > 1 and layout.accumulation < layout.pp:
        return f"torch's pipelines take at least as many micro-batches as stages, {layout.pp}"
    if layout.chunks > 1 and per_piece(job, layout) is None:
        return f"torchtitan cannot cut {job.shape.layers} layers into {layout.pp} × {layout.chunks} pieces"
    if layout.shards % layout.cp:
        return f"groups of {layout.shards} that share states are not whole groups of CP {layout.cp}"
    if layout.ep > 1 and (layout.ep % layout.cp or layout.shards % layout.ep):
        return f"torchtitan's EP {layout.ep} must be a multiple of CP {layout.cp} and divide {layout.shards} shards"
    if layout.etp not in (1, layout.tp):
        return f"torchtitan cuts experts by TP {layout.tp} or not at all, not by ETP {layout.etp}"
    if job.rate > 1 and job.shape.experts:
        return "torchtitan's fp8 of experts is set elsewhere"
    if job.precision not in ("bf16", "fp8"):
        return f"torchtitan.toml has no {job.precision}, which torchtitan sets elsewhere"
    return None


def name_of(model: Model) -> str | None:
    """torchtitan's name of the model's kind."""
    return "llama3" if model.like_llama and not model.shape.tied else _NAMES.get(model.kind)


def flavor(model: Model) -> str | None:
    """torchtitan's name of the model's sizes."""
    shape = model.shape
    middle = shape.experts.middle if shape.experts else shape.middle
    if shape.vocabulary != _WORDS.get(name_of(model)):
        return None
    flavors = FLAVORS[name_of(model)]
    return next((name for name, sizes in flavors.items() if sizes == (shape.layers, shape.hidden, middle)), None)


def per_piece(job: Job, layout: Layout) -> int | None:
    """Layers of a piece of the model that make torchtitan cut as many as there are; it rounds their number up."""
    pieces = layout.pp * layout.chunks
    layers = -(-job.shape.layers // pieces)
    return layers if -(-job.shape.layers // layers) == pieces else None


def config(job: Job, layout: Layout, model: Model) -> dict[str, Section]:
    """The file by its sections."""
    stages = layout.pp > 1
    return {
        "job": {"dump_folder": "./outputs", "description": f"{model.name}: {layout}"},
        "metrics": {"log_freq": 1},
        "model": {
            "name": name_of(model), "flavor": flavor(model) or model.name, "hf_assets_path": "./tests/assets/tokenizer",
            "converters": ["float8"] if job.rate > 1 else [],
        },
        "optimizer": {"name": "AdamW", "lr": 1.5e-4},
        "lr_scheduler": {"warmup_steps": 10},
        "training": {
            # a pipeline takes its micro-batches out of one local batch
            "local_batch_size": layout.micro_batch * (layout.accumulation if stages else 1),
            "global_batch_size": layout.batch, "seq_len": job.sequence, "steps": 100, "dataset": "c4_test",
        },
        "parallelism": _parallelism(job, layout),
        "activation_checkpoint": {"mode": layout.recompute}
        | ({"selective_ac_option": "op"} if layout.recompute == "selective" else {}),
        "compile": {"enable": job.stack.name.endswith("-compiled")},
    }  # fmt: skip


def _parallelism(job: Job, layout: Layout) -> Section:
    settings: Section = {
        "data_parallel_replicate_degree": layout.replicas // layout.shards,
        "data_parallel_shard_degree": layout.shards // layout.cp if layout.sharding == "zero3" else 1,
        "tensor_parallel_degree": layout.tp, "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }  # fmt: skip
    if layout.pp > 1:
        settings |= {
            "pipeline_parallel_schedule": _SCHEDULES[layout.chunks > 1],
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            # by default the first and the last stage have a layer less; the plan has none
            "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0,
        }  # fmt: skip
    if layout.chunks > 1:
        settings["pipeline_parallel_layers_per_stage"] = per_piece(job, layout)
    if job.shape.experts:
        settings |= {"expert_parallel_degree": layout.ep, "expert_tensor_parallel_degree": layout.etp}
    return settings


def texts(job: Job, layout: Layout, model: Model) -> dict[str, str]:
    """Both files, of which a job takes the one that the torchtitan it finds can read.

    ``hf_assets_path`` and dataset are those of torchtitan's tests.
    """
    lines = [
        f"# {model.name}: {layout}, {layout.gpus} GPUs, {layout.batch} samples of {job.sequence} tokens a step",
        "# lr, steps, dataset and the tokenizer in hf_assets_path are not the plan's: put in your own",
    ]
    if flavor(model) is None:
        shape = model.shape
        lines.append(
            f"# torchtitan has no flavor of these sizes: add {model.name!r} to models/{name_of(model)}/__init__.py "
            f"({shape.layers} layers, {shape.hidden} wide, {shape.heads} heads, {shape.groups} key-value heads, "
            f"MLP {shape.middle}, {shape.vocabulary} words)"
        )
    sections = config(job, layout, model)
    why = python_why_not(job, layout)
    after = f"{PYTHON_FILE} is for its main branch" if why is None else f"{PYTHON_FILE} is not there: {why}"
    toml = [lines[0], f"# for torchtitan 0.2, up to 0.2.2; {after}", *lines[1:]]
    for section, values in sections.items():
        toml += [
            "",
            f"[{section}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()),
        ]
    files = {FILE: "\n".join(toml) + "\n"}
    if why is None:
        version = f"# for torchtitan's main branch at {COMMIT} ({DATE}); its releases up to 0.2.2 read {FILE}"
        named = flavor(model) or model.name
        files[PYTHON_FILE] = python_text(
            job, layout, name_of(model), named, sections["parallelism"], [lines[0], version, *lines[1:]]
        )
    return files


def command(job: Job, torchrun: str) -> str:
    """Started in torchtitan's folder, where the tokenizer and the samples of its tests are.

    Which of the two configurations is read is said by a file that this folder has since February 2026.
    """
    each = min(job.machine.host_gpus, job.machine.gpus)
    start = f"torchrun --nproc_per_node {each} {torchrun} -m torchtitan.train"
    module = PYTHON_FILE.removesuffix(".py")
    toml = f'set -- --job.config_file "$here/{FILE}"'
    python = f"set -- --module {module} --config {FUNCTION}; " \
             'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'  # fmt: skip
    choice = f"if [ -e torchtitan/config/configs.py ]; then {python}; else {toml}; fi"
    return f'here="$PWD"; cd "${{TORCHTITAN:-.}}" && {choice} && {start} "$@"'


PYTHON_FILE, FUNCTION = "torchtitan_config.py", "planned"
COMMIT, DATE = "b5bcd76c6", "2026-08-21"
_RECOMPUTES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def python_why_not(job: Job, layout: Layout) -> str | None:
    """Why the main branch cannot run a layout that 0.2.2 runs; None where it can.

    Expert-parallel ranks have whole experts there, and without expert parallelism tensor parallelism cuts them.
    """
    experts = job.shape.experts is not None
    if experts and layout.tp > 1 and layout.etp != (1 if layout.ep > 1 else layout.tp):
        return f"torchtitan's main branch cuts no experts by ETP {layout.etp} beside EP {layout.ep} and TP {layout.tp}"
    if layout.micro_batch * job.sequence % (layout.tp * (2 * layout.cp if layout.cp > 1 else 1)):
        return f"{layout.micro_batch} × {job.sequence} tokens do not divide by TP {layout.tp} and CP {layout.cp}"
    return None


def python_text(
    job: Job, layout: Layout, name: str, flavor: str, degrees: dict[str, int | str], comments: list[str]
) -> str:
    """The file.

    Args:
        name, flavor: torchtitan's, of the model. degrees: the toml's section of parallelism. comments: its first lines.
    """
    stages = layout.pp > 1
    # a pipeline's micro-batches have a number now; experts' tensor parallelism follows from the rest
    kept = {key: value for key, value in degrees.items()
            if key not in ("pipeline_parallel_microbatch_size", "expert_tensor_parallel_degree")}  # fmt: skip
    kept |= {"num_pp_microbatches": layout.accumulation} if stages else {}
    kept |= {"context_parallel_load_balancer": "ptrr"} if layout.cp > 1 else {}  # flex attention's
    parallelism = "".join(f"            {key}={_quoted(value)},\n" for key, value in kept.items())
    compiled = job.stack.name.endswith("-compiled")
    converted, imported = "", ""
    if job.rate > 1:
        imported = "from torchtitan.components.quantization import Float8LinearConverter\n"
        converted = f', converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"], ' \
                    f"model_compile_enabled={compiled})]"  # fmt: skip
    chosen = _RECOMPUTES[layout.recompute]
    if chosen != "None":
        chosen_class = chosen.partition(".")[0]
        imported += f"from torchtitan.distributed.activation_checkpoint import {chosen_class}\n"
    head = "\n".join(comments)
    return f'''{head}
from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{imported}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{name} import model_registry
from torchtitan.trainer import Trainer


def {FUNCTION}() -> Trainer.Config:
    model_spec = model_registry("{flavor}"{converted})
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./tests/assets/tokenizer",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=default_adamw(lr=1.5e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank={layout.micro_batch} * {job.sequence},
            num_tokens_per_train_step={layout.batch} * {job.sequence},
            max_context_length={job.sequence},
            steps=100,
            disable_cuda_graphs=True,  # as it is planned
        ),
        dataloader=GrainDataLoader.Config(
            dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4_test"]), shuffle=False
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
{parallelism}        ),
        activation_checkpoint={chosen},
        compile=CompileConfig(enable={compiled}),
    )
'''


def _quoted(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
