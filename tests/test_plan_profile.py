"""``--gpu FILE``: a machine's own rates instead of a datasheet's; what is wrong in such a file; measuring one."""

import csv
import json
import math

import pytest
import torch
from conftest import says
from test_plan_reasons import plan, row

from pardemo import Cluster, cli, project
from pardemo.cluster import tiers
from pardemo.planner import command, hardware, measure_profile, profile
from pardemo.planner.fine_tune import answer, plan_table
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout_command import job_of
from pardemo.planner.layouts.machines import Link, Machine
from pardemo.planner.layouts.micro_batch import matmul_seconds
from pardemo.planner.layouts.programs import MEGATRON
from pardemo.planner.layouts.published import loaders, runs
from pardemo.planner.layouts.shape import COLUMNS, Matmul, Shape

OWN = {
    "name": "our H100", "memory_gib": 79.1, "peak_tflops": 989, "reachable_tflops": 700, "sustained": 0.9,
    "memory_gb_per_s": 2850, "inside": {"gb_per_s": 360, "latency_us": 30},
    "between": {"gb_per_s": 300, "latency_us": 90}, "host_gpus": 8, "source": "ours",
}  # fmt: skip
JOB = ["--model", "llama3-8b", "--gpus", "16", "--hosts", "2", "--sequence", "8192", "--per-step", "64"]


def saved(folder, drop=(), **changes):
    path = folder / "own.json"
    path.write_text(json.dumps({name: value for name, value in (OWN | changes).items() if name not in drop}))
    return path


def test_what_was_measured_is_what_is_planned_with(tmp_path):
    here = profile.find_profile(str(saved(tmp_path)), 16).machine(16, 2)
    assert here.matrix_flops == pytest.approx(700e12 * 0.9)
    assert here.memory_bytes_per_s == pytest.approx(2850e9)
    assert here.gpu.memory_bytes == pytest.approx(79.1 * 2**30)
    assert here.rate(8) == pytest.approx(360e9)
    assert here.rate(16) == pytest.approx(300e9)
    assert (here.latency(2), here.latency(16)) == pytest.approx((30e-6, 4 * 90e-6))


def test_a_link_that_was_not_measured_is_its_datasheets(tmp_path):
    found = profile.load_profile(saved(tmp_path, drop=("between",)))
    assert found.machine(16, 2, "800").rate(16) == pytest.approx(80e9)
    usual = found.machine(16, 2)
    assert usual.link_bytes_per_s == hardware.link("ethernet-100g")
    assert usual.rate(16) == pytest.approx(0.8 * hardware.link("ethernet-100g"))
    own = profile.load_profile(saved(tmp_path))
    assert own.machine(16, 2, "400").link_bytes_per_s == 50e9, "a link that is asked for goes before the measured one"


def test_a_machine_has_bf16_unless_its_file_says_otherwise(tmp_path):
    assert profile.load_profile(saved(tmp_path)).gpu.bf16
    assert not profile.load_profile(saved(tmp_path, bf16=False)).gpu.bf16


@pytest.mark.parametrize("name", hardware.FP8_TFLOPS)
def test_products_in_8_bits_take_half_the_time_of_bf16(name):
    """All makers say so, of all that have them; an L40S's datasheet rounds most."""
    assert hardware.FP8_TFLOPS[name] == pytest.approx(2 * hardware.gpu(name).flops / 1e12, rel=0.015)


def test_a_gpu_of_the_table_is_what_it_was():
    found = profile.find_profile("H100", 16)
    assert found.machine(16, 2, "3200") == Machine(hardware.gpu("H100"), 16, 8, 400e9)
    assert found.on_hosts(16, 8, Link("", 400e9)) == Machine(hardware.gpu("H100"), 16, 8, 400e9)


def test_rates_by_size_say_what_small_products_lose(tmp_path):
    rates = {str(n): 800 / (1 + 300 / n) ** 3 for n in (1024, 2048, 4096, 8192)}
    gpu = profile.load_profile(saved(tmp_path, reachable_tflops=rates)).gpu
    assert (gpu.reachable, gpu.small) == pytest.approx((800e12, 300))
    here = profile.load_profile(saved(tmp_path, reachable_tflops=rates, sustained=1.0)).machine(8)
    job = Job(Shape(4, 2048, 16, 16, 8192, 32000), here, MEGATRON.but(tile_loss=1.0))
    seconds = matmul_seconds(job, Matmul(2048, 2048, COLUMNS), 1, 2048)
    assert 2 * 2048**3 / seconds == pytest.approx(rates["2048"] * 1e12), "and no longer what its program's runs say"


def test_a_fine_tunes_plan_takes_it_too(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(plan_table, "plan", lambda request: asked.append(request.machine) or plan(row()))
    assert [cli.main(["plan", "--json", "--gpu", gpu]) for gpu in (str(saved(tmp_path)), "H100")] == [0, 0]
    own, usual = asked
    assert (own.matrix_flops, own.memory_bytes_per_s) == pytest.approx((700e12 * 0.9, 2850e9))
    assert own.rate(8) == pytest.approx(360e9)
    assert (usual.rate(8), usual.memory_bytes_per_s) == pytest.approx((0.8 * 450e9, 0.85 * 3350e9))


@pytest.mark.parametrize("link", [None, "400"])
@pytest.mark.parametrize("gpu", ["measured", "measured without a link between hosts", "H100", "GB200"])
def test_a_fine_tune_and_a_search_are_planned_on_the_same_machine(tmp_path, gpu, link):
    """Its latencies and the rate that its links reach decide on the best layout, so both have to have them."""
    if gpu.startswith("measured"):
        gpu = str(saved(tmp_path, drop=() if gpu == "measured" else ("between",)))
    options = ["--model", "llama3-8b", "--gpus", "144", "--gpu", gpu, *(["--link", link] if link else [])]
    plan_of = cli._parser().parse_args(["plan", *options, "--per-step", "144"])
    search_of = cli._parser().parse_args(["plan", "--search", *options])
    for arguments in (plan_of, search_of):
        command.question_of(arguments)
    fine_tune, search = answer.request_of(plan_of)[0].machine, job_of(search_of).machine
    assert fine_tune == search
    assert (fine_tune.link, fine_tune.link_bytes_per_s) == (search.link, search.link_bytes_per_s)


@pytest.mark.parametrize(
    ("drop", "changes", "told"),
    [
        (("memory_gib",), {}, "own.json: no memory_gib (GiB of one GPU"),
        (("name", "peak_tflops"), {}, "no name (of the GPU), peak_tflops (TFLOP/s of its datasheet)"),
        ((), {"memory_gb": 80}, "no field memory_gb; did you mean 'memory_gib'?"),
        ((), {"xyz": 1}, "no field xyz; there are name, memory_gib"),
        ((), {"memory_gib": 85e9}, "memory_gib is 8.5e+10, not within 0.01 to 4096; it is in GiB"),
        ((), {"memory_gb_per_s": math.nan}, "memory_gb_per_s is nan, not within"),
        ((), {"peak_tflops": "989"}, "peak_tflops must be a number (TFLOP/s of its datasheet), not '989'"),
        ((), {"peak_tflops": True}, "peak_tflops must be a number"),
        ((), {"reachable_tflops": 1200}, "reachable_tflops is 1200, above peak_tflops, 989: are both in TFLOP/s?"),
        ((), {"reachable_tflops": {}}, "reachable_tflops has no sizes"),
        ((), {"reachable_tflops": {"big": 600}}, "reachable_tflops has the size 'big', no whole number"),
        ((), {"reachable_tflops": {"1024": 0}}, "reachable_tflops of 1024 is 0, not within"),
        ((), {"reachable_tflops": {"1024": 300, "2048": 1200}}, "above peak_tflops"),
        ((), {"inside": 360}, "inside must be an object with gb_per_s and latency_us"),
        ((), {"inside": {"gb_per_s": 360}}, "inside has no latency_us (µs of a collective"),
        ((), {"between": {"gbit_per_s": 400, "latency_us": 3}}, "no field between.gbit_per_s; did you mean 'between.g"),
        ((), {"host_gpus": 0}, "host_gpus must be a whole number of at least 1, not 0"),
        ((), {"bf16": "yes"}, "bf16 must be true or false, not 'yes'"),
        ((), {"name": ""}, "name must be a text"),
        ((), {"matmul_flops": 1e9}, "a run's machine.json, and no profile"),
        (("inside",), {}, "own.json has no inside (gb_per_s, latency_us), which 16 GPUs need"),
    ],
)  # fmt: skip
def test_a_profile_that_is_wrong_is_one_line(tmp_path, drop, changes, told, capsys):
    path = saved(tmp_path, drop, **changes)
    assert cli.main(["plan", "--search", *JOB, "--gpu", str(path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "own.json is no JSON"), ("[1]", "own.json: not a profile, which is an object with name"), (None, "no file")],
)
def test_a_file_that_is_no_profile_is_one_line(tmp_path, text, told, capsys):
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    for question in (["--search", *JOB], ["--explain", "tp=2", *JOB], ["--against", "x.csv"], ["--model", "gpt2"]):
        assert cli.main(["plan", *question, "--gpu", str(path)]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1


def test_search_and_explain_with_a_profile(tmp_path, capsys):
    path = str(saved(tmp_path))
    assert cli.main(["plan", "--search", *JOB, "--gpu", path]) == 0
    assert "16 × our H100" in capsys.readouterr().out
    assert cli.main(["plan", "--explain", "tp=8,sharding=zero1", *JOB, "--gpu", path]) == 0
    shown = capsys.readouterr().out
    assert "2850 GB/s, as measured" in shown
    assert says(shown, "360", "GB/s", "300", "GB/s", "adapters", "30", "90")
    slow = saved(tmp_path, inside={"gb_per_s": 3.6, "latency_us": 30})
    assert cli.main(["plan", "--explain", "tp=8", *JOB, "--gpu", str(slow), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert parts["tensor-parallel traffic"] > parts["matrix multiplications"]


def test_plan_with_a_profile(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(project, "available_cores", lambda: 1)  # a small run: no processes for it
    small = saved(tmp_path, memory_gib=8, name="ours")
    job = ["--model", "gpt2", "--full", "--gpus", "2", "--zero", "1", "--batch", "2", "--sequence", "256"]
    assert cli.main(["plan", *job, "--per-step", "4", "--checkpointing", "off", "--gpu", str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == "ours"


ROW = {"model": "llama3-8b", "gpu": "our H100", "gpus": "8", "sequence": "8192", "micro_batch": "1",
       "accumulation": "4", "tokens_per_s": "9000", "sharding": "zero3"}  # fmt: skip


def own_runs(folder, **changes):
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerow(ROW | changes)
    return path


def test_runs_on_the_own_machine(tmp_path, capsys):
    path = saved(tmp_path)
    (by_name,) = runs.read(own_runs(tmp_path), profile.load_profile(path))
    (by_file,) = runs.read(own_runs(tmp_path, gpu="own.json"))
    assert by_name == by_file
    assert by_name.job.machine.rate(2) == pytest.approx(360e9)
    assert cli.main(["plan", "--against", str(own_runs(tmp_path)), "--gpu", str(path)]) == 0
    assert "step time" in capsys.readouterr().out
    assert cli.main(["plan", "--against", str(own_runs(tmp_path, gpu="A100-80GB")), "--gpu", str(path)]) == 2
    assert says(capsys.readouterr().err, "our", "H100")


def test_a_profile_takes_the_place_of_a_published_tables_gpu(tmp_path):
    own = profile.load_profile(saved(tmp_path, name="H100", drop=("between",)))
    table = project.root() / "data" / "published_runs" / "llm_foundry_fsdp.csv"
    usual, changed = loaders.load(table), loaders.load(table, own)
    for before, after in zip(usual, changed, strict=True):
        ours = before.job.machine.gpu.name == "H100"
        assert (after.job.machine.gpu is own.gpu) == ours
        assert after.job.machine.rate(64) == pytest.approx(before.job.machine.rate(64)), "what was not measured stays"


def test_measuring_this_machine_writes_what_can_be_read(tmp_path, monkeypatch, capsys):
    quick(monkeypatch)
    path = tmp_path / "here.json"
    assert cli.main(["plan", "--measure", str(path), "--gpus", "2"]) == 0
    assert f"written to {path}" in capsys.readouterr().out
    found = profile.load_profile(path)
    assert (found.host_gpus, found.between) == (2, None)
    assert found.gpu.measured
    assert 0 < found.gpu.reachable <= found.gpu.flops
    assert found.latency_within > 0
    assert cli.main(["plan", "--explain", "tp=2", "--model", "gpt2", "--gpus", "2", "--gpu", str(path)]) == 0
    assert "2 × cpu" in capsys.readouterr().out


def test_a_warm_chips_rate_is_of_what_it_multiplied(monkeypatch):
    """By a clock that goes on with products alone: the first take 1 s, and from half of the time on 2 s."""
    multiply, made = torch.mm, []
    monkeypatch.setattr(torch, "mm", lambda *args, **more: (made.append(1), multiply(*args, **more))[1])
    monkeypatch.setattr(measure_profile.time, "perf_counter", lambda: min(len(made), 10) + 2 * max(0, len(made) - 10))
    monkeypatch.setattr(measure_profile.dist, "barrier", lambda: None)
    monkeypatch.setattr(measure_profile, "_mean", lambda value: value)
    assert measure_profile._warm(8, 20, torch.device("cpu")) == 2 * 8**3 / 2
    assert len(made) == 15


def test_one_rank_has_no_links(tmp_path, monkeypatch, capsys):
    quick(monkeypatch)
    assert "inside" not in measure_profile.measure(tmp_path / "one.json", 1)
    assert profile.find_profile(str(tmp_path / "one.json"), 1).inside is False


@pytest.mark.nightly
@pytest.mark.skipif(tiers.best_tier().name == "none", reason="no link can be limited here")
def test_hosts_are_measured_apart(tmp_path, monkeypatch):
    quick(monkeypatch)
    cluster = Cluster(hosts=2, ranks_per_host=2, between="100 Mbit/s", inside="400 Mbit/s")
    measure_profile.measure(tmp_path / "two.json", 4, cluster)
    found = profile.load_profile(tmp_path / "two.json")
    assert found.between == pytest.approx(100e6 / 8, rel=0.15)
    assert found.gpu.link_bytes_per_s == pytest.approx(400e6 / 8, rel=0.15)
    assert found.host_gpus == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nowhere/x.json"], "no folder nowhere to write x.json into"), (["x.json", "--gpus", "0"], "at least 1, not 0")],
)
def test_what_cannot_be_measured_is_one_line(arguments, told, capsys):
    assert cli.main(["plan", "--measure", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_peak_is_the_datasheets_of_the_devices_name():
    assert hardware.gpu("H100").flops == 989e12
    told = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA GeForce RTX 5090": "5090", "AMD Instinct MI300X": "MI300X"}
    for device, known in told.items():
        assert measure_profile.find_peak_flops(device, 1e12)[0] == hardware.gpu(known).flops
    assert measure_profile.find_peak_flops("cpu", 1e11)[0] == 1e11


def quick(monkeypatch):
    """Smaller than what is worth a plan: only that it is measured and written is of interest here."""
    monkeypatch.setattr(measure_profile, "SIZES", {False: (64, 128)})
    monkeypatch.setattr(measure_profile, "WARM_S", {False: 0.05})
    monkeypatch.setattr(measure_profile, "COPY_BYTES", {False: 1 << 20})
    monkeypatch.setattr(measure_profile, "LARGE_BYTES", {False: 2 << 20})


@pytest.mark.parametrize("name", ["B200", "GB200", "B300", "MI300X", "L4", "A10G", "5090", "Ascend-910B", "A6000"])
def test_gpus_of_today_are_in_the_table_with_their_sources(name):
    gpu = hardware.gpu(name)
    assert gpu.memory_bytes > 20 * 2**30
    assert 0 < gpu.reachable <= 0.85 * gpu.flops
    assert gpu.link_bytes_per_s < gpu.memory_bytes_per_s
    assert len(gpu.source) > 20


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("RTX 5090", "5090"),
        ("ascend 910b", "Ascend-910B"),
        ("H100 SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("RTX-3090", "3090"),
        ("NVIDIA GeForce RTX 4080", "4080"),
        ("RTX 3060", "3060"),
        ("rtx 2080ti", "2080-Ti"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("rtx pro 6000", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_gpus_are_found_by_what_nvidia_smi_and_people_call_them(name, known):
    assert hardware.gpu(name) is hardware.GPUS[known]


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("A100", "did you mean 'A100-80GB' or 'A100-40GB'?"),
        ("RTX 6000", "did you mean 'RTX-6000-Ada' or"),  # there are five boards of that name
        ("NVIDIA A100 80GB PCIe", "did you mean 'A100-80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "did you mean 'RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 3090 Ti", "did you mean '3090'"),
        ("abacus", "there are A800-80GB, A100-80GB"),
    ],
)
def test_another_gpu_is_refused_in_one_line_with_the_nearest(name, offered):
    with pytest.raises(ValueError, match=r"^no GPU ") as refused:
        hardware.gpu(name)
    assert offered in str(refused.value)
    assert "\n" not in str(refused.value)


def test_new_boards_have_their_datasheets_figures():
    flops = {"H100-PCIe": 756, "H100-NVL": 835, "RTX-PRO-6000": 503.8, "RTX-6000-Ada": 364.2, "A6000": 154.8, "T4": 65}
    assert {name: hardware.GPUS[name].flops / 1e12 for name in flops} == pytest.approx(flops)
    rates = {"H100-PCIe": 2000, "H100-NVL": 3900, "RTX-PRO-6000": 1792, "RTX-6000-Ada": 960, "A6000": 768, "T4": 320}
    assert {name: hardware.GPUS[name].memory_bytes_per_s / 1e9 for name in rates} == pytest.approx(rates)
    assert [gpu.name for gpu in hardware.GPUS.values() if not gpu.bf16] == ["T4", "2080-Ti", "V100"]
    assert measure_profile.find_peak_flops("NVIDIA H100 PCIe", 1e12)[0] == 756e12
    assert measure_profile.find_peak_flops("Tesla V100-SXM2-16GB", 1e12)[0] == 125e12
    assert measure_profile.find_peak_flops("Quadro RTX 6000", 1e12)[0] == 1e12
