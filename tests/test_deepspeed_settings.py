"""A configuration that DeepSpeed would ignore or refuse is told in one line, before any rank starts."""

import pytest

from pardemo.peers.deepspeed import ALWAYS_SHARDED, zero_settings
from pardemo.peers.deepspeed_settings import check

BASE = {"train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "no key 'zero_optimisation'; did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization has no key 'stge'; did you mean 'stage'?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 0, 1, 2 or 3, not 4"),
        ({"zero_optimization": {"stage": True}}, "not True"),
        ({"zero_optimization": 2}, "must be a section in braces, not 2"),
        ({"fp16": {"enabled": True}}, "fp16.enabled: DeepSpeed refuses fp16 on a CPU"),
        ({"bf16": True}, "bf16 must be a section in braces, not True"),
        ({"optimizer": {"tpye": "AdamW"}}, "optimizer has no key 'tpye'; did you mean 'type'?"),
        ({"train_batch_size": 7}, "train_batch_size 7 is not train_micro_batch_size_per_gpu 2 × gradient_accumulation"),
        ({"train_batch_size": 0}, "train_batch_size must be a whole number of at least 1, not 0"),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 3}, "= 24"),
        ({"xyzzy_qqq": 1}, "has no key 'xyzzy_qqq'"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        check(BASE | settings, world_size=4)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_no_batch_size_at_all():
    with pytest.raises(ValueError, match="has to be given"):
        check({"zero_optimization": {"stage": 1}}, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_right_settings_pass(stage):
    check(zero_settings(stage), 4)
    check(zero_settings(stage, **ALWAYS_SHARDED), 4)
    check(BASE | {"train_batch_size": 24, "gradient_accumulation_steps": 3}, 4)
    check(BASE | {"train_batch_size": 16}, 4)
    check(BASE | {"fp16": {"enabled": True}}, 4, on_cpu=False)
    check(BASE | {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}}, 4)
    check(BASE | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, 4)
    check({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 5}, 4)
