"""Whatever a file or an option holds that comes from outside: it is read, or refused in one clear line.

No other error, no file outside of the folder that was named, no code. Checkpoints of ZeRO have a file of their own,
``test_zero_checkpoint.py``.
"""

import copy
import csv
import io
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import yaml
from bench import runs as bench_runs
from conftest import tiny_folder
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_zero_checkpoint import PATHS, VALUES, mutations

from pardemo import Cluster, claims, cli, headlines, project, signed_folders
from pardemo.baichuan2 import load_checkpoint
from pardemo.book.run import doctor, parameters
from pardemo.finetune import predict, recipe
from pardemo.meters import trace
from pardemo.peers.accelerate import config_checks
from pardemo.planner.layouts.published import loaders
from pardemo.script.compare import run_layouts
from pardemo.script.job_files.reading import read_job
from pardemo.script.step.pace import cluster_of, read_pace
from pardemo.world import launched

#: What fails is not made smaller: files of a megabyte are among the cases, and that would take minutes.
QUICK = settings(
    max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
#: What the reader of a file has no use for: Python's own audit names it.
CODE = ("pickle.find_class", "os.system", "subprocess.Popen", "os.mkdir", "os.exec", "os.posix_spawn")
DEEP = [
    b"[" * 5000,
    b'{"a":' * 5000,
    b"a: " * 5000,
    b"- " * 5000,
    b"9" * 5000,
    b"&a [*a]",
    b"\x00",
    b"\xff\xfe",
]
#: Whose files an import opens.
LIBRARIES = tuple(
    {os.path.realpath(part) for part in (sys.prefix, sys.base_prefix, project.PACKAGE, *sys.path) if part}
)

_events: list | None = None


def _audit(event, arguments):
    if _events is not None and (event == "open" or event in CODE):
        _events.append((event, arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def watched():
    sys.addaudithook(_audit)  # it stays to the end of the process, and does nothing when nobody asks


def outcome(read, *arguments):
    """What ``read`` returns, or its one line; which files it opened, and whether it ran code."""
    global _events
    _events, refused, value = [], None, None
    try:
        value = read(*arguments)
    except (ValueError, OSError) as error:
        refused = str(error)
    finally:
        events, _events = _events, None
    assert [event for event in events if event[0] in CODE] == []
    if refused is not None:
        assert refused.strip(), "it says something"
        assert len(refused.splitlines()) == 1, refused
    opened = {os.path.realpath(os.fsdecode(name)) for event, name in events
              if event == "open" and isinstance(name, (str, bytes, os.PathLike))}  # fmt: skip
    return value, refused, {name for name in opened if not name.startswith((*LIBRARIES, "/proc", "/sys", "/dev"))}


@st.composite
def damaged(draw, whole):
    """The bytes of a file with a part replaced, taken away, or cut off."""
    begin = draw(st.integers(0, len(whole)))
    end = draw(st.integers(begin, min(len(whole), begin + 20)) | st.just(len(whole)))
    return whole[:begin] + draw(st.binary(max_size=8) | st.sampled_from(DEEP)) + whole[end:]


def fuzz(path, whole, read, plain=None, dump=None, inside=False, kinds=2):
    """Reads the file with damaged bytes and, where ``plain`` is what it says, with damaged values.

    ``inside``: no file beyond the folder may be opened. ``kinds``: so many different refusals are seen at least.
    """
    path.write_bytes(whole)
    assert outcome(read, path)[1] is None, "it is right as it is"
    refusals = set()

    def check(content):
        path.write_bytes(content)
        _, refused, opened = outcome(read, path)
        refusals.add(refused)
        if inside:
            assert not [name for name in opened if not name.startswith(os.path.realpath(path.parent))], opened

    QUICK(given(damaged(whole))(check))()
    if plain is not None:
        QUICK(given(mutations(plain))(lambda value: check(dump(value))))()
    assert len(refusals - {None}) >= kinds


def as_json(value):
    return json.dumps(value).encode()


def as_yaml(value):
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def test_recipes(tmp_path):
    plain = recipe.to_dict(recipe.load("tiny-cpu"))
    fuzz(tmp_path / "job.yaml", as_yaml(plain), recipe.load, plain, as_yaml, inside=True)


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True}, "activation_checkpointing": {"partition_activations": True},
}  # fmt: skip


def test_deepspeed_configurations(tmp_path):
    def read(path):
        return doctor.examine_deepspeed(str(path), 2)

    fuzz(tmp_path / "ds.json", as_json(DEEPSPEED), read, DEEPSPEED, as_json, inside=True)


ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "no",
    "num_machines": 1, "num_processes": 2, "machine_rank": 0, "use_cpu": False,
    "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0, "offload_optimizer_device": "none"},
}  # fmt: skip
FSDP = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no", "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip


@pytest.mark.parametrize("plain", [ACCELERATE, FSDP], ids=["deepspeed", "fsdp"])
def test_accelerate_configurations(tmp_path, plain):
    fuzz(tmp_path / "accelerate.yaml", as_yaml(plain), config_checks.read_config, plain, as_yaml)


def test_data_files(tmp_path):
    rows, _ = headlines.corpus(train=4, test=1)
    whole = json.dumps(rows, ensure_ascii=False).encode()
    fuzz(tmp_path / "rows.json", whole, headlines.read, rows, as_json, inside=True)
    lines = [{"prompt": "a", "label": "b", "predict": "c"}] * 3

    def dump(value):
        rows = value.get("rows") if isinstance(value, dict) else value
        return b"\n".join(map(as_json, rows if isinstance(rows, list) else [rows]))

    fuzz(tmp_path / "lines.jsonl", dump({"rows": lines}), predict.read_predictions, {"rows": lines}, dump, inside=True)


RUNS = [
    {"model": "llama2-7b", "gpu": "A100-80GB", "gpus": "8", "sequence": "4096", "micro_batch": "1",
     "accumulation": "4", "seconds": "5.1"},
    {"model": "gpt2", "gpu": "H100", "gpus": "16", "sequence": "1024", "micro_batch": "4",
     "accumulation": "1", "seconds": "0.4"},
]  # fmt: skip


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(RUNS[0]), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row for row in rows if isinstance(row, dict))
    return text.getvalue().encode("utf-8", "surrogatepass")


def test_runs_files(tmp_path):
    plain = {"rows": RUNS}

    def dump(value):
        rows = value.get("rows") if isinstance(value, dict) else None
        return as_csv(rows if isinstance(rows, list) else [])

    fuzz(tmp_path / "runs.csv", as_csv(RUNS), lambda path: loaders.load(path, None), plain, dump)


def test_runs_of_the_speed_table(tmp_path):
    row = {"name": "quick", "ours": 1.0, "peer": 2.0, "unit": "s", "ratio": 2.0, "spread": [1.8, 2.2], "target": 1.0,
           "note": "the peer", "within": None, "met": True}  # fmt: skip
    bench_runs.add(tmp_path, [row], "2026-11-01", "rev1", {"cores": 2})
    kept = (tmp_path / bench_runs.RUNS).read_bytes()
    fuzz(tmp_path / bench_runs.RUNS, kept, bench_runs.read, json.loads(kept), as_json)
    fuzz(
        tmp_path / "run.json", as_json([row]), lambda path: bench_runs.figures(bench_runs.json_of(path)), [row], as_json
    )


PROVE = b"""
script = "train.py --batch {batch}"
steps = 3
double = true
[[layout]]
ranks = 1
batch = 8
[[layout]]
ranks = 4
batch = 2
tp = 2
"""


def test_prove_toml(tmp_path):
    fuzz(tmp_path / "prove.toml", PROVE, lambda path: run_layouts.from_file(str(path)), inside=True)

    @QUICK
    @given(st.lists(VALUES | st.sampled_from(["ranks=4 tp=2", "ranks=1", "ranks=2,dp=2"]), max_size=3))
    def check(given_layouts):
        outcome(run_layouts.for_function, given_layouts)

    check()


def test_claims_traces_and_signed_folders(tmp_path):
    row = dict.fromkeys(claims.COLUMNS, "x")
    (tmp_path / "claims").mkdir()

    def dump(value):
        return as_json(value["rows"] if isinstance(value, dict) and "rows" in value else value)

    file = tmp_path / "claims" / "01_a.json"
    fuzz(file, as_json([row]), lambda path: claims.read(path.parent.parent), {"rows": [row]}, dump)
    event = {"ph": "X", "name": "aten::add", "cat": "cpu_op", "ts": 1.5, "dur": 2, "tid": 3, "pid": 4, "args": {}}
    plain = {"traceEvents": [event], "baseTimeNanoseconds": 5}
    fuzz(tmp_path / "trace.json", as_json(plain), trace.read, plain, as_json, inside=True, kinds=1)


def read_of_a_job(path):
    """Reads a file of a job, and refuses it as ``pardemo compare`` does."""
    if refused := read_job([str(path)]).refused:
        raise ValueError(refused[0])


def test_files_of_a_job_may_hold_anything(tmp_path):
    event = {
        "ph": "X", "name": "record_param_comms", "cat": "cpu_op", "ts": 1.5, "dur": 2, "tid": 3, "pid": 4,
        "args": {"External id": 7, "Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float",
                 "Process Group Ranks": "[0, 1]", "Group size": 2}}  # fmt: skip
    kernel = event | {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"}
    distributed = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    plain = {"traceEvents": [event, kernel], "distributedInfo": distributed, "deviceProperties": [{"name": "H100"}]}
    fuzz(tmp_path / "trace_0.json", as_json(plain), read_of_a_job, plain, as_json, inside=True)
    entry = {
        "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "collective_seq_id": 1,
        "p2p_seq_id": 0, "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "time_created_ns": 10**18, "state": "completed", "is_p2p": False,
        "frames": [{"name": "f", "filename": "train.py", "line": 3}],
    }  # fmt: skip
    plain = {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [entry]}
    fuzz(tmp_path / "dump_0", pickle.dumps(plain), read_of_a_job, plain, pickle.dumps, inside=True)
    fuzz(tmp_path / "dump_1", as_json(plain), read_of_a_job, plain, as_json, inside=True)
    events = [{"action": "alloc", "addr": 8, "size": 4, "frames": entry["frames"]}]
    plain = {"segments": [{"blocks": []}], "device_traces": [events]}
    fuzz(tmp_path / "memory_0", pickle.dumps(plain), read_of_a_job, plain, pickle.dumps, inside=True)
    log = b"""[titan] 2026-09-01 10:00:02,000 - step: 2  loss: 7.1  memory: 48.87GiB(51.44%)  tps: 4,376  tflops: 253.41
 [2026-09-01 10:00:04.000000] iteration 3/ 500 | elapsed time per iteration (ms): 2000.0 | lm loss: 6.2E+00 |
[Rank 0] (after 3 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 9
"""
    fuzz(tmp_path / "job.log", log, read_of_a_job, inside=True, kinds=0)


def test_a_seal_may_hold_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("PARDEMO_KEY", str(tmp_path / "key"))
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"a state")
    signed_folders.sign(folder, step=3)
    assert signed_folders.fault(folder) is None
    whole = (folder / signed_folders.SIGNATURE).read_bytes()
    plain = json.loads(whole)

    def check(content):
        (folder / signed_folders.SIGNATURE).write_bytes(content)
        reason, refused, _ = outcome(signed_folders.fault, folder)
        assert refused is None, "it answers with a reason"
        try:
            same = json.loads(content) == plain
        except (ValueError, RecursionError):
            same = False
        assert (reason is None) == same or reason is None, reason
        if not same and isinstance(reason, type(None)):
            read = json.loads(content)
            assert {key: read[key] for key in plain} == plain, "what it says besides is of no account"

    QUICK(given(damaged(whole))(check))()
    QUICK(given(mutations(plain))(lambda value: check(as_json(value))))()


# --- a model's folder: its index may name any file, and its weights may be a pickle


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model in two shards, with an index."""
    folder = tmp_path_factory.mktemp("models") / "model"
    rows, _ = headlines.corpus(train=60, test=1)
    tiny_folder(folder, [row["input"] + row["output"] for row in rows])
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name].clone() for name in part}, folder / f"part-{number}.safetensors")
        where |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    load_checkpoint(folder)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "generation_config.json"])
def test_a_models_json_may_hold_anything(model, name):
    path = model / name
    whole = path.read_bytes()
    plain = json.loads(whole)
    (model.parent / "outside").write_bytes(b"no business of a model's")
    try:
        fuzz(path, whole, lambda path: load_checkpoint(path.parent), plain, as_json, inside=True, kinds=1)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "name", [*PATHS, "/etc/hostname", "../outside", "a/../../outside", ".", "", "part-1.safetensors/"]
)
def test_an_index_names_no_file_outside_its_folder(model, name):
    path = model / "model.safetensors.index.json"
    whole = path.read_bytes()
    value = copy.deepcopy(json.loads(whole))
    value["weight_map"][sorted(value["weight_map"])[0]] = name
    path.write_text(json.dumps(value))
    try:
        _, refused, opened = outcome(load_checkpoint, model)
    finally:
        path.write_bytes(whole)
    assert refused is not None
    assert {str(Path(each).parent) for each in opened} <= {os.path.realpath(model)}


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["plain", "torch", "in a dict of tensors", "as safetensors"])
def test_a_models_weights_run_no_code(tmp_path, model, how):
    folder, canary = tmp_path / "model", tmp_path / "canary"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    bad = Canary(str(canary))
    name = "model.safetensors" if how == "as safetensors" else "pytorch_model.bin"
    if how in ("plain", "as safetensors"):
        (folder / name).write_bytes(pickle.dumps(bad))
    else:
        torch.save(bad if how == "torch" else {"model.norm.weight": torch.ones(64), "more": bad}, folder / name)
    _, refused, _ = outcome(load_checkpoint, folder)
    assert refused is not None
    assert name in refused
    assert not canary.exists()


# --- options

WORDS = st.text(max_size=12) | st.sampled_from(
    ["2x2", "2×4", "1x", "x", "0x0", "²x²", "200 Mbit/s", "1e400 GB/s", "-1 B/s", "nan bit/s", "2 ms", "9 s", "H100",
     "20ms", "1.2.3ms", "..", "../x", "/etc/passwd", "\x1b[2J", "9" * 5000]
)  # fmt: skip


def test_cluster_specifications():
    optional = st.none() | WORDS

    @QUICK
    @given(VALUES, VALUES, optional | VALUES, optional | VALUES, optional, optional)
    def cluster(hosts, beside, between, inside, tier, latency):
        outcome(Cluster, hosts, beside, between, inside, tier, latency)

    @QUICK
    @given(WORDS, optional, optional, optional)
    def options(pace, cluster, between, inside):
        outcome(read_pace, pace, cluster, between, inside)
        if cluster is not None:
            outcome(cluster_of, cluster, between, inside)

    cluster()
    options()


def test_parameters_of_notebooks():
    notebooks = project.notebooks()
    names = sorted({name for path in notebooks.values() for name in parameters.parameters_of(path)})
    notebooks = dict(list(notebooks.items())[::9])  # each is read for each example
    texts = WORDS | st.sampled_from(["[1, 2", "__import__('os').system('false')", "{'a': [1]}", "(" * 500, "1_0", "0x"])

    @QUICK
    @given(st.dictionaries(st.sampled_from(names) | st.text(max_size=5), texts, max_size=3))
    def check(given_texts):
        values, refused, _ = outcome(lambda: {key: launched.value_of(text) for key, text in given_texts.items()})
        assert refused is None, "what is no literal is text"
        assigned, refused, _ = outcome(parameters.assign, notebooks, values)
        assert refused is not None or set(assigned) == set(notebooks)

    check()


def test_the_command_says_it_in_one_line(tmp_path, capsys, monkeypatch):
    """Status 2, and no traceback, of the commands that read these files."""
    bad = tmp_path / "bad"
    monkeypatch.chdir(tmp_path)
    commands = [
        ["finetune", "bad.yaml"], ["doctor", "--deepspeed", "bad.json"],
        ["plan", "--against", "bad.csv"], ["prove", "bad.toml"], ["score", "bad.jsonl"], ["claims", "bad"],
    ]  # fmt: skip
    (bad / "claims").mkdir(parents=True)
    for content in (b"", b"\xff\xfe\x00", b"[" * 5000, b"[1, 2]", b'{"a": 1}', b"a: [1", b"a,b\n1,2\n", b"\x1b[2J"):
        for command in commands:
            path = bad / "claims" / "01_a.json" if command[0] == "claims" else tmp_path / command[-1]
            path.write_bytes(content)
            assert cli.main(command) == 2, (command, content[:20])
            error = capsys.readouterr().err
            assert len(error.strip().splitlines()) == 1, (command, content[:20], error[:500])
            assert error.startswith(f"pardemo {command[0]}: "), error[:500]
