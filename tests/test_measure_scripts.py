"""``pardemo measure`` on scripts in the manner of each library's own examples (tests/scripts), each as it is.

Of each: it runs unchanged, the parallelism is recognised, what the calls make is what the kernel counted, what has a
formula meets it or says why not, and the kinds of memory are the peak.
"""

import pytest
from conftest import few

from pardemo import measure, project

SCRIPTS = project.root() / "tests" / "scripts"
#: Ranks, the parallelisms by kind, and how far the kernel's count may be from the calls': small models send messages
#: of a few bytes, each with a header of its own.
EXPECTED = {
    "accelerate_script": (2, ["DDP"], 0.01),
    "context_parallel": (2, ["CP"], 0.02),
    "ddp": (2, ["DDP"], 0.01),
    "deepspeed_zero3": (2, ["DeepSpeed ZeRO-3"], 0.02),
    "fsdp1": (2, ["FSDP1"], 0.01),
    "fsdp2": (2, ["FSDP2"], 0.01),
    "hf_trainer": (2, ["DDP"], 0.01),
    "hsdp": (4, ["HSDP"], 0.01),
    "megatron_gpt": (4, ["DP", "TP"], 0.02),
    "nanogpt_like": (2, ["DDP"], 0.01),
    "pipelining": (2, ["PP"], 0.02),
    "tp_sp": (4, ["TP"], 0.1),
}


def test_each_script_is_here():
    assert sorted(path.stem for path in SCRIPTS.glob("*.py")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", few(EXPECTED, 5, 8, 11))
def test_a_script_as_it_is(name, tmp_path):
    ranks, kinds, apart = EXPECTED[name]
    measured = measure.script(str(SCRIPTS / f"{name}.py"), ranks=ranks, folder=tmp_path)
    assert sorted({one.kind for one in measured.parallelism}) == kinds
    assert (measured.ranks, measured.steps, measured.backend) == (ranks, 3, "gloo")
    for counted, of_calls in zip(measured.wire_bytes, measured.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_calls, rel=apart, abs=2000)
    memory = measured.memory
    assert sum(memory["kinds"].values()) == memory["peak_bytes"]
    assert memory["kinds"]["optimizer states"] > 0
    assert memory["line"].startswith(f"{name}.py:")
    for row in measured.collectives:
        assert row.line.startswith(f"{name}.py:"), row
        assert row.why, row
        assert "not known" not in row.why, row
        explained = name.startswith("deepspeed") or "times, since" in row.why
        if row.expected_bytes is not None and row.bytes > 0 and not explained:
            assert row.bytes == pytest.approx(row.expected_bytes, rel=0.02), row
    told = [one.what for one in measured.findings]
    assert not any("nothing is summed" in what or "too often" in what for what in told), told
    if name == "deepspeed_zero3":
        assert any("stage3_param_persistence_threshold" in what for what in told), "what its formula misses is told"
    for one in measured.time:
        assert one.exposed_s + one.hidden_s + one.idle_s > 0
