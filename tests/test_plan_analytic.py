"""The plan in a second: held against dry runs of the engines, published fine-tunes, and its own promises."""

import json
import subprocess
import sys
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
from calibration import finetune_fit
from conftest import says
from dry_rows import planned_and_run, small_jobs
from transformers import CONFIG_MAPPING

from pardemo.cli import main
from pardemo.finetune import lora
from pardemo.planner import hardware, models
from pardemo.planner.dry_run import engines
from pardemo.planner.estimate import Memory
from pardemo.planner.fine_tune import dry_run_comparison, plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.fine_tune_memory import ALLOCATOR_BYTES, INT4_LOGIT_BYTES, kept_of_a_token
from pardemo.planner.layouts.fine_tune_step import sent_bytes
from pardemo.planner.layouts.job import ENGINES, FUSED_NORMS, TRANSFORMERS, engine_name, fine_tune
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.published import finetune_runs
from pardemo.planner.layouts.shape import Mamba, Shape
from pardemo.planner.layouts.step import predict_step
from pardemo.planner.layouts.tuning import Tuning, adapter_params, weight_bytes

A100S = Machine(hardware.gpu("A100-80GB"), 8)
RUNS = list(finetune_runs.read_fine_tunes(finetune_runs.folder() / "finetunes.csv"))


def both(*case, layers=None):
    """Bytes of tensors at the peak, planned and of a dry run; then the bytes that are sent in a step of one."""
    planned, layout, run = planned_and_run(*case, layers=layers)
    shape, lora = planned.shape, planned.tuning.lora
    assert adapter_params(planned.tuning, shape) == (run.trained_params if lora else 0)
    assert shape.params == pytest.approx(run.params - run.trained_params * lora, rel=0.001)
    sent = sum(nbytes for phase, nbytes in run.sent.items() if phase != "step"), run.sent.get("step", 0.0)
    return predict_memory(planned, layout).tensors, run.peak_bytes, sent_bytes(planned, layout), sent


#: Every second one; ``pardemo bench plan`` has all sixty.
CASES = small_jobs()[::2]


def test_a_dry_run_beside_a_plan_tells_both_and_which_is_which():
    planned, run = ({"parameters": nbytes, "allocator": 1e9} for nbytes in (3e9, 2e9))
    both = dry_run_comparison.DryRunComparison(Memory(planned, "backward"), Memory(run, "step"), (5e9, 4e9))
    assert both.as_json() == {
        "tensors": 2e9, "planned_tensors": 3e9, "difference": 0.5, "peak_bytes": 3e9, "phase": "step", "lines": run,
        "sent_bytes_per_step": 4e9,
    }  # fmt: skip
    assert says(both.as_text(), "2.00", "GB", "tensors", "3.00", "+50.0", "4.000", "GB")


@pytest.mark.nightly
def test_tensors_are_those_of_a_dry_run():
    errors, told = [], []
    for case in CASES:
        planned, run, ours, theirs = both(*case)
        errors.append(planned / run - 1)
        told.append(f"{case}: {100 * errors[-1]:+.1f} %")
        assert ours == pytest.approx(theirs, rel=0.01, abs=1e5), case
    assert fmean(map(abs, errors)) < 0.02, told
    assert max(map(abs, errors)) < 0.1, told


def test_stage_3_keeps_what_it_needs_again():
    """Of 1e9 elements; more of a model than that is gathered twice."""
    planned, run, (ours, _), (theirs, _) = both("llama3.1-8b", "zero-3", 8, False, False)
    assert planned == pytest.approx(run, rel=0.05)
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.nightly
def test_stage_3_gathers_frozen_layers_that_are_recomputed_once_more():
    _, _, (ours, _), (theirs, _) = both("mistral-7b", "zero-3", 8, True, True, layers=12)
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_frozen_layer_keeps_less():
    shape = configurations.shape_of_config(models.find("llama3.1-8b"))
    full, lora = kept_of_a_token(shape, Tuning()), kept_of_a_token(shape, Tuning(8, ("q_proj", "v_proj")))
    assert lora < full
    assert kept_of_a_token(shape, Tuning(8, ("q_proj", "v_proj")), inputs=True) > lora
    everywhere = kept_of_a_token(shape, Tuning(8, ("all-linear",)))
    assert everywhere > lora, "each module of LoRA's keeps a copy of its input"
    assert kept_of_a_token(shape, Tuning(8, ("all-linear",), dropout=0.0)) < everywhere


def test_published_peaks():
    """Qwen's 57 runs on A100s: every second one was fitted to, the others were not."""
    own = [run for run in RUNS if run.source == finetune_runs.QWEN]
    assert len(own) == 57
    for half in finetune_runs.halves(RUNS):
        errors = [abs(finetune_fit.error(run)) for run in half]
        assert fmean(errors) < 0.05
        assert max(errors) < 0.15


def test_constants_are_the_fits_to_every_second_run():
    fitted, _ = finetune_runs.halves(RUNS)
    constants = {"ALLOCATOR_BYTES": ALLOCATOR_BYTES, "INT4_LOGIT_BYTES": INT4_LOGIT_BYTES}
    assert finetune_fit.of_memory(fitted) == constants
    assert finetune_fit.of_time(fitted) == FUSED_NORMS
    assert finetune_fit.of_plain(FUSED_NORMS).but(name=TRANSFORMERS.name) == TRANSFORMERS


def test_times_of_the_other_half():
    _, judged = finetune_runs.halves(RUNS)
    for adapters in (True, False):
        errors = [
            abs(finetune_fit.time_error(run)) for run in judged if run.seconds and run.job.tuning.lora == adapters
        ]
        assert errors
        assert fmean(errors) < 0.09
        assert max(errors) < 0.15


def test_reports_of_memory():
    """What is said of runs that ended, and of such that ran out of memory, by people who left much open."""
    reports = [run for run in RUNS if run.source != finetune_runs.QWEN]
    oom, ran = ([run for run in reports if run.outcome == outcome] for outcome in ("oom", "ok"))
    assert len({run.source for run in oom}) >= 40
    assert len(oom) >= 60
    assert sum(map(finetune_fit.fits, ran)) >= 0.95 * len(ran), "a run that ran fits"
    assert sum(not finetune_fit.fits(run) for run in oom) >= 0.45 * len(oom)
    shares = [(run, predict_memory(run.job, run.layout).peak_bytes / finetune_fit.room(run)) for run in reports]
    near = [run for run, share in shares if finetune_runs.TIGHT < share <= 1]
    assert sum(run.outcome == "oom" for run in near) > len(near) / 2, "what fits barely often does not"


def test_weights_in_few_bits():
    shape = configurations.shape_of_config(models.find("llama3.1-8b"))
    whole, four = (weight_bytes(Tuning(8, ("q_proj",), base=base), shape) for base in ("bf16", "nf4"))
    ends = 2 * shape.embedding_and_head_params
    assert four - ends == pytest.approx((whole - ends) * (0.5 + 4 / 64) / 2, rel=0.01)
    with pytest.raises(ValueError, match=r"nf4.*LoRA"):
        Tuning(base="nf4")


def test_rank_and_embeddings_are_planned(capsys):
    asked = ["plan", "--model", "qwen2.5-7b", "--gpu", "H100", "--gpus", "1", "--per-step", "8", "--zero", "0"]
    rows = {}
    for more in ([], ["--rank", "64"], ["--embeddings"]):
        assert main([*asked, *more, "--json"]) == 0
        rows[" ".join(more)] = json.loads(capsys.readouterr().out)["rows"][0]["lines"]
    ends = 2 * 152_064 * 3_584
    assert rows["--rank 64"]["parameters"] == pytest.approx(8 * rows[""]["parameters"], rel=0.01), (
        "the recipe's are of 8"
    )
    assert rows["--embeddings"]["parameters"] - rows[""]["parameters"] == pytest.approx(2 * ends, rel=0.01)
    assert rows["--embeddings"]["optimizer states"] - rows[""]["optimizer states"] == pytest.approx(12 * ends, rel=0.01)


def test_a_plan_loads_no_torch():
    code = (
        "import sys; from pardemo.cli import main; main(['plan', '--json', '--gpus', '8']); "
        "main(['plan', '--model', 'no-such-model']); "
        "print([name for name in ('torch', 'transformers', 'numpy', 'deepspeed', 'peft') if name in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"
    answer = json.loads(done.stdout)
    row = answer["rows"][answer["recommended"]]
    assert row["seconds_low"] < row["seconds"] < row["seconds_high"]
    assert row["peak_bytes_low"] < row["peak_bytes"] < row["peak_bytes_high"]
    assert row["fits"]


def asked(**changes):
    """A request for LoRA of a model of 8 B parameters."""
    config = models.find("llama3.1-8b")
    job = RankJob(config, sequence=2048, tuning=Tuning(8, ("q_proj", "v_proj")))
    machine = Machine(hardware.gpu(changes.pop("gpu", "A100-80GB")), changes.pop("gpus", 8))
    return plan_table.Request(
        job.but(**changes.pop("job", {})), machine, **{"samples_per_step": 64, "steps": 10, **changes}
    )


def test_the_plan_backwards_ends_where_the_room_does():
    request = asked()
    best = plan_table.plan(request).best
    job, layout, room = best.job, best.layout, request.machine.most_bytes

    def held(tokens=job.sequence, batch=layout.micro_batch):
        return predict_memory(replace(job, sequence=tokens), layout.but(micro_batch=batch)).peak_bytes

    longest = plan_table.longest_sequence(request, best)
    assert held(longest) <= room < held(longest + 64)
    most = plan_table.largest_batch(request, best)
    assert held(batch=most) <= room < held(batch=most + 1)
    fewest = plan_table.fewest_gpus(asked(job={"tuning": Tuning()}))
    assert fewest > 1
    assert plan_table.least_bytes(asked(job={"tuning": Tuning()}), fewest) <= room
    assert plan_table.least_bytes(asked(job={"tuning": Tuning()}), fewest // 2) > room


def test_more_that_is_kept_takes_more_and_less_takes_less():
    shape = configurations.shape_of_config(models.find("llama3.1-8b"))
    lora = Tuning(8, ("q_proj", "v_proj"))

    def held(tuning=lora, engine="zero-2", batch=2, **changes):
        return predict_memory(*fine_tune(shape, A100S, tuning, engine, 8, batch, 2048, **changes)).peak_bytes

    assert held(checkpointing=False) > held()
    assert held(batch=4) > held()
    assert held(replace(lora, fused_loss=True)) < held()
    assert held(engine="zero-3") < held()
    full = held(Tuning(), "zero-1")
    assert held(Tuning(), "zero-1", host_states="optimizer") < full
    assert held(Tuning(), "zero-1", tp=2) < full
    assert held(Tuning(optimizer="adamw-8bit"), "zero-1") < full


def test_an_engines_name_is_a_program_and_what_its_ranks_share():
    shape = configurations.shape_of_config(models.find("llama3.1-8b"))
    for name in ENGINES:
        job, layout = fine_tune(shape, A100S, engine=name, ranks=8)
        assert engine_name(job, layout) == name
        assert predict_step(job, layout).tokens_per_s == 8 * 1024 / predict_step(job, layout).seconds / 8
    with pytest.raises(ValueError, match=r"zero-0.*'zero-4'"):
        fine_tune(shape, A100S, engine="zero-4")
    with pytest.raises(ValueError, match=r"on_host.*optimizer.parameters.*'disk'"):
        fine_tune(shape, A100S, engine="zero-2", host_states="disk")
    job, layout = fine_tune(shape, A100S, engine="zero-2", ranks=8)
    for changes, told in (
        ({"cp": 2}, "fine-tunes by deepspeed are not planned with cp"),
        ({"recompute": "selective"}, "fine-tunes by deepspeed are not planned with selective recomputation"),
        ({"pp": 2, "chunks": 2}, "fine-tunes by deepspeed are not planned with chunks"),
    ):
        for asked_of in (predict_step, predict_memory):
            with pytest.raises(ValueError, match=told):
                asked_of(job, layout.but(**changes))
    with pytest.raises(ValueError, match="zero2"):
        predict_step(*(fine_tune(shape, A100S)[0], layout))
    assert "optimizer on the host" in str(fine_tune(shape, A100S, engine="zero-2", host_states="optimizer")[1])


PLAIN = ["llama3.1-8b", "llama3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "phi-4"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_configuration_on_disk_is_read_without_transformers(name, tmp_path):
    config = models.find(name)
    config.save_pretrained(tmp_path)
    read = configurations.find_configuration(str(tmp_path))
    assert isinstance(read, SimpleNamespace)
    assert configurations.shape_of_config(read) == configurations.shape_of_config(config)


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "intermediate_size": 128, "head_dim": 16,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "num_key_value_heads": 4, "n_shared_experts": 2,
}  # fmt: skip
KINDS = [
    ("llama", {}, ("q_proj", "v_proj")), ("llama", {}, ("all-linear",)), ("phi3", {}, ("qkv_proj", "gate_up_proj")),
    ("mixtral", {"num_local_experts": 4}, ("q_proj", "o_proj")), ("gemma3_text", {}, ("all-linear",)),
    ("mixtral", {"num_local_experts": 4}, ("all-linear",)), ("qwen3_moe", {"num_experts": 4}, ("k_proj", "v_proj")),
    ("deepseek_v3", LATENT, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "target"), KINDS)
def test_lora_has_as_many_parameters_as_pefts(kind, more, target):
    config = CONFIG_MAPPING[kind](**SIZES | {"pad_token_id": 0} | more)
    linear = lora.linear_names(engines.outline(RankJob(config, sequence=64))) - {"lm_head"}
    there = Tuning(4, tuple(sorted(linear)) if target == ("all-linear",) else target)
    module = engines.outline(RankJob(config, sequence=64, tuning=there))
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert adapter_params(Tuning(4, target), configurations.shape_of_config(config)) == trained


@pytest.mark.parametrize(
    ("kind", "more", "target", "told"),
    [
        ("mixtral", {"num_local_experts": 4}, "w1", "no module 'w1' for LoRA; it is a model with experts: LoRA is"),
        ("deepseek_v3", LATENT, "up_proj", "no module 'up_proj' for LoRA; it is a model with experts: LoRA is planned"),
        ("deepseek_v3", LATENT, "all-linear", "LoRA is planned on its attention alone, and all-linear are more"),
        ("deepseek_v3", LATENT, "q_proj", "no module 'q_proj' for LoRA$"),
        ("gpt2", {}, "gate_proj", "no module 'gate_proj' for LoRA$"),
    ],
)  # fmt: skip
def test_what_lora_cannot_go_to_is_one_line(kind, more, target, told):
    shape = configurations.shape_of_config(CONFIG_MAPPING[kind](**SIZES | more))
    with pytest.raises(ValueError, match=told):
        adapter_params(Tuning(4, (target,)), shape)


def test_a_model_with_state_spaces_is_refused():
    hybrid = Shape(4, 64, 4, 2, 128, 512, pattern="M-*-", linear_mixer=Mamba(4, 16, 16, 2), name="nemotron_h")
    with pytest.raises(ValueError, match="nemotron_h"):
        fine_tune(hybrid, A100S)


def test_what_a_configuration_does_not_say_itself_is_transformers_to_read(tmp_path):
    models.find("gemma3-1b").save_pretrained(tmp_path)
    assert not isinstance(configurations.find_configuration(str(tmp_path)), SimpleNamespace)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert not isinstance(configurations.find_configuration(str(tmp_path)), SimpleNamespace), (
        "Transformers has the rest"
    )


def test_weights_in_few_bits_that_a_configuration_names_are_told(tmp_path, capsys):
    models.find("llama3.2-1b").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"load_in_4bit": True}}))
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1"]) == 0
    told = "not planned: weights in few bits (quantization_config): they are reckoned as bf16; --base nf4 plans them so"
    assert told in capsys.readouterr().out.splitlines()
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1", "--base", "nf4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_planned"] == []


def test_experts_that_bitsandbytes_does_not_convert_stay_in_16_bits():
    shape = configurations.shape_of_config(models.find("qwen3-30b-a3b"))
    tuning = Tuning(8, ("q_proj", "v_proj"), base="nf4")
    loaded = weight_bytes(tuning, shape)
    assert loaded == pytest.approx(59.8e9, rel=0.01), "as it was measured in Transformers 5"
    assert weight_bytes(replace(tuning, experts_apart=True), shape) == pytest.approx(18.1e9, rel=0.02)
    assert weight_bytes(replace(tuning, base="int4"), shape) < 20e9, "GPTQ converts them"
    dense = configurations.shape_of_config(models.find("llama3.1-8b"))
    assert weight_bytes(tuning, dense) == weight_bytes(replace(tuning, experts_apart=True), dense)


def test_epochs_are_said_and_can_be_chosen(capsys):
    from pardemo.cli import main

    job = ["plan", "--model", "qwen3-30b-a3b", "--gpu", "A100-80GB", "--base", "nf4", "--sequence", "512"]
    assert main(job) in (0, 1)
    five = capsys.readouterr().out
    assert "5 epochs of 80,000" in five
    assert "nothing like it is known" not in five
    assert "58.0 GB of experts" in five
    assert main([*job, "--epochs", "1"]) in (0, 1)
    assert "1 epoch of 80,000" in capsys.readouterr().out


def test_what_a_configuration_leaves_out_is_said(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}))
    assert main(["plan", "--model", str(tmp_path)]) in (0, 1)
    told = capsys.readouterr()
    assert says((told.out + told.err).splitlines(), "num_hidden_layers", "vocab_size", "defaults", "llama")


def test_what_else_holds_a_job_that_does_not_fit(capsys):
    job = ["plan", "--model", "llama3.1-8b", "--gpu", "H100", "--gpus", "8", "--sequence", "131072"]
    assert main(job) == 2
    told = capsys.readouterr()
    assert says((told.out + told.err).splitlines(), "--fused-loss", "H100")
    assert says((told.out + told.err).splitlines(), "--search")


@pytest.mark.parametrize("issue", ["4559", "5169"])
def test_a_report_of_out_of_memory_is_said_not_to_fit(issue):
    """70B by Q-LoRA on 4 A10G under DDP, and by LoRA on 16 A100 with 32,768 tokens, LLaMA-Factory's issues."""
    (run,) = [run for run in RUNS if run.source.endswith(f"LLaMA-Factory/issues/{issue}")]
    assert run.outcome == "oom"
    assert predict_memory(run.job, run.layout).peak_bytes > finetune_fit.room(run)


def test_what_the_hosts_memory_would_hold_is_named(capsys):
    """On one A10G nothing is sharded; two have what they gather, beside activations, and the host all the rest."""
    assert main(["plan", "--model", "llama3.1-70b", "--gpu", "A10G", "--gpus", "1"]) == 2
    told = capsys.readouterr().err
    assert "in the hosts' memory: then 2 × A10G hold it, ZeRO 3 (offload of both) in " in told
    assert "or FSDP2 (CPUOffloadPolicy; its time is not planned) in " in told
    shape, tuning = configurations.shape_of_config(models.find("llama3.1-70b")), Tuning(8, ("q_proj", "v_proj"))
    for engine in plan_table.ON_THE_HOST:
        held = predict_memory(*fine_tune(shape, A100S, tuning, engine, 2, host_states="optimizer+parameters")).lines
        assert not held.keys() & {"parameters", "frozen parameters", "gradients", "optimizer states"}
        assert held["gathered parameters"]
