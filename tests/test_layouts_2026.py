"""Layouts of what is trained in 2026: experts, few bits, uneven pipelines, racks; intervals, and one's own runs."""

import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
from calibration import known_ratios
from conftest import says
from transformers import CONFIG_MAPPING

from pardemo import project
from pardemo.cli import main
from pardemo.planner import hardware
from pardemo.planner.layouts import configurations, intervals, launch, layout_text, programs
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.micro_batch import expert_costs
from pardemo.planner.layouts.published import against, loaders
from pardemo.planner.layouts.published.runs import read
from pardemo.planner.layouts.search import search, sensitivity
from pardemo.planner.layouts.shape import Experts, Layer, Mamba, Shape
from pardemo.planner.layouts.step import piece_layers, predict_step, stage_layers

FOLDER = project.root() / "data" / "published_runs"
SMALL = Shape(8, 1024, 16, 4, 2816, 32000)
ROUTED = replace(SMALL, experts=Experts(64, 4, 512))


@pytest.fixture(scope="module")
def bridge():
    return against.compare(loaders.load(FOLDER / "megatron_bridge.csv"))


def job(what=ROUTED, gpus=64, gpu="B200", each=8, **more):
    return Job(what, Machine(hardware.gpu(gpu), gpus, each, 4e11), programs.MEGATRON, **more)


def errors(half, experts):
    return against.errors([x.error for x in half if bool(x.run.job.shape.experts) == experts])


def test_nvidias_rows_are_predicted_those_that_were_not_fitted_too(bridge):
    assert (len(bridge), sum(bool(x.run.wrong) for x in bridge)) == (128, 1)
    _, kept_back = against.halves("megatron_bridge.csv")
    dense, routed = errors(kept_back, False), errors(kept_back, True)
    assert dense["mean"] < 0.08
    assert dense["within 15 %"] >= 0.9
    assert routed["mean"] < 0.12
    assert routed["within 15 %"] >= 0.75


def test_most_of_what_nvidia_ran_is_said_to_run(bridge):
    good = [x for x in bridge if not x.run.wrong]
    assert sum(x.fits for x in good) / len(good) > 0.9


def test_the_models_operations_are_nvidias(bridge):
    """Model TFLOP/s over tokens/s; NVIDIA counts all of attention's scores, or the causal half, by the release."""
    with (FOLDER / "megatron_bridge.csv").open(encoding="utf-8") as file:
        text = file.read()
    for model, flops in (
        ("LLAMA3_70B", 2353e12 / 5243),
        ("Qwen3_30B_a3B", 700e12 / 30411),
        ("DeepSeekV3", 1219e12 / 4691),
    ):
        assert model in text
        what = next(x.run.job for x in bridge if x.run.source.endswith("26.02.01") and _named(x, model))
        counted = [what.shape.flops(what.sequence, causal) for causal in (True, False)]
        assert min(counted) * 0.97 <= flops <= max(counted) * 1.03, model


def _named(outcome, model):
    from pardemo.planner.layouts.published.loaders import MODELS

    return outcome.run.job.shape.name == MODELS[model].name


def test_which_host_link_a_gpu_has():
    rates = {name: hardware.host_bytes_per_s(hardware.gpu(name)) for name in ("T4", "A100-80GB", "H100", "GB200")}
    assert rates == {"T4": 12.8e9, "A100-80GB": 25.6e9, "H100": 51.2e9, "GB200": 450e9}


def test_experts_are_spread_over_all_ranks_of_a_stage():
    """TP 2 and EP 64 on 64 GPUs: the experts' ranks are tensor-parallel ones too."""
    layout = Layout(tp=2, dp=32, ep=64, sharding="zero1", sequence_parallel=True)
    check_layout(layout, ROUTED, 64, 4096)
    assert (layout.expert_ranks, layout.expert_copies()) == (64, 1)
    with pytest.raises(ValueError, match=r"EP.*64.*ETP.*2.*64.*TP.*CP.*DP"):
        check_layout(layout.but(etp=2), ROUTED, 64, 4096)
    with pytest.raises(ValueError, match=r"ETP.*2"):
        check_layout(Layout(dp=64, etp=2), SMALL, 64, 4096)
    one, two = (predict_memory(job(), layout.but(ep=32, etp=etp)).lines["parameters"] for etp in (1, 2))
    assert two < one


def test_a_fused_dispatch_sends_a_token_to_a_host_once():
    machine = replace(job().machine, latency_within=0.0, latency_between=0.0)
    plain, fused = machine.all_to_all(1e9, 32, 1), machine.dispatch(1e9, 32, 1, 8)
    assert plain == pytest.approx(1e9 * 24 / 32 * 8 / 4e11 / 0.8, rel=0.01)
    hosts = 4 * (1 - 0.75**8)  # of four, which eight random experts are on
    assert fused == pytest.approx(1e9 * hosts / 8 * 3 / 4 * 8 / 4e11 / 0.8, rel=0.01)
    assert machine.dispatch(1e9, 1, 1, 8) == 0


def test_what_slows_experts_down():
    layout = Layout(dp=64, ep=8, sharding="zero1", micro_batch=2)
    even = expert_costs(job(), layout)
    assert expert_costs(job(imbalance=1.5), layout).matmul_s > 1.4 * even.matmul_s
    assert even.launch_s == 0 < expert_costs(job(graphs=False), layout).launch_s
    assert expert_costs(job(dropless=False, graphs=False), layout).launch_s == 0, "nobody waits for counts"
    alone = expert_costs(job(overlap=False), layout)
    assert alone.exchange_s > even.exchange_s
    assert alone.moved_bytes > even.moved_bytes, "tokens go through memory beside another micro-batch's computation"
    assert expert_costs(job(dispatch="alltoall", overlap=False), layout).moved_bytes > alone.moved_bytes
    biased = replace(ROUTED, experts=replace(ROUTED.experts, bias=True))
    assert expert_costs(job(biased), layout).moved_bytes > even.moved_bytes


def test_a_precision_that_a_gpu_has_not_is_one_line():
    for gpu, precision, told in (
        ("A100-80GB", "fp8", "A100-80GB has no products in fp8; it has bf16"),
        ("H100", "mxfp8", "H100 has no products in mxfp8; it has bf16, fp8"),
        ("H100", "nvfp4", "H100 has no products in nvfp4; it has bf16, fp8"),
    ):
        with pytest.raises(ValueError, match=told):
            job(gpu=gpu, precision=precision)
    with pytest.raises(ValueError, match=r"precision.*'fp7'.*fp8"):
        hardware.precision("fp7")
    assert [hardware.precision(name) for name in ("FP8-CS", "BF16", "NVFP4", "FP8-MX")] == [
        "fp8",
        "bf16",
        "nvfp4",
        "mxfp8",
    ]


def test_fewer_bits_are_quicker_and_keep_less():
    big = replace(
        SMALL,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn_hidden=28672,
        layers=16,
        head_dim=128,
        value_dim=128,
        projections=(),
    )
    layout = Layout(tp=2, dp=32, sharding="zero1", sequence_parallel=True, accumulation=4)
    given = {name: job(big, precision=name, sequence=8192) for name in hardware.PRECISIONS}
    seconds = {name: predict_step(of, layout).seconds for name, of in given.items()}
    assert seconds["nvfp4"] < seconds["fp8"] == seconds["mxfp8"] < seconds["bf16"]
    kept = {name: predict_memory(of, layout).lines["activations"] for name, of in given.items()}
    assert kept["nvfp4"] < kept["fp8"] < kept["mxfp8"] < kept["bf16"]
    assert predict_step(given["fp8"], layout).peak_flops == 4500e12


def test_the_embedding_and_the_loss_take_a_layers_place():
    llama = configurations.shape_of_config(configurations.find_configuration("llama3.1-405b"))
    cut = piece_layers(llama, 128)
    assert (sum(cut), cut[0], cut[-1], set(cut[1:-1])) == (126, 0, 0, {1})
    layout = Layout(tp=4, pp=16, dp=4, chunks=8, accumulation=16, sharding="zero1", sequence_parallel=True)
    assert stage_layers(job(llama, 256), layout) == [7, *[8] * 14, 7]
    check_layout(layout, llama, 256, 8192, embedding_and_loss_as_layers=True)
    with pytest.raises(ValueError, match=r"126.*layers.*PP.*16.*8.*126"):
        check_layout(layout, llama, 256, 8192)
    for layers, mtp, count in ((61, 1, 16), (61, 0, 16), (82, 0, 16), (7, 1, 8), (94, 0, 32), (3, 0, 3)):
        cut = piece_layers(replace(SMALL, layers=layers, mtp_layers=mtp), count)
        assert (sum(cut), len(cut), min(cut) >= 0) == (layers, count, True)


def test_layers_of_each_kind_are_counted():
    gpt_oss = configurations.shape_of_config(configurations.find_configuration("gpt-oss-20b"))
    assert dict(gpt_oss.layer_kinds) == {Layer("attention", "experts", 0): 12, Layer("attention", "experts", 128): 12}
    assert gpt_oss.attended_tokens(Layer(window=128), 4096) == pytest.approx(128 - 128**2 / 8192)
    assert gpt_oss.attended_tokens(Layer(window=128), 64) == 32, "a window that is wider than the sample"
    scout = configurations.shape_of_config(configurations.find_configuration("llama4-scout"))
    assert scout.attended_tokens(Layer(window=8192), 32768) == 4096, "half of its chunk, on average"
    windowed = replace(SMALL, window=1024, windowed_layers=8)
    assert (
        predict_step(job(windowed, sequence=32768), Layout(dp=64)).parts["attention"]
        < 0.1 * predict_step(job(SMALL, sequence=32768), Layout(dp=64)).parts["attention"]
    )
    maverick = configurations.shape_of_config(configurations.find_configuration("llama4-maverick"))
    assert sum(count for kind, count in maverick.layer_kinds if kind.mlp == "experts") == 24
    hybrid = Shape(4, 1024, 8, 2, 2048, 32000, gated=False, pattern="M*-E", experts=Experts(8, 2, 256),
                   linear_mixer=Mamba(16, 64, 128, 8))  # fmt: skip
    assert sum(count for _, count in hybrid.layer_kinds) == 4
    assert set(predict_step(job(hybrid), Layout(dp=64, ep=8)).parts) >= {
        "matrix multiplications",
        "expert-parallel traffic",
    }
    further = replace(SMALL, mtp_layers=1)
    assert further.params > SMALL.params
    assert predict_step(job(further), Layout(dp=64)).seconds > predict_step(job(SMALL), Layout(dp=64)).seconds


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "qwen2"])
def test_a_window_is_planned_where_a_configuration_has_one(kind):
    config = CONFIG_MAPPING[kind](num_hidden_layers=8)
    if kind == "qwen2":
        assert configurations.shape_of_config(config).windowed_layers == 0, "use_sliding_window is false"
        config = CONFIG_MAPPING[kind](
            num_hidden_layers=8, use_sliding_window=True, max_window_layers=6, sliding_window=512
        )
        assert (
            configurations.shape_of_config(config).window,
            configurations.shape_of_config(config).windowed_layers,
        ) == (512, 2)
    else:
        assert configurations.shape_of_config(config).windowed_layers == {"mistral": 8, "gemma2": 4}[kind]


def test_a_rack_is_one_host():
    assert [hardware.host_gpus(hardware.gpu(name)) for name in ("H100", "GB200", "GB300")] == [8, 72, 72]
    assert hardware.host_gpus(hardware.gpu("GB200"), 256) == 64, "of four racks"
    assert hardware.host_gpus(hardware.gpu("H100"), 12) == 8
    assert hardware.usual_link(hardware.gpu("GB300"), 64) == ("64 adapters of 800 Gbit/s", 64 * 1e11)
    assert hardware.usual_link(hardware.gpu("H100"), 8)[0] == "ethernet-100g"


@pytest.mark.parametrize(
    ("said", "name"),
    [("DGX-GB200", "GB200"), ("NVIDIA GB300 NVL72", "GB300"), ("HGX B200 180GB", "B200"), ("H100-SXM5-80GB", "H100"),
     ("NVIDIA H200 141GB", "H200"), ("h100 nvl", "H100-NVL")],
)  # fmt: skip
def test_a_gpu_is_known_by_its_usual_names(said, name):
    assert hardware.gpu(said).name == name


def test_activations_on_the_host_take_no_memory_and_some_time():
    layout = Layout(dp=64, sharding="zero3", micro_batch=4)
    given = job(SMALL)
    less, same = (predict_memory(given, layout.but(offloaded_layers=n)).lines["activations"] for n in (4, 0))
    assert less < 0.6 * same
    assert "offload" in predict_step(job(SMALL, gpu="A100-80GB"), layout.but(offloaded_layers=8)).parts
    with pytest.raises(ValueError, match=r"offload.*-1"):
        Layout(offloaded_layers=-1)


def test_four_of_five_kept_back_runs_lie_in_their_interval():
    """Of the runs that no constant was fitted to, half tell the intervals of the other half."""
    kept, _ = known_ratios.kept_back()
    told, judged = kept[::2], kept[1::2]
    known = known_ratios.ratios(told)["seconds"]
    inside = defaultdict(list)
    for one in judged:
        names = intervals.kinds_of_runs(one.run.job, one.run.layout)
        found = intervals._interval(known, names, one.step.seconds, False)
        inside[names[-1]].append(found.low <= one.run.seconds <= found.high)
    shares = {name: sum(of) / len(of) for name, of in inside.items() if len(of) >= 30}
    assert len(shares) >= 3
    chance = {name: 2 * math.sqrt(0.8 * 0.2 / len(inside[name])) for name in shares}  # two standard errors
    assert all(abs(share - 0.8) <= chance[name] for name, share in shares.items()), shares
    every = [one for of in inside.values() for one in of]
    assert 0.78 < sum(every) / len(every) < 0.85


def test_the_table_of_ratios_is_what_the_runs_say():
    found = known_ratios.of_all()
    stored = json.loads(intervals.RATIOS.read_text(encoding="utf-8"))
    assert stored == found, "python tests/calibration/known_ratios.py"


def test_where_nothing_is_known_an_interval_is_wider_and_says_so():
    near = intervals.of_seconds(job(SMALL, 8), Layout(dp=8), 1.0)
    assert near.like
    assert near.why.startswith("from ")
    far = intervals.of_seconds(job(SMALL, 1024), Layout(dp=1024), 1.0)
    strange = replace(job(SMALL, 8), program=programs.MEGATRON.but(name="own"))
    unknown = intervals.of_seconds(strange, Layout(dp=8), 1.0)
    for wide in (far, unknown):
        assert not wide.like
        assert says(wide.why, "nothing", "known")
        assert math.log(wide.high / wide.low) > math.log(near.high / near.low)


def test_one_measured_run_corrects_a_machine(tmp_path):
    given = job(SMALL, 8)
    layout = Layout(dp=8, accumulation=2, sharding="zero1")
    slow = 1.4 * predict_step(given, layout).seconds
    path = tmp_path / "mine.csv"
    path.write_text(
        "gpu,gpus,sequence,micro_batch,accumulation,seconds,layers,hidden,heads,groups,middle,vocabulary,sharding,between\n"
        f"B200,8,4096,1,2,{slow},8,1024,16,4,2816,32000,zero1,3200\n"
    )
    corrected, told = against.correct_seconds(given, read(path))
    assert predict_step(corrected, layout).seconds == pytest.approx(slow)
    assert says(told, "1", "1.40", "predicted")
    other = layout.but(micro_batch=2)
    assert predict_step(corrected, other).seconds == pytest.approx(1.4 * predict_step(given, other).seconds)
    with pytest.raises(ValueError, match=r"--measured.*H100.*B200"):
        against.correct_seconds(job(SMALL, 8, "H100"), read(path))


def test_an_impossible_row_is_left_out_and_told(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    path.write_text(
        "gpu,gpus,sequence,micro_batch,accumulation,seconds,model,precision\n"
        "H100,8,4096,1,2,1.0,llama3-8b,FP8-CS\nH100,8,4096,1,2,1.0,llama3-8b,nvfp4\nH100,8,4096,0,2,1.0,llama3-8b,bf16\n"
    )
    told = []
    assert len(read(path, left_out=told)) == 1
    assert [line.split(": ")[0] for line in told] == ["runs.csv, line 3", "runs.csv, line 4"]
    assert main(["plan", "--against", str(path)]) == 0
    out = capsys.readouterr().out
    assert says(out, "runs.csv", "3", "H100", "nvfp4", "bf16", "fp8")
    assert "llama, 8 × H100, fp8  DP8 1×2" in out, "few runs are shown one by one"
    with pytest.raises(ValueError, match="line 3"):
        read(path)


def test_a_layout_is_asked_as_it_is_printed():
    given = job(SMALL, 64, "H100")
    for layout in (
        Layout(tp=4, pp=2, dp=8, sharding="zero1", micro_batch=2, accumulation=16, chunks=4, sequence_parallel=True),
        Layout(dp=64, sharding="zero3", shard_group=8, accumulation=4, recompute="full"),
    ):
        assert layout_text.parse_layout(str(layout), given) == layout
    routed = Layout(dp=64, ep=8, etp=2, sharding="zero1")
    assert layout_text.parse_layout(str(routed), job()) == routed


def test_what_a_configuration_says_beside_is_named(tmp_path, capsys):
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
        "vocab_size": 32000, "intermediate_size": 2816, "quantization_config": {"load_in_4bit": True},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--search", "--model", str(tmp_path), "--gpus", "8", "--gpu", "H100", "--price", "2"]) == 0
    out = capsys.readouterr().out
    assert says(out, "(quantization_config)")
    assert "for a billion tokens" in out
    assert says(out, "times")


@pytest.mark.parametrize(
    ("program", "model"),
    [("megatron-core", "qwen3-30b-a3b"), ("megatron-core", "llama3-8b"), ("torchtitan", "llama3-8b"),
     ("torchtitan", "qwen3-8b"), ("nanotron", "llama3-8b"), ("llm-foundry", "llama3-8b")],
)  # fmt: skip
def test_what_is_chosen_is_what_its_program_can_run(program, model):
    what = configurations.shape_of_config(configurations.find_configuration(model))
    given = Job(what, Machine(hardware.gpu("H100"), 16, 8, 4e11), programs.find_program(program), 4096)
    able = launch.runnable_by_program(given, model)
    answer = search(given, 64, able=able)
    wanted = {"torchtitan": "torchtitan.toml", "nanotron": "nanotron.yaml", "llm-foundry": "accelerate.yaml"}
    for chosen in answer.best:
        assert next(iter(launch.texts(given, chosen.layout, model))) == wanted.get(program, "megatron.sh")
    assert all(best.layout for best, _ in sensitivity(answer, able).values())


def test_nothing_is_written_for_what_does_not_fit(tmp_path, capsys):
    asked = ["plan", "--explain", "dp=8", "--model", "llama3-70b", "--gpus", "8", "--gpu", "H100"]
    assert main([*asked, "--write", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--write: DP8 1×1: " in error
    assert "does not fit" in error
    assert not (tmp_path / "out").exists()
    assert main(asked) == 0, "but it is explained"


def test_where_nothing_fits_the_answer_says_what_would(capsys):
    asked = ["--search", "--model", "llama3.1-405b", "--gpus", "8", "--gpu", "H100", "--sequence", "8192"]
    assert main(["plan", *asked]) == 1
    out = capsys.readouterr().out
    assert says(out, "nothing", "least")
    assert says(out, "GB", "GPUs")


def test_the_planner_of_layouts_loads_no_library():
    """Neither torch nor transformers nor numpy, so that it starts at once, and in a browser."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from pardemo.planner.layouts import explanations\n"
        "from pardemo.planner.layouts.published import against, loaders\n"
        "from pardemo.planner.layouts import search\n"
        "from pardemo.planner.layouts import configurations\n"
        "from pardemo.planner.layouts.launch import facts\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'scipy')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_the_docs_say_of_nvidias_runs(bridge):
    text = (project.root() / "docs" / "records" / "planner-error.md").read_text(encoding="utf-8")
    small = [x for x in bridge if x.run.job.shape.name == "qwen3-30b-a3b" and not x.run.source.endswith("25.09")]
    planned = {
        (x.run.job.machine.gpu.name, x.run.layout.micro_batch, x.run.layout.chunks): x.step.tokens_per_s for x in small
    }
    for which in (("H100", 1, 12), ("B200", 1, 1), ("B200", 4, 1)):
        assert f"{planned[which]:,.0f}" in text, which
    good = [x for x in bridge if not x.run.wrong]
    assert f"of {len(good)} runs {sum(not x.fits for x in good)} are said not to fit" in text
    _, kept_back = against.halves("megatron_bridge.csv")
    dense, routed = (errors(kept_back, experts)["mean"] for experts in (False, True))
    assert f"missed by {100 * dense:.1f} % (dense) and {100 * routed:.1f} % (experts)" in text
