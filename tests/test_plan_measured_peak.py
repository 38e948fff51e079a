"""A dry run against the frameworks themselves on real ranks, built here and without the planner's engines."""

import contextlib

import pytest
import torch
from conftest import few
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MixtralConfig

from pardemo import World
from pardemo.planner.dry_run import measured_peak
from pardemo.planner.dry_run.runner import dry_run
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.tuning import FULL, Tuning

SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "tied llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=64),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
}
TARGET = ("q_proj", "v_proj")
B, S = 4, 128


@pytest.fixture(scope="module")
def world():
    with World(
        2, preload=["pardemo.peers.deepspeed.engine", "pardemo.planner.dry_run.measured_peak"], timeout_s=240
    ) as ranks:
        yield ranks


#: Name, engine, LoRA, checkpointing, micro-batches of a step.
CASES = [
    ("tied llama", "zero-1", False, False, 2),
    ("tied llama", "zero-3", False, True, 1),
    ("tied llama", "fsdp2", False, True, 2),
    ("llama", "zero-2", True, True, 1),
    ("gemma2", "plain", False, False, 1),
    ("mixtral", "plain", True, False, 2),
]


@pytest.mark.parametrize(("name", "engine", "lora", "checkpointing", "micro_batches"), few(CASES, 0, 3))
def test_a_dry_run_is_what_the_frameworks_take(name, engine, lora, checkpointing, micro_batches, world):
    zero = measured_peak.BUCKETS if engine.startswith("zero") else {}
    if engine == "zero-3":  # what it prefetches comes in the order of a set, which differs between ranks
        zero = zero | {"stage3_prefetch_bucket_size": 0}
    real = max(world.run(_measured, name, engine, lora, checkpointing, micro_batches, zero, timeout_s=240))
    planned = dry_run(
        RankJob(CONFIGS[name](), batch=B, sequence=S, tuning=Tuning(8, TARGET) if lora else FULL, engine=engine,
            checkpointing=checkpointing, ranks=1 if engine == "plain" else 2, accumulation=micro_batches, zero=zero,
            on_gpu=False)
    )  # fmt: skip
    # one rank's allocations are all seen; between ranks gloo keeps small buffers of its own
    assert planned.peak_bytes == pytest.approx(real, rel=0.005 if engine == "plain" else 0.03)


def _measured(name, engine, lora, checkpointing, micro_batches, zero):
    def run(mark):
        model = _model(name, engine, lora, checkpointing)
        forward, backward, step, close = (_zero if engine.startswith("zero") else _torchs)(
            model, engine, micro_batches, zero
        )
        ids = torch.randint(1, SIZES["vocab_size"], (B, S))
        for number in range(2):
            with mark(measured_peak.MARK) if number else contextlib.nullcontext():
                for _ in range(micro_batches):
                    loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
                    backward(loss)
                    del loss
                step()
        close()

    return measured_peak.measure_peak_bytes(run)


def _model(name, engine, lora, checkpointing):
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=list(TARGET), task_type="CAUSAL_LM")
        )
    if engine != "fsdp2":  # which keeps fp32 parameters and computes in bf16
        model = model.to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    return model.train()


def _zero(model, engine, micro_batches, zero):
    import deepspeed

    from pardemo.peers.deepspeed.engine import close, prepare

    prepare()
    running, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": B,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "foreach": False}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": int(engine[-1]), **zero},
        },
    )

    def backward(loss):
        running.backward(loss)
        running.step()

    return running, backward, lambda: None, lambda: close(running)


def _torchs(model, engine, micro_batches, zero):
    if engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=False)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return model, lambda loss: loss.backward(), step, lambda: None
