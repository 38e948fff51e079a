"""A configuration that DeepSpeed would ignore or refuse is told in one line, before any rank starts."""

import pytest
from conftest import refused

from pardemo.peers.deepspeed.deepspeed_settings import check_settings
from pardemo.peers.deepspeed.engine import ALWAYS_SHARDED, zero_settings

BASE = {"train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "no key 'zero_optimisation'; did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 0, 1, 2 or 3, not 4"),
        ({"zero_optimization": {"stage": True}}, "not True"),
        ({"zero_optimization": 2}, "must be a section in braces, not 2"),
        ({"fp16": {"enabled": True}}, "fp16.enabled: DeepSpeed refuses fp16 on a CPU"),
        ({"train_batch_size": 7}, "train_batch_size 7 is not train_micro_batch_size_per_gpu 2 × gradient_accumulation"),
        ({"train_batch_size": 0}, "train_batch_size must be a whole number of at least 1, not 0"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 3}, "= 24"),
        ({"xyzzy_qqq": 1}, "has no key 'xyzzy_qqq'"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer has no key 'devise'; did you mean 'device'?",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            "zero_optimization.offload_optimizer.device must be 'none', 'cpu' or 'nvme', not 'gpu'",
        ),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}},
            "zero_optimization.reduce_bucket_size must be a valid integer",
        ),
        # what DeepSpeed itself ignores without a word
        ({"activation_checkpointing": {"partition_activation": True}}, "did you mean 'partition_activations'?"),
        ({"checkpoint": {"load_univresal": True}}, "did you mean 'load_universal'?"),
        ({"scheduler": {"tpye": "WarmupLR"}}, "scheduler has no key 'tpye'; did you mean 'type'?"),
        ({"pipeline": {"partitoin": "best"}}, "did you mean 'partition'?"),
        # what fails at the first step
        ({"gradient_clipping": "big"}, "gradient_clipping must be a number, not 'big'"),
        ({"prescale_gradients": "yes"}, "prescale_gradients must be true or false, not 'yes'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weigth_decay": 0.1}}},
            "optimizer.params has no key 'weigth_decay'; did you mean 'weight_decay'?",
        ),
        ({"elasticity": {"enabled": True}}, "Elastic training has been removed"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with refused(message):
        check_settings(BASE | settings, world_size=4)


def test_no_batch_size_at_all():
    with pytest.raises(ValueError, match="has to be given"):
        check_settings({"zero_optimization": {"stage": 1}}, 2)


OFFLOAD = {"device": "cpu", "pin_memory": "auto"}


@pytest.mark.parametrize(
    "settings",
    [
        *(zero_settings(stage) for stage in range(4)),
        *(zero_settings(stage, **ALWAYS_SHARDED) for stage in range(4)),
        *({"zero_optimization": {"stage": s, "reduce_bucket_size": "auto", "overlap_comm": True}} for s in range(4)),
        {"train_batch_size": 24, "gradient_accumulation_steps": 3},
        {"train_batch_size": 16},
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}},
        {"zero_optimization": {"stage": 3, "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD}},
        {"activation_checkpointing": {"partition_activations": True}, "checkpoint": {"load_universal": True}},
        {"steps_per_print": 5, "wall_clock_breakdown": False, "communication_data_type": "fp32"},
        {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 5},
    ],
)
def test_right_settings_pass(settings):
    check_settings(BASE | settings, 4)


def test_fp16_passes_on_a_gpu():
    check_settings(BASE | {"fp16": {"enabled": True}}, 4, on_cpu=False)
