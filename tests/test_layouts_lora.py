"""LoRA in a layout: what is trained, kept, sent and computed beside frozen weights, and two published runs."""

import json
from dataclasses import replace

import pytest
from conftest import says

from pardemo.cli import main
from pardemo.planner import hardware
from pardemo.planner.layouts import intervals, per_rank
from pardemo.planner.layouts.configurations import find_configuration, shape_of_config
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.per_rank import kept_bytes
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.shape import Mamba
from pardemo.planner.layouts.step import predict_step, stage_layers
from pardemo.planner.layouts.tuning import Tuning, adapter_params

LLAMA = shape_of_config(find_configuration("llama3-70b"))
QKV = Tuning(16, ("qkv_proj",), dropout=0.0)
EVERY = Tuning(16, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), dropout=0.0)


def job(tuning=QKV, gpu="H100", gpus=8, sequence=4096, host=8, **changes):
    machine = Machine(hardware.gpu(gpu), gpus, host)
    return Job(
        LLAMA, machine, find_program(changes.pop("program", "megatron-core")), sequence, tuning=tuning, **changes
    )


#: Example outputs of two versions of NVIDIA/dgxc-benchmarking's ``llama3/finetune/README.md``: Llama 3 70B, bf16, LoRA
#: on ``linear_qkv`` as Megatron-Bridge's recipes for these GPUs have it. No constant has seen a run with LoRA.
PUBLISHED = {
    "GB200": (2048, Layout(pp=4, dp=2, accumulation=32, chunks=20, sharding="zero1"), 4.070),
    "GB300": (4096, Layout(dp=8, accumulation=4, sharding="zero1"), 3.314),
}


@pytest.mark.parametrize("gpu", PUBLISHED)
def test_published_runs(gpu):
    sequence, layout, seconds = PUBLISHED[gpu]
    asked = job(gpu=gpu, sequence=sequence, host=72)
    assert predict_step(asked, layout).seconds == pytest.approx(seconds, rel=0.05)
    assert predict_step(job(Tuning(), gpu, 8, sequence, 72), layout).seconds > 1.4 * seconds, (
        "full training takes half more"
    )
    interval = intervals.of_seconds(asked, layout, predict_step(asked, layout).seconds)
    assert interval.low < seconds < interval.high


def test_what_is_trained_is_the_adapters_of_a_stages_layers():
    layout = Layout(tp=2, pp=4)
    split = stage_layers(job(), layout)
    each = [per_rank.owned_trained_params(job(), layout, split, place) for place in range(4)]
    assert 2 * sum(one.total for one in each) == adapter_params(QKV, LLAMA)
    assert per_rank.trained_layer(job(), layout).total == adapter_params(QKV, LLAMA) / 2 / LLAMA.layers
    states = predict_memory(job(), layout).lines["optimizer states"]
    assert states == find_program("megatron-core").state_bytes * each[0].total
    whole = predict_memory(job(Tuning()), layout).lines
    held = predict_memory(job(), layout).lines["parameters"]
    assert held - min(whole["parameters"], held) == pytest.approx(2 * each[0].total)


def test_a_frozen_weight_has_four_operations_and_attention_all_of_them():
    full, frozen = (LLAMA.flops(4096, frozen=way) for way in (False, True))
    multiplied = LLAMA.params - LLAMA.embedding_params - LLAMA.hidden * (2 * LLAMA.layers + 1)
    assert full - frozen == pytest.approx(2 * multiplied, rel=1e-9)


def test_inputs_are_kept_for_adapters_alone():
    layout = Layout()
    full, some, every = (kept_bytes(job(tuning), layout) for tuning in (Tuning(), QKV, EVERY))
    # of a frozen MLP: its input in 16 bits, and what its second product multiplies
    assert full - some == pytest.approx(2 * LLAMA.hidden + 2 * LLAMA.ffn_hidden - 2 * 16)
    assert every == pytest.approx(full + 4 * 2 * 16), "all inputs, and four low ranks"
    dropped = kept_bytes(job(Tuning(16, ("qkv_proj",), dropout=0.1)), layout)
    assert dropped - some == 3 * LLAMA.hidden


def test_adapters_move_what_tensor_parallelism_leaves_on_a_rank():
    width, queries, middle = LLAMA.hidden, LLAMA.heads * LLAMA.head_dim, LLAMA.ffn_hidden
    whole, cut = (per_rank.adapters_moved_bytes(job(EVERY), Layout(tp=tp)) for tp in (1, 8))
    by_columns = 2 * 2 * width * (1 - 1 / 8)  # the input of qkv, of gate and up: each rank reads it whole
    assert cut - by_columns == pytest.approx(whole / 8)
    alone = per_rank.adapters_moved_bytes(job(Tuning(16, ("o_proj",), dropout=0.0)), Layout())
    assert alone == 2 * queries + 8 * width, "read; written, read, added to what is read, and written"
    down = per_rank.adapters_moved_bytes(job(Tuning(16, ("down_proj",), dropout=0.0)), Layout(tp=8))
    assert down == (2 * middle + 8 * width) / 8


def test_fully_sharded_weights_are_gathered_and_no_gradient_of_theirs_is_sent():
    layout = Layout(dp=64, sharding="zero3")
    asked = [job(tuning, gpus=64) for tuning in (Tuning(), QKV)]
    assert asked[0].program.gradient_bytes == 4, "two gathers of 2 bytes, and gradients of 4"
    full, frozen = (
        predict_step(Job(LLAMA, each.machine, each.program.but(dp_overlap=0.0), 4096, tuning=each.tuning), layout)
        for each in asked
    )  # fmt: skip
    ratio = frozen.parts["data-parallel traffic"] / full.parts["data-parallel traffic"]
    assert ratio == pytest.approx(4 / 8, abs=0.02)


def test_replicas_send_adapters_alone():
    layout = Layout(tp=8, dp=8, sharding="zero1")
    full, frozen = (predict_step(job(tuning, gpus=64), layout) for tuning in (Tuning(), QKV))
    assert frozen.parts.get("optimizer", 0.0) < 1e-3 * full.parts["optimizer"]
    assert frozen.parts.get("data-parallel traffic", 0.0) <= full.parts.get("data-parallel traffic", 0.0)


def test_an_interval_says_that_no_run_with_lora_is_known():
    layout = Layout(tp=8)
    full, frozen = (intervals.of_seconds(job(tuning), layout, 1.0) for tuning in (Tuning(), QKV))
    assert (full.like, frozen.like) == (True, False)
    assert frozen.high > full.high
    assert says(frozen.why, "nothing", "known")


def test_models_with_state_spaces_are_refused():
    hybrid = replace(LLAMA, pattern="M*-" * 26 + "M*", linear_mixer=Mamba(128, 64, 128, 8))
    with pytest.raises(ValueError, match="LoRA"):
        replace(job(), shape=hybrid)


def test_the_command(capsys):
    base = ["plan", "--search", "--model", "llama3-70b", "--gpu", "H100", "--gpus", "8", "--per-step", "8"]
    assert main([*base, "--target", "q_proj,v_proj", "--rank", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["assumed"]
    assert (told["training"], told["lora"]["rank"], told["lora"]["target"]) == ("lora", 16, ["q_proj", "v_proj"])
    assert told["lora"]["parameters"] == 80 * 16 * (2 * 8192 + 8192 + 1024)
    assert main([*base, "--rank", "4"]) == 0
    assert says(capsys.readouterr().out, "LoRA", "4", "q_proj", "v_proj", "8.2M", "llama3-70b")
    for more, message in (
        (["--rank", "4", "--write", "x"], "layouts with LoRA are planned, not written"),
        (["--target", ""], "--target is empty; it names LoRA's modules"),
        (["--target", "nothing"], "no module of a layer that is known"),
        (["--rank", "4", "--program", "nanotron"], "nanotron has no LoRA"),
    ):
        assert main([*base, *more]) != 0
        assert message in capsys.readouterr().err
