"""Faults of the fine-tune: damaged checkpoints, a full disk.

The job is the article's in small: a random Baichuan2 of two layers, 96 generated headlines, six steps on two ranks.
"""

import json
import re
import resource
import shutil
from pathlib import Path

import torch
from tiny_model import train_tokenizer

from pardemo import RankError, headlines, project, signed_folders
from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer, save_checkpoint
from pardemo.finetune import checkpoints, recipe
from pardemo.finetune.launch import launch
from pardemo.finetune.recipe import Recipe
from pardemo.world import fork_server
from soak.case import Case, Lost, fault
from soak.common import damaged, small_disk

STEPS, EVERY = 6, 3
LAST, FIRST = f"checkpoint-{STEPS}", f"checkpoint-{EVERY}"
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


def _base(case: Case) -> Path:
    """Data, a model and a run that nothing disturbed: made once for all cases."""
    base, part = case.shared / "finetune", case.shared / "finetune.part"
    if not base.exists():
        shutil.rmtree(part, ignore_errors=True)  # of a case that was ended
        (part / "model").mkdir(parents=True)
        rows, _ = headlines.corpus(train=96, test=8)
        (part / "train.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        vocabulary = train_tokenizer([row["input"] + row["output"] for row in rows], 1400)
        (part / "model" / "tokenizer.model").write_bytes(vocabulary)
        tokenizer = Baichuan2Tokenizer(str(part / "model" / "tokenizer.model"))
        torch.manual_seed(0)
        config = Baichuan2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **SIZES)
        save_checkpoint(Baichuan2ForCausalLM(config), part / "model", tokenizer)
        launch(_job(part, part / "run"))
        part.rename(base)
    return base


def _job(base: Path, run: Path) -> Recipe:
    """The job, with its output in ``run``."""
    settings = [
        f"model.path={base / 'model'}", f"data.train={base / 'train.json'}", f"data.test={base / 'train.json'}",
        f"train.max_steps={STEPS}", f"train.save_steps={EVERY}", "train.logging_steps=1",
        "train.per_device_train_batch_size=4", "train.warmup_steps=0", f"output_dir={run}",
    ]  # fmt: skip
    return recipe.override(recipe.load("tiny-cpu"), settings)


def _check_weights(case: Case, base: Path, run: Path) -> None:
    one, other = ((at / "adapter" / "adapter_model.safetensors").read_bytes() for at in (run, base / "run"))
    case.expect(one == other, "the weights are not those of the undisturbed run")


def _goes_on(case: Case, base: Path, run: Path) -> str:
    """Resumes a run to its end: from its newest whole checkpoint, and to the weights of the undisturbed one.

    Half a checkpoint and no whole one is refused, and ``overwrite`` begins anew, as the refusal says.
    """
    # not as resume itself looks for it: the signature is written last
    sealed = [path.parent.name for path in run.glob(f"checkpoint-*/{signed_folders.SIGNATURE}")]
    half = [path.name for path in run.glob("checkpoint-*")] if not sealed else []
    if half:
        due = (
            rf"no checkpoint that can be read \({half[0]} is passed over: it was never finished\): --overwrite removes"
        )
        told = _outcome(_job(base, run), resume=True)
        case.expect(re.search(due, told), f"half a checkpoint is told as: {told or 'nothing, and gone on from'}")
    try:
        result = launch(_job(base, run), resume=not half, overwrite=bool(half))
    except ValueError as error:
        raise Lost(f"whole checkpoints are {sealed}, and none is gone on from: {error}") from None
    expected = max(sealed, key=lambda name: int(name.removeprefix("checkpoint-")), default=None)
    case.keeps(result.resumed_from == expected, f"resumed from {result.resumed_from}, the newest is {expected}")
    _check_weights(case, base, run)
    return f"resumed from {expected}"


DAMAGES = ("truncated", "changed", "missing", "one more file", "the first save cut off")


@fault("finetune/damaged", DAMAGES, weight=2)
def _damaged(case: Case) -> str:
    """A file of the newest checkpoint is damaged: the run says which, and goes on from the checkpoint before."""
    base, run = _base(case), case.folder / "run"
    if case.way == "the first save cut off":
        shutil.copytree(base / "run" / FIRST, run / FIRST)
        for path in (run / FIRST / signed_folders.SIGNATURE, case.rng.choice(sorted((run / FIRST).glob("*.*")))):
            path.unlink(missing_ok=True)
        return _goes_on(case, base, run)
    shutil.copytree(base / "run", run)
    path = case.rng.choice(sorted(path for path in (run / LAST).rglob("*") if path.is_file()))
    if case.way == "one more file":
        path = shutil.copy(path, run / LAST / "more.pt")
    damaged(case, path)
    name = path.relative_to(run / LAST).as_posix()
    result = launch(_job(base, run), resume=True)
    told = " ".join(result.notes)
    sealed = name == signed_folders.SIGNATURE
    says = (name,) if not sealed else ("signature", "never finished", "another user", "not what was written", "missing")
    if result.resumed_from == LAST and sealed and case.way == "changed":
        return "what the signature says has not changed"
    case.expect(result.resumed_from == FIRST, f"resumed from {result.resumed_from} in spite of {name}")
    case.expect(any(word in told for word in says), f"{name} {case.way} is told as: {told}")
    _check_weights(case, base, run)
    return told


def _outcome(job: Recipe, resume: bool) -> str:
    """Trains; empty where it did, else the first line of the error."""
    try:
        launch(job, resume=resume)
    except (RankError, OSError, ValueError) as error:
        return project.first_line(error)
    return ""


@fault("finetune/full disk", ("a small disk", "a limit of files"))
def _full_disk(case: Case) -> str:
    """The disk is full at some moment of the run: an error that says so; what was whole before stays, and is read."""
    base, run = _base(case), case.folder / "run"
    if case.way == "a limit of files":
        shutil.copytree(base / "run" / FIRST, run / FIRST)
        largest = max(path.stat().st_size for path in (run / FIRST).rglob("*"))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        _limit_files(int(largest * (0.2 + 0.7 * case.rng.random())), hard)
        told = _outcome(_job(base, run), resume=True)
        _limit_files(soft, hard)
        case.keeps(checkpoints.newest(run)[0] == run / FIRST, "the checkpoint from before")
    else:
        need = sum(path.stat().st_size for path in (base / "run").rglob("*") if path.is_file())
        with small_disk(case.folder / "disk", int(need * (0.1 + 0.6 * case.rng.random()))) as disk:
            told = _outcome(_job(base, disk / "run"), resume=False)
            newest = checkpoints.newest(disk / "run")[0] if (disk / "run").exists() else None
            if newest is not None:
                shutil.copytree(newest, run / newest.name)
    case.expect(re.search("could not be written|No space left|File too large", told), f"told as: {told or 'nothing'}")
    return f"{told}; {_goes_on(case, base, run)}"


def _limit_files(soft: int, hard: int) -> None:
    """For ranks to come: they have the limits of the processes that they are forked from."""
    for warm in fork_server.running():
        resource.prlimit(warm.pid, resource.RLIMIT_FSIZE, (soft, hard))
