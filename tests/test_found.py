"""Bugs of the pinned releases in docs/records/found.md still show; one that is mended comes off that page."""

import fnmatch
import json
import re
import runpy
import subprocess
import sys

import pytest
from conftest import few

from pardemo import project, prove

ROOT = project.PACKAGE.parent
FOUND = ROOT / "tests" / "found"
PAGE = (ROOT / "docs" / "records" / "found.md").read_text(encoding="utf-8")
MENDED = "mended: take it off docs/records/found.md"


def printed(name: str, ranks: int, *options: str) -> str:
    """What the reproduction prints under torchrun."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for _ in range(2):  # gloo may abort a process that ends with its groups, once in a while
        run = subprocess.run([*words, str(FOUND / f"{name}.py"), *options], capture_output=True, text=True, timeout=120)
        if run.returncode == 0:
            return run.stdout
    raise AssertionError(run.stderr[-2000:])


def norms(text: str) -> list[float]:
    """The last number of each step's line: the norm of the gradient."""
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step")]


def moved(text: str) -> float:
    """By how much the frozen weight moved."""
    return float(re.search(r"moved by (\S+),", text)[1])


def test_each_reproduction_is_short_and_on_the_page():
    scripts = sorted(set(FOUND.glob("*.py")) - {FOUND / "run.py"})
    assert scripts
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 35
        assert f"**`{script.stem}`**" in PAGE


def test_the_page_names_the_pinned_release():
    """That of requirements.txt, also where a newer one is installed (``make newest``)."""
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f"torch {pinned}" in PAGE, "another release: measure the page anew"


def test_the_page_says_which_releases_each_bug_was_tried_with():
    tried = json.loads((FOUND / "tried.json").read_text(encoding="utf-8"))
    assert set(tried) == {script.stem for script in FOUND.glob("*.py")} - {"run"}
    assert runpy.run_path(str(FOUND / "run.py"))["page"](PAGE) == PAGE, "python tests/found/run.py --docs"
    pins = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for name, of in tried.items():
        assert of["releases"].get(pins[of["library"]]), (
            f"{name}: python tests/found/run.py --bugs --only {name} --write"
        )


@pytest.mark.nightly
def test_frozen_norm_is_trained():
    assert moved(printed("frozen_norm_is_trained", 1, "--tp", "1")) == 0
    broken = printed("frozen_norm_is_trained", 2)
    assert moved(broken) > 0.001, MENDED
    assert moved(broken) == pytest.approx(moved(PAGE), rel=1e-3)  # fp32, and other processors add in another order


@pytest.mark.nightly
def test_divided_twice():
    broken, right = (norms(printed("divided_twice", 4, "--shards", shards))[0] for shards in ("1", "2"))
    assert right / broken == pytest.approx(4, rel=1e-3), MENDED


@pytest.mark.nightly
def test_gradient_of_another_head():
    assert "first.weight no gradient" in printed("gradient_of_another_head", 4), MENDED


@pytest.mark.nightly  # the first proof below is of the same script
def test_groups_of_generators():
    assert len({text.split()[-1] for text in printed("groups_of_generators", 2).splitlines()}) == 1, MENDED


@pytest.mark.nightly
def test_accumulated_norm():
    assert norms(printed("accumulated_norm", 1, "--tp", "1")) == pytest.approx([0.003764, 0.004365, 0.004415], rel=2e-3)
    broken = norms(printed("accumulated_norm", 2))
    assert broken == pytest.approx([0.006623, 0.005326, 0.006582], rel=2e-3), MENDED


@pytest.mark.nightly
def test_rows_of_another_weight():
    assert "are others" not in printed("rows_of_another_weight", 1, "--tp", "1")
    assert "q_proj.weight: 32 of 32 rows are others" in printed("rows_of_another_weight", 2), MENDED


@pytest.mark.nightly
def test_saved_module_is_not_trained():
    assert printed("saved_module_is_not_trained", 1, "--tp", "1").count("True") == 3
    assert printed("saved_module_is_not_trained", 2).count("False") == 6, MENDED


@pytest.mark.nightly
def test_predivided():
    right, broken = (norms(printed("predivided", 2, "--stage", stage)) for stage in ("2", "3"))
    assert right[0] / broken[0] == pytest.approx(2, rel=1e-3), MENDED


@pytest.mark.nightly
def test_untied_by_moving():
    assert float(printed("untied_by_moving", 1).split()[-1]) > 0.01, MENDED
    found = findings("untied_by_moving", "--base float32", ("ranks=1 move=0", "ranks=1 move=1"), double=False)
    assert {finding.what for finding in found} == {"parameters after the step"}


@pytest.mark.nightly
def test_clipped_by_the_first_stage():
    assert norms(printed("clipped_by_the_first_stage", 2, "--zero", "1")) == pytest.approx([0.1] * 3, rel=1e-3)
    broken = norms(printed("clipped_by_the_first_stage", 2))
    assert broken == pytest.approx([0.204514, 0.248609, 0.247491], rel=2e-3), MENDED


def findings(name: str, options: str, layouts: tuple[str, ...], double: bool) -> tuple:
    """What a proof of the reproduction finds; a layout's values go to the options that the script has."""
    script = FOUND / f"{name}.py"
    text, keys = script.read_text(encoding="utf-8"), [word.partition("=")[0] for word in layouts[0].split()]
    given = [word for key in keys if f'"--{key}"' in text for word in (f"--{key}", f"{{{key}}}")]
    return prove.script([str(script), *options.split(), *given], layouts, double=double).findings


TP = ("ranks=1 tp=1", "ranks=2 tp=2")
LOSSES = ("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss")
#: Engines and layers that refuse fp64.
FP32 = (
    "column_of_a_transposed_input", "times_the_sequence_ranks", "tiled_loss_is_not_scaled", "tiled_loss_and_another",
    "fewer_tiles",
)  # fmt: skip
#: Of each proof the reproduction, its options, the layouts, and what is found: the layout's place, the cause, the
#: factor, and patterns of the parameters' names in their order. None: whatever it is.
PROOFS = [
    ("groups_of_generators", "", ("ranks=1 groups=generators", "ranks=2 groups=lists", "ranks=2 groups=generators"),
     [(2, "no-gradient", None, None)]),
    ("frozen_norm_is_trained", "", TP, [(1, "frozen", None, ("0.bias", "0.weight"))]),
    ("divided_twice", "", ("ranks=1 shards=1", "ranks=4 shards=2", "ranks=4 shards=1"),
     [(2, "mean-for-sum", 1 / 4, None)]),
    ("gradient_of_another_head", "",
     ("ranks=1 late=all_reduce", "ranks=4 late=gradient_sync", "ranks=4 late=all_reduce"),
     [(2, None, None, (f"{head}.bias", f"{head}.weight")) for head in ("first", "second")]),
    ("loss_of_a_sharded_tensor", "--loss l1_loss", ("ranks=1", "ranks=2"), []),
    *(("loss_of_a_sharded_tensor", f"--loss {loss}", ("ranks=1", "ranks=2"), [(1, "sum-for-mean", 2, None)])
      for loss in LOSSES),
    ("classifier_times_micro_batches", "",
     ("ranks=1 batch=8 accumulate=1", "ranks=1 batch=2 accumulate=4", "ranks=2 batch=4 accumulate=1"),
     [(1, "accumulation-not-divided", 4, None), (2, "sum-for-mean", 2, None)]),
    ("accumulated_norm", "", TP, [(1, "summed-again", None, ("*",) * 2)]),
    ("not_in_the_plan", "--model Glm4Moe", TP, [(1, "not-summed", None, ("*k_norm*", "*q_norm*"))]),
    ("not_in_the_plan", "--model Apertus", TP, [(1, "not-summed", None, ("*alpha_n*", "*alpha_p*"))]),
    ("rows_of_another_weight", "", TP, [(1, "initial-parameters", None, ("*",) * 24)]),
    ("labels_are_not_shifted", "--model llama", ("ranks=1 smoothing=0", "ranks=1 smoothing=1e-12"), []),
    ("labels_are_not_shifted", "--model llava", ("ranks=1 smoothing=0", "ranks=1 smoothing=1e-12"),
     [(1, None, None, None)]),
    ("z_loss_of_one_rank", "--padded 0", TP, []),
    ("z_loss_of_one_rank", "--padded 3", TP, [(1, None, None, ("moe.router.weight",))]),
    ("experts_of_one_rank", "",
     ("ranks=1 tp=1 etp=1", "ranks=2 tp=2 etp=2", "ranks=2 tp=2 etp=1", "ranks=2 tp=1 etp=2"),
     [(2, "not-summed", None, ("*.experts.*",) * 4), (3, "parts-mixed", None, ("*.experts.*",) * 4)]),
    ("labels_under_fsdp2", "", ("ranks=1 fsdp=1 batch=8", "ranks=2 fsdp=1 batch=4", "ranks=2 fsdp=2 batch=4"),
     [(2, "loss", None, None)]),
    ("tokens_of_one_rank", "", ("ranks=1 tp=1 average=0", "ranks=2 tp=2 average=1", "ranks=2 tp=2 average=0"),
     [(2, "sum-for-mean", 2, None)]),
    ("column_of_a_transposed_input", "", ("ranks=1 tp=1 copy=0", "ranks=2 tp=2 copy=1", "ranks=2 tp=2 copy=0"),
     [(2, "not-summed", None, ("0.bias", "0.weight"))]),
    ("times_the_sequence_ranks", "", ("ranks=1 sp=1 stage=2", "ranks=2 sp=2 stage=3", "ranks=2 sp=2 stage=2"),
     [(2, "sum-for-mean", 2, None)]),
    ("tiled_loss_is_not_scaled", "",
     ("ranks=1 accumulate=2 tiles=0", "ranks=1 accumulate=1 tiles=4", "ranks=1 accumulate=2 tiles=4"),
     [(2, "accumulation-not-divided", 2, ("1.weight",))]),
    ("tiled_loss_and_another", "",
     ("ranks=1 tiles=1 reduction=mean", "ranks=1 tiles=4 reduction=sum", "ranks=1 tiles=4 reduction=mean"),
     [(2, None, None, None)]),
    ("fewer_tiles", "",
     ("ranks=1 tiles=0 stage=0", "ranks=2 tiles=3 stage=2", "ranks=2 tiles=4 stage=0", "ranks=2 tiles=4 stage=2"),
     [(3, None, None, ("1.weight", "2.weight"))]),
    ("norm_of_compressed_queries", "", TP, [(1, "sum-for-mean", None, None)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "layouts", "expected"), few(PROOFS))
def test_the_layouts_that_are_wrong(name, options, layouts, expected):
    found = findings(name, options, layouts, double=name not in FP32)
    assert [finding.layout for finding in found] == [layouts[place] for place, *_ in expected], MENDED
    for finding, (_, cause, factor, patterns) in zip(found, expected, strict=True):
        assert cause in (None, finding.cause)
        assert factor is None or finding.factor == pytest.approx(factor, rel=1e-3)
        assert finding.what == "gradients" or cause in ("initial-parameters", "no-gradient", "frozen")
        assert patterns is None or len(finding.parameters) == len(patterns)
        assert all(map(fnmatch.fnmatchcase, finding.parameters, patterns or ()))


def test_the_page_and_the_readme_count_its_entries():
    entries = re.findall(r"^\| \*\*`.* \| ([^|]+) \|[^|]*\|$", PAGE, re.MULTILINE)
    known = sum(reported.startswith("yes") for reported in entries)
    assert f"There are {len(entries)} entries." in PAGE
    assert f"of the other {len(entries) - known} no report was found" in PAGE
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"[found](docs/records/found.md) {len(entries)} silent bugs" in readme
    assert f"of {len(entries) - known} no report was found" in readme
