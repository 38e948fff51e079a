"""Writes torchtitan's job config for a layout: ``torchtitan.toml``, and the same in Python, ``torchtitan_config.py``.

Names are those of ``torchtitan/config/job_config.py`` in pytorch/torchtitan at commit 6404b932421f5ce382e7dac5ad381b2c1
7b1373c, and of ``models/deepseek_v3/train_configs/deepseek_v3_671b.toml`` at 0a8d2b0a6b4ebadee4f99e7cbc924714adf4a0d1
(``hf_assets_path``, ``[compile]``, ``expert_tensor_parallel_degree``). Its releases until 0.2.2 read such a file; its
main branch since February 2026 (pull request 2386) is configured in Python.
"""

import json
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import settings
from pardemo.planner.layouts.launch.facts import ModelFacts
from pardemo.planner.layouts.layout import Layout

FILE = "torchtitan.toml"
ENVIRONMENT = {"TORCHTITAN": "torchtitan"}

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


def why_not(job: Job, layout: Layout, model: ModelFacts) -> str | None:
    """Returns why torchtitan cannot run the layout; None where it can.

    Its rules: ``_validate`` of ``torchtitan/distributed/parallel_dims.py`` at 0119de156de558030726b8539ef0078d8aaaec99,
    ``parallelize.py`` of its models ("DDP has not supported > 1D parallelism"), torch's schedules.
    """
    alone, shards = layout.tp * layout.cp * layout.pp == 1, layout.shards
    return settings.refusal(
        (name_of(model) is None, "torchtitan has no model like {model.name} ({model.kind})"),
        (layout.sharding in ("zero1", "zero2"), "torchtitan has no {layout.sharding}"),
        (layout.offloaded_layers, "torchtitan.toml has no offload of activations, layer by layer"),
        (layout.context != "ring", "torchtitan has no {layout.context} among context-parallel ranks"),
        (layout.sharding == "none" and layout.replicas > 1 and not alone,
         "torchtitan's replicas without FSDP go with no other parallelism"),
        (layout.tp > 1 and not layout.sequence_parallel,
         "torchtitan's tensor parallelism is sequence parallel as well"),
        (not model.latent and job.shape.kv_heads % layout.tp,
         "{job.shape.kv_heads} key-value heads do not divide by TP {layout.tp}"),
        (layout.schedule != "1f1b", "torchtitan has no {layout.schedule} schedule"),
        (layout.pp > 1 and layout.accumulation < layout.pp,
         "torch's pipelines take at least as many micro-batches as stages, {layout.pp}"),
        (layout.chunks > 1 and per_piece(job, layout) is None,
         "torchtitan cannot cut {job.shape.layers} layers into {layout.pp} × {layout.chunks} pieces"),
        (shards % layout.cp, "groups of {layout.shards} that share states are not whole groups of CP {layout.cp}"),
        (layout.ep > 1 and (layout.ep % layout.cp or shards % layout.ep),
         "torchtitan's EP {layout.ep} must be a multiple of CP {layout.cp} and divide {layout.shards} shards"),
        (layout.etp not in (1, layout.tp),
         "torchtitan cuts experts by TP {layout.tp} or not at all, not by ETP {layout.etp}"),
        (job.matmul_speedup > 1 and job.shape.experts, "torchtitan's fp8 of experts is set elsewhere"),
        (job.precision not in ("bf16", "fp8"),
         "torchtitan.toml has no {job.precision}, which torchtitan sets elsewhere"),
        job=job, layout=layout, model=model,
    )  # fmt: skip


def name_of(model: ModelFacts) -> str | None:
    """torchtitan's name of the model's kind."""
    return "llama3" if model.like_llama and not model.shape.tied else _NAMES.get(model.kind)


def flavor(model: ModelFacts) -> str | None:
    """torchtitan's name of the model's sizes."""
    shape, kind = model.shape, name_of(model) or ""
    ffn_hidden = shape.experts.ffn_hidden if shape.experts else shape.ffn_hidden
    flavors = FLAVORS[kind] if shape.vocabulary == _WORDS.get(kind) else {}
    return next((name for name, sizes in flavors.items() if sizes == (shape.layers, shape.hidden, ffn_hidden)), None)


def per_piece(job: Job, layout: Layout) -> int | None:
    """Layers of a piece of the model that make torchtitan cut as many as there are; it rounds their number up."""
    pieces = layout.pp * layout.chunks
    layers = -(-job.shape.layers // pieces)
    return layers if -(-job.shape.layers // layers) == pieces else None


def config(job: Job, layout: Layout, model: ModelFacts) -> dict[str, Any]:
    """Returns the file by its sections."""
    stages, experts = layout.pp > 1, job.shape.experts is not None
    return settings.fill(settings.table("torchtitan.yaml"), {
        "job": job, "layout": layout, "description": f"{model.name}: {layout}", "name": name_of(model),
        "flavor": flavor(model) or model.name, "converters": ["float8"] if job.matmul_speedup > 1 else [],
        "local_batch": layout.micro_batch * (layout.accumulation if stages else 1),
        "replicas": layout.replicas // layout.shards,
        "shards": layout.shards // layout.cp if layout.sharding == "zero3" else 1,
        "schedule": ("Interleaved1F1B" if layout.chunks > 1 else "1F1B") if stages else None,
        "micro_batch": layout.micro_batch if stages else None, "fewer": 0 if stages else None,
        "piece": per_piece(job, layout) if layout.chunks > 1 else None,
        "ep": layout.ep if experts else None, "etp": layout.etp if experts else None,
        "option": "op" if layout.recompute == "selective" else None,
        "compiled": job.program.name.endswith("-compiled"),
    })  # fmt: skip


def texts(job: Job, layout: Layout, model: ModelFacts) -> dict[str, str]:
    """Returns both files, of which a job takes the one that the torchtitan it finds can read.

    ``hf_assets_path`` and dataset are those of torchtitan's tests.
    """
    about = settings.about(job, layout, model)
    more = "# lr, steps, dataset and the tokenizer in hf_assets_path are not the plan's: put in your own\n"
    if flavor(model) is None:
        shape = model.shape
        more += (
            f"# torchtitan has no flavor of these sizes: add {model.name!r} to models/{name_of(model)}/__init__.py "
            f"({shape.layers} layers, {shape.hidden} wide, {shape.heads} heads, {shape.kv_heads} key-value heads, "
            f"MLP {shape.ffn_hidden}, {shape.vocabulary} words)\n"
        )
    why = python_why_not(job, layout)
    after = f"{PYTHON_FILE} is for its main branch" if why is None else f"{PYTHON_FILE} is not there: {why}"
    toml = f"{about}# for torchtitan 0.2, up to 0.2.2; {after}\n{more}"
    for section, values in config(job, layout, model).items():
        lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
        toml += f"\n[{section}]\n{''.join(lines)}"
    files = {FILE: toml}
    if why is None:
        version = f"# for torchtitan's main branch at {COMMIT} ({DATE}); its releases up to 0.2.2 read {FILE}\n"
        files[PYTHON_FILE] = _python(job, layout, model, f"{about}{version}{more}".rstrip("\n"))
    return files


def command(job: Job, torchrun: str) -> str:
    """Started in torchtitan's folder, where the tokenizer and the samples of its tests are.

    Which of the two configurations is read is said by a file that this folder has since February 2026.
    """
    host_gpus = min(job.machine.host_gpus, job.machine.gpus)
    start = f"torchrun --nproc_per_node {host_gpus} {torchrun} -m torchtitan.train"
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
    """Returns why the main branch cannot run a layout that 0.2.2 runs; None where it can.

    Expert-parallel ranks have whole experts there, and without expert parallelism tensor parallelism cuts them.
    """
    experts = job.shape.experts is not None
    if experts and layout.tp > 1 and layout.etp != (1 if layout.ep > 1 else layout.tp):
        return f"torchtitan's main branch cuts no experts by ETP {layout.etp} beside EP {layout.ep} and TP {layout.tp}"
    if layout.micro_batch * job.sequence % (layout.tp * (2 * layout.cp if layout.cp > 1 else 1)):
        return f"{layout.micro_batch} × {job.sequence} tokens do not divide by TP {layout.tp} and CP {layout.cp}"
    return None


def _python(job: Job, layout: Layout, model: ModelFacts, comments: str) -> str:
    """Returns the file, which begins with ``comments``."""
    sections = config(job, layout, model)
    # a pipeline's micro-batches have a number now; experts' tensor parallelism follows from the rest
    degrees = {key: value for key, value in sections["parallelism"].items()
               if key not in ("pipeline_parallel_microbatch_size", "expert_tensor_parallel_degree")}  # fmt: skip
    degrees |= {"num_pp_microbatches": layout.accumulation} if layout.pp > 1 else {}
    degrees |= {"context_parallel_load_balancer": "ptrr"} if layout.cp > 1 else {}  # flex attention's
    compiled, recomputes, imported, converted = sections["compile"]["enable"], _RECOMPUTES[layout.recompute], "", ""
    if job.matmul_speedup > 1:
        imported = "from torchtitan.components.quantization import Float8LinearConverter\n"
        filtered = f'filter_fqns=["lm_head"], model_compile_enabled={compiled}'
        converted = f", converters=[Float8LinearConverter.Config({filtered})]"
    if layout.recompute != "none":
        imported += f"from torchtitan.distributed.activation_checkpoint import {recomputes.partition('.')[0]}\n"
    return settings.script(
        "torchtitan_config.py.txt", comments=comments, imported=imported, converted=converted, function=FUNCTION,
        name=sections["model"]["name"], flavor=sections["model"]["flavor"], micro_batch=layout.micro_batch,
        batch=layout.batch, sequence=job.sequence, recomputes=recomputes, compiled=compiled,
        parallelism="".join(f"            {key}={json.dumps(value)},\n" for key, value in degrees.items()),
    )  # fmt: skip
