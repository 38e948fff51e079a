"""Megatron-core's GPTModel with its optimizer and its scheduler, by its own dist_checkpointing; tp and pp may change.

Generators Megatron-core leaves to its user: they are saved and loaded as Megatron-LM does it (get_rng_state and
load_checkpoint in megatron/training/checkpointing.py), seeds depend on the stage as its _set_random_seed has it.
"""

import argparse
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig

LENGTH, GLOBAL, STEPS, EVERY = 6, 8, 9, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--distributed", type=int, default=0, help="Megatron's distributed optimizer")
    given = parser.parse_args()
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(given.tp, given.pp, create_gloo_process_groups=False)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, ffn_hidden_size=32, hidden_dropout=0.1,
        attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=given.tp,
        pipeline_model_parallel_size=given.pp,
        pipeline_dtype=torch.float32, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    torch.manual_seed(3)
    part = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )  # fmt: skip

    @torch.no_grad()
    def fill() -> None:
        """Each parameter's part of values that depend on its name and on its whole shape alone."""
        for name, parameter in part.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, own, rest = name.split(".", 3)
                name = f"decoder.layers.{part.decoder.layers[int(own)].layer_number - 1}.{rest}"
            cut = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
            shape = list(parameter.shape)
            if cut >= 0:
                shape[cut] *= given.tp
            generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(name, 1)))
            whole = torch.randn(shape, generator=generator) * 0.1 + (
                1.0 if "norm" in name and "weight" in name else 0.0
            )
            own_part = (
                whole.chunk(given.tp, cut)[parallel_state.get_tensor_model_parallel_rank()] if cut >= 0 else whole
            )
            parameter.copy_(own_part)

    fill()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=bool(given.distributed))
    model = DistributedDataParallel(config, settings, part)
    config.finalize_model_grads_func = finalize_model_grads
    asked = OptimizerConfig(
        optimizer="adam", lr=0.01, min_lr=0.001, use_distributed_optimizer=bool(given.distributed), clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(asked, [model], use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.01, min_lr=0.001, lr_warmup_steps=0, lr_decay_steps=20 * GLOBAL,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=20 * GLOBAL, wd_incr_style="constant",
    )  # fmt: skip
    tp_rank, pp_rank = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    replicas, of = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    torch.manual_seed(3 + 100 * pp_rank)

    def state(step: int, loading: bool, random: bool) -> dict:
        sharded = part.sharded_state_dict()
        how = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}} if given.distributed else {}
        states = optimizer.sharded_state_dict(sharded, is_loading=loading, **how)
        made = {"model": sharded, "optimizer": states, "scheduler": scheduler.state_dict(), "step": step,
                "layout": [given.tp, given.pp]}  # fmt: skip
        if random:
            cut = (given.pp, given.tp), (pp_rank, tp_rank)
            made["random"] = ShardedObject("rng_state", {"torch": torch.get_rng_state()}, *cut, replica_id=of)
        return made

    saves = [path for path in given.out.glob("step*") if (path / "metadata.json").exists()]
    begun = 0
    if saves:
        newest = max(saves, key=lambda path: int(path.name.removeprefix("step")))
        same = dist_checkpointing.load_common_state_dict(str(newest))["layout"] == [given.tp, given.pp]
        read = dist_checkpointing.load(state(0, True, same), str(newest))
        part.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
        scheduler.load_state_dict(read["scheduler"])
        if same:
            torch.set_rng_state(read["random"]["torch"])
        begun = read["step"]

    def forward(batches, part):
        tokens, labels = next(batches)
        positions, later = (
            torch.arange(LENGTH).expand(len(tokens), LENGTH),
            torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool(),
        )
        out = part(tokens, positions, later, labels=labels)
        return out, lambda losses: (losses.mean(), losses.mean().detach())

    for step in range(begun, STEPS):
        tokens = torch.randint(32, (GLOBAL, LENGTH + 1), generator=torch.Generator().manual_seed(step)).chunk(replicas)[
            of
        ]
        batches = [(some[:, :-1].contiguous(), some[:, 1:].contiguous()) for some in tokens.chunk(2)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(forward), data_iterator=iter(batches), model=model, num_microbatches=2,
            seq_length=LENGTH, micro_batch_size=len(batches[0][0]),
        )  # fmt: skip
        optimizer.step()
        scheduler.step(increment=GLOBAL)
        if (step + 1) % EVERY == 0:
            where = given.out / f"step{step + 1}"
            if dist.get_rank() == 0:
                shutil.rmtree(where, ignore_errors=True)  # left by a save that was never over
                where.mkdir(parents=True)
            dist.barrier()
            dist_checkpointing.save(state(step + 1, False, True), str(where))


if __name__ == "__main__":  # a save starts processes that import this file
    main()
