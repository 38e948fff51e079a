"""The plan in a second: held against dry runs of the engines, published fine-tunes, and its own promises."""

import itertools
import json
import subprocess
import sys
from statistics import fmean
from types import SimpleNamespace

import pytest

from pardemo.cli import main
from pardemo.planner import analytic, hardware, models, table
from pardemo.planner.dryrun import dry_run
from pardemo.planner.job import Adapter, RankJob
from pardemo.planner.layouts import configurations, finetune_fit, finetune_runs, sizes
from pardemo.planner.layouts.tuned_memory import OVERHEADS, FineTune, kept_of_a_token, peak
from pardemo.planner.layouts.tuned_step import TRANSFORMERS, sent_bytes
from pardemo.planner.layouts.tuning import Tuning, adapter_params, usual_target, weight_bytes

RUNS = list(finetune_runs.read(finetune_runs.folder() / "finetunes.csv"))
#: Layers are alike, so that a few of them say what many do.
SMALL = {"llama3.1-8b": 3, "qwen3-4b": 4, "mistral-7b": 3, "gpt2": 6}


def both(name, engine, ranks, lora, again, batch=2, sequence=1024, layers=None):
    """Bytes of tensors at the peak, planned and of a dry run; then the bytes that are sent in a step of one."""
    config = models.find(name)
    config.num_hidden_layers = layers or SMALL[name]
    target = usual_target(config.model_type)
    job = RankJob(config, batch, sequence, Adapter(8, target) if lora else None, again, engine, ranks, accumulation=2,
                  clipping=1.0)  # fmt: skip
    run = dry_run(job)
    tuning = Tuning(8, target) if lora else Tuning()
    shape = configurations.of(config)
    planned = FineTune(shape, tuning, engine, ranks, batch, sequence, True, again, 2)
    assert adapter_params(tuning, shape) == (run.trained_params if lora else 0)
    assert shape.params == pytest.approx(run.params - run.trained_params * lora, rel=0.001)
    sent = sum(nbytes for phase, nbytes in run.sent.items() if phase != "step"), run.sent.get("step", 0.0)
    return peak(planned).tensors, run.peak_bytes, sent_bytes(planned), sent


CASES = [
    (name, engine, ranks, lora, again)
    for (name, lora, again), (engine, ranks) in zip(
        itertools.product(SMALL, (True, False), (True, False)),
        itertools.cycle((("zero-2", 4), ("fsdp2", 4), ("zero-1", 8), ("plain", 1), ("zero-0", 2))),
        strict=False,
    )
]  # fmt: skip


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


def test_stage_3_gathers_frozen_layers_that_are_recomputed_once_more():
    _, _, (ours, _), (theirs, _) = both("mistral-7b", "zero-3", 8, True, True, layers=12)
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_frozen_layer_keeps_less():
    shape = configurations.of(models.find("llama3.1-8b"))
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
        errors = [abs(run.error) for run in half]
        assert fmean(errors) < 0.05
        assert max(errors) < 0.15


def test_constants_are_the_fits_to_every_second_run():
    fitted, _ = finetune_runs.halves(RUNS)
    assert finetune_fit.of_memory(fitted) == OVERHEADS
    assert finetune_fit.of_time(fitted) == TRANSFORMERS


def test_reports_of_memory():
    """What is said of runs that ended, and of such that ran out of memory, by people who left much open."""
    reports = [run for run in RUNS if run.source != finetune_runs.QWEN]
    oom, ran = ([run for run in reports if run.outcome == outcome] for outcome in ("oom", "ok"))
    assert len({run.source for run in oom}) >= 40
    assert len(oom) >= 60
    assert sum(run.fits for run in ran) >= 0.95 * len(ran), "a run that ran fits"
    assert sum(not run.fits for run in oom) >= 0.45 * len(oom)
    near = [run for run in reports if analytic.TIGHT * run.room < peak(run.job).peak_bytes <= run.room]
    assert sum(run.outcome == "oom" for run in near) > len(near) / 2, "what fits barely often does not"


def test_weights_in_few_bits():
    shape = configurations.of(models.find("llama3.1-8b"))
    whole, four = (weight_bytes(Tuning(8, ("q_proj",), base=base), shape) for base in ("bf16", "nf4"))
    ends = 2 * shape.ends_params
    assert four - ends == pytest.approx((whole - ends) * (0.5 + 4 / 64) / 2, rel=0.01)
    with pytest.raises(ValueError, match="weights in nf4 cannot be trained themselves; LoRA beside them can"):
        Tuning(base="nf4")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--base", "nf4", "--full"], "weights in nf4 cannot be trained themselves"),
        (["--target", "nowhere"], "LoRA's target 'nowhere' is no module of a layer that is known"),
        (["--base", "nf4", "--dry-run"], "--dry-run runs bf16 alone; there is no dry run of --base nf4"),
        (["--base", "nf4", "--write", "there"], "write it without --base, and start its train.py with --four-bit"),
        (["--optimizer", "sgd", "--write", "there"], "the files are for AdamW and whole logits; leave out --optimizer"),
        (["--search", "--model", "gpt2", "--gpus", "1", "--base", "nf4"], "--search has no use for --base"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, told, capsys):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert told in error


def test_a_plan_loads_no_torch():
    code = (
        "import sys; from pardemo.cli import main; main(['plan', '--json', '--gpus', '8']); "
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
    job = RankJob(config, sequence=2048, adapter=Adapter(8, ("q_proj", "v_proj")))
    cluster = table.Hardware(hardware.gpu(changes.pop("gpu", "A100-80GB")), changes.pop("gpus", 8))
    return table.Request(job.but(**changes.pop("job", {})), cluster, **{"samples_per_step": 64, "steps": 10, **changes})


def test_the_plan_backwards_ends_where_the_room_does():
    request = asked()
    best = analytic.plan(request).best
    shape, room = configurations.of(request.job.config), request.cluster.room
    job = analytic.fine_tune(request, shape, best.engine, best.checkpointing, best.offload, best.batch)
    longest = analytic.longest_sequence(request, best)
    assert peak(job.but(sequence=longest)).peak_bytes <= room < peak(job.but(sequence=longest + 64)).peak_bytes
    most = analytic.largest_batch(request, best)
    assert peak(job.but(batch=most)).peak_bytes <= room < peak(job.but(batch=most + 1)).peak_bytes
    fewest = analytic.fewest_gpus(asked(job={"adapter": None}))
    assert fewest > 1
    assert analytic.least_bytes(asked(job={"adapter": None}), fewest) <= room
    assert analytic.least_bytes(asked(job={"adapter": None}), fewest // 2) > room


def test_more_that_is_kept_takes_more_and_less_takes_less():
    shape = configurations.of(models.find("llama3.1-8b"))
    job = FineTune(shape, Tuning(8, ("q_proj", "v_proj")), "zero-2", 8, 2, 2048)
    held = peak(job).peak_bytes
    assert peak(job.but(checkpointing=False)).peak_bytes > held
    assert peak(job.but(batch=4)).peak_bytes > held
    assert peak(job.but(tuning=Tuning(8, ("q_proj", "v_proj"), fused_loss=True))).peak_bytes < held
    assert peak(job.but(engine="zero-3")).peak_bytes < held
    full = job.but(tuning=Tuning(), engine="zero-1")
    assert peak(full.but(offload="optimizer")).peak_bytes < peak(full).peak_bytes
    assert peak(full.but(tp=2)).peak_bytes < peak(full).peak_bytes
    assert peak(full.but(tuning=Tuning(optimizer="adamw-8bit"))).peak_bytes < peak(full).peak_bytes


PLAIN = ["llama3.1-8b", "llama3.2-1b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "phi-4"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_configuration_on_disk_is_read_without_transformers(name, tmp_path):
    config = models.find(name)
    config.save_pretrained(tmp_path)
    read = sizes.find(str(tmp_path))
    assert isinstance(read, SimpleNamespace)
    assert configurations.of(read) == configurations.of(config)


def test_what_a_configuration_does_not_say_itself_is_transformers_to_read(tmp_path):
    models.find("gemma3-1b").save_pretrained(tmp_path)
    assert not isinstance(sizes.find(str(tmp_path)), SimpleNamespace)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert not isinstance(sizes.find(str(tmp_path)), SimpleNamespace), "Transformers has the rest"


def test_weights_in_few_bits_that_a_configuration_names_are_told(tmp_path, capsys):
    models.find("llama3.2-1b").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"load_in_4bit": True}}))
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1"]) == 0
    told = "not planned: weights in few bits (quantization_config): they are reckoned as bf16; --base nf4 plans them so"
    assert told in capsys.readouterr().out.splitlines()
    assert main(["plan", "--model", str(tmp_path), "--gpus", "1", "--base", "nf4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_planned"] == []
