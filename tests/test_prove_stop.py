"""A script that is stopped and resumed: what was not restored is named, and nothing is where all is."""

import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from conftest import few, says

from pardemo import cli, compat
from pardemo.script.compare import run_layouts, runs
from pardemo.script.compare.runs import ProveError
from pardemo.script.record.parameters import living_optimizers, noting_optimizers
from pardemo.script.record.rank_record import MicroBatch, RankRecord, Step
from pardemo.script.resume import judge, results, script_state, stops, trials

LAYOUT = ["--layout", "ranks=2 batch=4", "--"]
DDP = "tests/resumed/ddp.py --out {folder} --batch {batch}"


#: What the script forgets when it goes on. A run that is not resumed is the same without these.
ON_RESUMING = re.compile(r"--forget (?!half|whole|newest)\S+")


def stopped(flags="", layouts=("ranks=2 batch=4",), **options):
    options.setdefault("resume", f"{DDP} {flags}")
    return trials.stopped(f"{DDP} {ON_RESUMING.sub('', flags)}", list(layouts), **options)


@pytest.fixture(scope="module", autouse=True)
def undisturbed_runs_are_made_once(tmp_path_factory):
    """Tests that begin with the same line in the same layout share its undisturbed runs, the first and its repetition.

    Which of the two it is is the folder's name. A judge may cut a run's parameters: each test has a copy of its own.
    """
    record, made, folder = trials._recorded, {}, tmp_path_factory.mktemp("undisturbed")

    def recorded(layout, options, place, stop=None, saves=None):
        if stop is not None or saves is not None:
            return record(layout, options, place, stop, saves)
        key = (layout.ranks, layout.line, options, place.name)
        if key not in made:
            made[key] = record(layout, options, folder / str(len(made)))
        return copy.deepcopy(made[key])

    with compat.replaced(trials, "_recorded", recorded):
        yield


def causes(made):
    return {finding.cause for finding in made.findings}


def said(made):
    return " | ".join(finding.why for finding in made.findings)


def test_a_script_that_saves_all_loses_nothing_to_the_last_bit_however_it_is_stopped():
    made = stopped("--on-term --average", seed=3)
    assert made.equal, results.stops_screen(made)
    assert [trial.stop.kind for trial in made.trials] == ["rank", "all", "launcher", "save", "term"]
    assert all(trial.exact for trial in made.trials)
    assert made.saved == [2, 4, 6]
    assert [trial.in_save for trial in made.trials] == [False, False, False, True, False], "ranks wait for saves"
    for trial in made.trials:
        assert trial.begins is not None
        assert trial.begins >= trial.expected
    term = made.trials[-1]
    assert term.begins > term.stop.done, "it saves when it is told to end"
    assert term.lost == 0
    assert says(results.stops_screen(made), "nothing", "lost")


def test_it_goes_on_with_another_number_of_ranks():
    made = stopped(layouts=("ranks=2 batch=6", "ranks=1 batch=12", "ranks=4 batch=3"), stops=["all"])
    assert [trial.layout.ranks for trial in made.trials] == [2, 1, 4]
    assert made.trials[0].exact
    assert made.equal, results.stops_screen(made)
    assert all(trial.begins == trial.expected for trial in made.trials)


@pytest.mark.parametrize(
    ("flags", "cause", "words"),
    few(
        [
            ("--forget all", "begins-anew", "it begins anew: nothing of the save after step"),
            ("--forget second-moment", "optimizer-state", "the optimizer's second moment starts at zero"),
            ("--forget optimizer", "optimizer-state", "the optimizer's first moment starts at zero"),
            ("--forget count", "optimizer-state", "the optimizer's count of steps starts at zero"),
            ("--forget scheduler", "learning-rate", "behind: it begins anew"),
            ("--forget sampler", "data", "the sampler begins anew: "),
            ("--forget random", "random-state", "dropout draws other masks than without the stop"),
            ("--forget half", "precision", "they come back rounded to bf16"),
            ("--average --forget average", "not-restored", "what the script keeps beside the model is the one before"),
            ("--average --forget shadow", "not-restored", "the script's copy of the parameters is the one"),
            ("--forget head", "not-restored", "they are what a new run begins with"),
            ("--forget epoch", "data", "12 are missing, 12 in their place were trained on before the stop"),
            ("--forget steps", "data", "the sampler begins anew: "),
            ("--forget order", "data", "are there that none of these steps should have"),
            ("--forget ranks", "data", "ranks train on samples that others had"),
            ("--forget scaler --scaler", "loss-scale", "the GradScaler begins at 8 in place of 16"),
            ("--forget python --noise loss", "random-state", "; Python's generator, from which the run draws, is not "),
            (
                "--forget numpy --noise input",
                "data",
                "; numpy's generator, from which the run draws, is not where it was",
            ),
        ],
        0,
        3,
        7,
        8,
        9,
    ),
)
def test_what_is_not_restored_is_named(flags, cause, words):
    made = stopped(flags, stops=["all"], seed=1)
    assert cause in causes(made), results.stops_screen(made)
    assert words in said(made)
    if cause in ("random-state", "learning-rate") or "optimizer" not in flags:
        assert causes(made) == {cause}, "and nothing else is"


def test_random_numbers_that_are_no_dropouts_and_a_loss_scale_are_restored_to_the_last_bit():
    made = stopped("--noise loss --noise input --scaler", stops=["all"], seed=1)
    assert made.equal, results.stops_screen(made)
    assert made.trials[0].exact


def seed_of(kind, wanted, saved=(2, 4, 6)):
    """A seed whose stop of a kind is as a function wants it."""
    return next(seed for seed in range(999) if wanted(stops.draw_stops((kind,), 8, saved, {}, 2, seed)[0]))


def test_a_run_that_goes_on_from_an_older_save_is_told():
    seed = seed_of("all", lambda stop: stop.done in (4, 5))
    made = stopped("--forget newest", stops=["all"], seed=seed)
    assert causes(made) == {"older-save"}, results.stops_screen(made)
    assert said(made) == "it continues after step 2, and the last whole save is the one after step 4"


@pytest.mark.parametrize("ranks", few([2, 1]))
def test_a_run_that_is_over_too_early_is_told_though_the_undisturbed_one_goes_on(ranks):
    """Eight steps are recorded of eighteen; the line that resumes says one epoch, six steps, in place of three."""
    seed = seed_of("all", lambda stop: stop.done in (2, 3) and stop.moment != "step")
    own = [f"ranks={ranks} batch={8 // ranks}"] if ranks != 2 else []
    made = stopped(layouts=("ranks=2 batch=4", *own), resume=f"{DDP} --epochs 1", stops=["all"], seed=seed)
    assert causes(made) == {"ends-elsewhere"}, results.stops_screen(made)
    assert {finding.why for finding in made.trials[-1].findings} == {
        "the run is over at least 2 steps before the undisturbed one"
    }


@pytest.mark.nightly
def test_a_script_that_does_not_end_in_its_time_of_grace_is_killed_and_that_is_told():
    """Rank 0 saves with the others, and they know nothing of it: all wait until they are killed."""
    seed = seed_of("term", lambda stop: (stop.done, stop.moment) == (4, "step"))
    made = stopped("--on-term --alone", stops=["term"], seed=seed, grace_s=1)
    (trial,) = made.trials
    assert trial.overdue, results.stops_screen(made)
    assert says(" ".join(results.stops_screen(made).split()), "SIGTERM", "5", "1")
    assert (trial.begins, trial.lost) == (4, 1)
    assert made.equal


@pytest.mark.nightly
def test_a_launcher_that_fails_before_it_is_killed_says_why(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise OSError('address in use')\n")
    layout = run_layouts.RunLayout(2, {}, (str(script),))
    stop = stops.Stop("launcher", 3, "step", (0, 1))
    place = tmp_path / "place"
    place.mkdir()
    told = trials.run_and_kill(layout, runs.RunOptions(timeout_s=60), place, stop, tmp_path / "saves")
    assert told.startswith("before the stop, train.py: "), told
    assert "OSError: address in use" in told


def test_a_file_that_changes_behind_each_step_is_no_save():
    made = stopped("--log", stops=["all"], seed=1)
    assert made.equal, results.stops_screen(made)
    assert made.saved == [2, 4, 6]


@pytest.mark.nightly
def test_of_saves_that_another_thread_makes_nobody_knows_which_is_whole():
    made = stopped("--thread 0 --epochs 6", stops=["all"], seed=1, steps=16)
    assert not made.findings, results.stops_screen(made)
    assert made.trials[0].asynchronous
    late = results.Trial(made.trials[0].stop, made.layout, 4, True, begins=0)
    assert trials._resumes_elsewhere(late)
    assert says(late.error, "perhaps", "whole")
    assert not late.findings


@pytest.mark.nightly
def test_a_save_that_the_others_do_not_wait_for_is_cut_off_by_a_rank_that_is_killed():
    def is_drawn(stop):
        return (stop.ranks, stop.done, stop.moment) == ((1,), 6, "forward")

    seed = next(seed for seed in range(999) if is_drawn(stops.draw_stops(("rank",), 8, [3, 6], {}, 2, seed)[0]))
    made = stopped("--slow 2 --every 3", stops=["rank"], seed=seed)
    assert made.equal, results.stops_screen(made)
    (trial,) = made.trials
    assert (trial.in_save, trial.expected, trial.begins) == (True, 3, 3)
    assert says(trial.name, "SIGKILL", "1", "7")


@pytest.mark.nightly
def test_a_save_that_was_cut_off_and_is_the_only_one_says_nothing():
    def is_drawn(stop):
        return (stop.ranks, stop.done, stop.moment) == ((1,), 3, "forward")

    seed = next(seed for seed in range(999) if is_drawn(stops.draw_stops(("rank",), 8, [3, 6], {}, 2, seed)[0]))
    made = stopped("--slow 2 --every 3 --forget all", stops=["rank"], seed=seed)
    assert not made.equal
    assert made.trials[0].error == "it cut off the only save: there is nothing to go back to"


def test_parameters_that_training_hardly_moves_are_compared_bit_by_bit():
    """Of what is not restored nothing is seen within the tolerance."""
    made = stopped("--forget head --lr 1e-6", stops=["all"], seed=1)
    assert "not-restored" in causes(made), results.stops_screen(made)
    assert says(said(made), "begins")


def test_states_of_another_form_than_their_parameters():
    """Adafactor keeps sums of rows and of columns."""
    made = stopped("--optimizer Adafactor", ("ranks=2 batch=6", "ranks=1 batch=12"), stops=["all"])
    assert made.equal, results.stops_screen(made)


def test_optimizers_that_are_read_from_a_file_are_known_once():
    model, file = torch.nn.Linear(2, 2), io.BytesIO()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer, file)
    file.seek(0)
    noted, own = [], torch.optim.Optimizer
    with compat.replaced(own, "__setstate__", noting_optimizers(own.__setstate__, noted)):
        read = torch.load(file, weights_only=False)
        read.load_state_dict(read.state_dict())
    found = list(script_state.optimizer_states(living_optimizers(noted), {}))
    assert [name for name, slot, _ in found if slot == "exp_avg"] == ["optimizer 0.0.0", "optimizer 0.0.1"]


def test_a_run_that_ends_otherwise_than_by_its_stop_is_not_judged():
    stop, other = (stops.Stop(kind, 3, "step", (0, 1)) for kind in ("all", "term"))
    layout = run_layouts.RunLayout(2, {}, ("train.py",))
    steps = [Step() for _ in range(8)]
    whole = runs.Run(layout, [RankRecord(rank, "end", steps, [], [], []) for rank in range(2)])
    ended = runs.Run(layout, [], "train.py: rank 0 raised OSError: address in use")
    assert trials._not_stopped(stop, ended, True, whole) == ""
    assert trials._not_stopped(stop, ended, False, whole) == f"before the stop, {ended.error}"
    assert trials._not_stopped(stop, whole, False, whole) == stops.NEVER
    assert says(trials._not_stopped(other, whole, True, whole), "went")


def test_kinds_of_which_no_stop_can_be_drawn():
    with pytest.raises(ProveError, match="--stops"):
        stopped("--every 6", stops=["save"])


def test_a_save_that_is_not_whole_is_lost_and_one_that_is_replaced_at_once_is_not():
    """Somewhere in the first half of a save by torch.save itself: its file is there, and is not whole."""
    found = [stopped("--forget whole", stops=["save"], seed=seed) for seed in range(4)]
    assert any("cannot-resume" in causes(made) for made in found), [results.stops_screen(made) for made in found]
    for made in found:
        assert causes(made) <= {"cannot-resume"}


# --- the stream of samples


def test_the_stream_of_samples():
    epoch = [Counter("ab"), Counter("cd"), Counter("ef"), Counter("gh")]
    assert judge.samples_difference(epoch, epoch[2:], 2) == ("", 0)
    assert says(judge.samples_difference(epoch, epoch[3:], 2)[0], "2", "samples", "3", "3", "2")
    assert "the samples of 1 step, 2 of them, are left out" in judge.samples_difference(epoch, epoch[2:], 1)[0]
    assert "begins anew: 4 samples" in judge.samples_difference(epoch, epoch, 2)[0]
    assert "1 step before come again, 2 of them" in judge.samples_difference(epoch, epoch[1:], 2)[0]
    swapped = [Counter("gh"), Counter("ef")]
    assert "in another order from step 3 on" in judge.samples_difference(epoch, swapped, 2)[0]
    mixed = [Counter("ea"), Counter("gh")]
    told, since = judge.samples_difference(epoch, mixed, 2)
    assert told == "of the 4 samples of steps 3 to 4 1 are missing, 1 in their place were trained on before the stop"
    assert since == 2


def test_samples_that_other_ranks_have_or_that_come_in_another_order():
    def run(*ranks):
        records = [
            RankRecord(rank, "end", [Step([MicroBatch(list(samples), [])]) for samples in steps], [], [], [])
            for rank, steps in enumerate(ranks)
        ]
        return runs.Run(run_layouts.RunLayout(2, {}, ("train.py",)), records)

    first = run(("ab", "cd", "ef"), ("gh", "ij", "kl"))
    assert judge.ranks_difference(first, run(("cd", "ef"), ("ij", "kl")), 1) == ("", 0)
    assert judge.ranks_difference(first, run(("cd", "kl"), ("ij", "ef")), 1) == (
        "from step 3 on ranks train on samples that others had", 2)  # fmt: skip
    assert judge.ranks_difference(first, run(("cd", "ef"), ("ji", "kl")), 1) == (
        "rank 1 has its samples of step 2 in another order", 1)  # fmt: skip


def test_activations_are_no_samples():
    first, later = Step([MicroBatch(["a", "b"], "", [])]), Step([MicroBatch(["c", "d"], "", [], activations=True)])
    layout = run_layouts.RunLayout(2, {}, ("train.py",))
    records = [RankRecord(rank, "end", [step], [], [], []) for rank, step in enumerate((first, later))]
    assert judge.samples_by_step(runs.Run(layout, records)) == [Counter("ab")]
    wanted = [RankRecord(rank, "end", [later], [], [], []) for rank in range(2)]
    assert judge.samples_by_step(runs.Run(layout, wanted)) == [Counter("ccdd")], (
        "samples of which a script wants gradients"
    )


def test_ranks_that_share_samples_are_no_repetition():
    epoch = [Counter("ab"), Counter("cd")]
    assert judge.samples_difference(epoch, [Counter("ccdd")], 1) == ("", 0)
    assert judge.samples_difference(epoch, [Counter("ccd")], 1)[0]


# --- stops


def test_stops_are_drawn_alike_from_one_seed_and_behind_a_save():
    saves = {2: [0.1], 4: [0.1, 0.2], 6: [0.1]}
    first = stops.draw_stops(tuple(stops.KINDS), 8, [2, 4, 6], saves, 3, 5)
    assert first == stops.draw_stops(tuple(stops.KINDS), 8, [2, 4, 6], saves, 3, 5)
    assert first != stops.draw_stops(tuple(stops.KINDS), 8, [2, 4, 6], saves, 3, 6)
    for seed in range(50):
        for one in stops.draw_stops(tuple(stops.KINDS), 8, [2, 4, 6], saves, 3, seed):
            assert 2 <= one.done <= 6
            assert one.kind != "save" or one.done in (4, 6), "there is an earlier one to go back to"


def test_nothing_that_could_be_resumed():
    with pytest.raises(ValueError, match=r"7.*8.*--steps"):
        stops.draw_stops(("all",), 8, [7], {}, 2, 0)
    with pytest.raises(ValueError, match="nothing is written to"):
        stops.draw_stops(("all",), 8, [], {}, 2, 0)
    with pytest.raises(ProveError, match="nothing is written to"):
        stopped("--every 9", stops=["all"], steps=4)


# --- states


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (None, "starts at zero"),
        (torch.zeros(4), "starts at zero"),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), "is the one before step 1"),
        (torch.tensor([2.5, 3.125, 4.25, 1.125]), "has its numbers in other places"),
        (torch.tensor([9.0, 9.0, 9.0, 9.0]), "is another one"),
    ],
)
def test_how_a_state_is_wrong(own, words):
    wanted = torch.tensor([1.125, 2.5, 3.125, 4.25])
    steps = {0: [{"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}], 2: [{"w": wanted}]}
    ours = [{} if own is None else {"w": own}]
    exact, told = judge.compare_states("state.exp_avg", [{"w": wanted}], ours, steps.items, 2, 1e-4)
    assert not exact
    assert list(told) == [f"the optimizer's first moment {words}"]


def test_states_that_are_equal_to_rounding_or_to_the_last_bit():
    wanted = torch.tensor([1.0, 2.0])
    assert judge.compare_states("state.exp_avg", [{"w": wanted}], [{"w": wanted.clone()}], tuple, 0, 1e-4) == (True, {})
    assert judge.compare_states("state.exp_avg", [{"w": wanted}], [{"w": wanted + 1e-6}], tuple, 0, 1e-4) == (False, {})


# --- the command


def test_the_command_prints_what_was_lost_as_json(capsys):
    words = ["prove", "--stop", "--stops", "all", "--json", "--resume", f"{DDP} --forget second-moment",
             *LAYOUT, *DDP.split()]  # fmt: skip
    assert cli.main(words) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["equal"]
    assert printed["trials"][0]["kind"] == "all"
    assert printed["findings"][0]["cause"] == "optimizer-state"


@pytest.mark.nightly  # the gate ends measure so, in test_measure_bad_input.py
@pytest.mark.parametrize(
    ("kind", "number"), [("launcher", signal.SIGTERM), ("all", signal.SIGTERM), ("launcher", signal.SIGKILL)]
)
def test_a_command_that_ends_leaves_no_process_and_if_it_is_told_to_no_folder(kind, number, tmp_path):
    words = ["prove", "--stop", "--stops", kind, *LAYOUT, *DDP.split()]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with subprocess.Popen(
        [sys.executable, "-m", "pardemo", *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        until = time.monotonic() + 120
        while not list(tmp_path.glob("pardemo-prove-*/trial0/stopped/**/rank0*")) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.02)
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        error = process.communicate(timeout=60)[1].decode()
    assert psutil.wait_procs(below, timeout=120)[1] == []
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        return
    assert process.returncode == 128 + signal.SIGTERM
    assert error.splitlines()[-1] == "pardemo prove: ended by SIGTERM"
    assert not list(tmp_path.glob("pardemo-*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stop", *LAYOUT, "tests/resumed/ddp.py", "--batch", "{batch}"], "has no {folder}"),
        (["--stop", "--stops", "rank,all,sleep", *LAYOUT, *DDP.split()], "'sleep' is no kind"),
        (["--stop", *LAYOUT[:2]], "say the script behind --"),
        (["--stop", "--resume", "train.py", *LAYOUT, *DDP.split()], "--resume has no {folder}"),
        (["--stop", "--resume", "other.py {folder} {batch}", *LAYOUT, *DDP.split()], "there is no script other.py"),
        (["--stop", "--grace", "-1", *LAYOUT, *DDP.split()], "--grace must be 0 or above"),
        (["--stop", "--steps", "2", *LAYOUT, *DDP.split()], "--steps must be at least 3"),
        (["--stop", "--out", "there", *LAYOUT, *DDP.split()], "--out writes the page"),
        (["--seed", "1", *LAYOUT, "train.py"], "--seed says something about a stop"),
    ],
)  # fmt: skip
def test_bad_input(words, told, capsys):
    assert cli.main(["prove", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1


def test_a_file_says_the_script_and_the_line_that_resumes(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parent / "resumed" / "ddp.py"
    (tmp_path / "prove.toml").write_text(
        f'script = "{script} --out {{folder}} --forget all"\nresume = "{script} --out {{folder}}"\nsteps = 6\n'
        "[[layout]]\nranks = 2\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["prove", "--stop", "--stops", "all"]) == 0
    assert "nothing is lost" in capsys.readouterr().out


# --- frameworks


@pytest.mark.nightly
def test_zero_of_ours_goes_on_with_other_ranks_and_its_states_are_compared():
    made = trials.stopped("tests/resumed/own_zero.py --out {folder} --stage 3", ["ranks=2", "ranks=3"], stops=["all"])
    assert made.equal, results.stops_screen(made)
    assert [trial.exact for trial in made.trials] == [True, False]
    assert [trial.states for trial in made.trials] == [True, True], "those of DTensors say whose they are"


@pytest.mark.nightly
def test_what_is_lost_shows_on_other_ranks_too_by_the_states_or_by_their_step():
    line = "tests/resumed/own_zero.py --out {folder} --stage 1 --forget"
    flat = trials.stopped(line, ["ranks=2", "ranks=3"], stops=["all"])
    named = stopped("--forget second-moment", ("ranks=2 batch=6", "ranks=4 batch=3"), stops=["all"])
    for made in (flat, named):
        assert [{finding.cause for finding in trial.findings} for trial in made.trials] == [{"optimizer-state"}] * 2
    assert says(named.trials[1].findings[0].why, "second", "moment")
    assert not flat.trials[1].states


@pytest.mark.nightly
def test_fsdp2_goes_on_with_other_ranks_by_distributed_checkpoints():
    line = "tests/resumed/fsdp2.py --out {folder} --generators"
    made = trials.stopped(line, ["ranks=4", "ranks=2"], stops=["save"])
    assert made.equal, results.stops_screen(made)
    assert all(trial.begins in (trial.expected, trial.stop.done) for trial in made.trials)


@pytest.mark.nightly
def test_accelerate_in_one_process_repeats_samples_and_a_seedable_sampler_does_not():
    """The order of an epoch is drawn when the loader is asked for it, from a generator that has moved on (4071)."""
    line = "tests/resumed/accelerated.py --out {folder}"
    made = trials.stopped(line, ["ranks=1"], stops=["all"])
    assert causes(made) == {"data"}
    assert "are missing" in said(made)
    assert causes(trials.stopped(f"{line} --seedable", ["ranks=1"], stops=["all"])) == {"random-state"}
    # a loader that begins draws from the generator that load_state has just put back
    back = trials.stopped(f"{line} --seedable --generator-back", ["ranks=1"], stops=["all"])
    assert back.equal, results.stops_screen(back)
    assert back.trials[0].exact
