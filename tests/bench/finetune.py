"""The fine-tune against the plain way, generation by batches of like length, and the loss where there is a label."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch
from tiny_model import SIZES

from bench.table import BenchRow, by_turns, compare, slowest
from pardemo import World, headlines
from pardemo.baichuan2.head import NormHead, cross_entropy, label_loss
from pardemo.finetune import predict, recipe
from pardemo.finetune.launch import PRELOAD
from pardemo.meters import MemoryMeter

STEPS, ROUNDS = 100, 3
PROFILED = (20, 40)  # from the step of that number to the other's end
PARTS = {"products": ("aten::mm", "aten::bmm", "aten::addmm"), "attention": ("aten::_scaled_dot_product",)}
REST = {
    "operators": "torch's other operators, most of them element by element",
    "outside": "between operators: Python, the loader, the exchange, and the profile's own work",
}
IN_FP32 = ("train.bf16=false", "train.max_steps=40", "train.eval_steps=40")
RANDOM_ORDER = "data.group_by_length=false"
PLAIN = (RANDOM_ORDER, "model.loss_head=full", "model.attention=whole", "train.activation_checkpointing=true")
KINDS = {"ours": (), "same order": (RANDOM_ORDER,), "plain": PLAIN}


def finetune() -> Iterator[BenchRow]:
    """The fine-tune against the plain way: same Trainer, model, data, ranks, steps and precision.

    Plain: batches in random order padded to the longest, logits everywhere, gradient checkpointing, as the article's
    tool had it, and attention by one call of torch's kernel, as Transformers' models have it. Ours: samples grouped by
    length, logits only where there is a label, scores only where a key is seen, and no recomputation where memory
    allows.

    Of these, logits, scores and recomputation change nothing but rounding: with the plain order of samples the final
    loss in fp32 is to be the plain one, no lower and no higher. In bf16 training makes some percent of rounding, either
    way, and another order is another training: those losses are rows that inform.

    ``matrices`` sets a step beside what it cannot do without: the products of its frozen matrices, forward and for the
    gradients of their inputs, as fast as this machine makes them with nothing between them. Of the step itself a
    profile says how much of its time all matrix products take, and how much attention's kernel.
    """
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory(prefix="pardemo-bench-") as name, World(2, preload=[*PRELOAD, __name__]) as world:
        folder = Path(name)
        # the validation has kinds that training lacks: of the others the loss goes to nothing, and 1 % of it is noise
        for file, rows in (("train", mixed(STEPS * 16, 1)), ("valid", mixed(160, 2, ("seen", "unseen")))):
            (folder / f"{file}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        common = [
            f"data.train={folder / 'train.json'}", f"data.valid={folder / 'valid.json'}", "data.cutoff_len=512",
            f"train.eval_steps={STEPS}", f"train.max_steps={STEPS}", "train.save_steps=null", "train.bf16=true",
            f"output_dir={folder / 'run'}",
        ]  # fmt: skip

        def run(function, *changes: str) -> list:
            """What the function returns on each rank, of the tiny recipe with these changes."""
            job = recipe.override(recipe.load("tiny-cpu"), [*common, *changes])
            results = world.run(function, recipe.to_dict(job), timeout_s=300)
            shutil.rmtree(folder / "run")
            return results

        for seed in range(ROUNDS):  # of the adapter's weights and of the order
            for kind, changes in KINDS.items():
                ranks = run(trained, *changes, f"train.seed={seed}")
                times[kind].append(max(seconds for seconds, _ in ranks))
                losses[kind].append(ranks[0][1])
        same, whole = ([run(trained, *KINDS[kind], *IN_FP32)[0][1]] for kind in ("same order", "plain"))
        profiles = run(shares, f"train.max_steps={PROFILED[1]}")
        at_once = [world.run(matrices, rounds=9) for _ in range(ROUNDS)]  # on both ranks: each makes half
    peer = "random order, padded to the longest, whole attention, full logits, gradient checkpointing"
    yield compare("finetune.per_token", times["ours"], times["plain"], "s", 2.5, peer)
    # 1e-4: some hundred times what fp32's rounding leaves after so few steps
    yield compare("finetune.loss.fp32", same, whole, "nats", 1.0, "the same batches: the final loss", within=1e-4)
    note = "the same batches in bf16: the final loss"
    yield compare("finetune.loss", losses["same order"], losses["plain"], "nats", None, note)
    yield compare("finetune.order", losses["ours"], losses["plain"], "nats", None, "random order: the final loss")
    halves = [max(median(of_rank["layer"]) for of_rank in ranks) / len(ranks) for ranks in at_once]
    yield compare("finetune.matrices", times["ours"], halves, "s", None, "the frozen matrices' products alone")
    for part, what in ({part: part for part in PARTS} | REST).items():
        share = median(of_rank[part] for of_rank in profiles)
        of_step = [share * each for each in times["ours"]]
        note = f"of the step, by a profile: {what}"
        yield compare(f"finetune.step.{part}", times["ours"], of_step, "s", None, note)


def mixed(count: int, seed: int, kinds: Sequence[str] = ("seen",)) -> list[dict[str, str]]:
    """Rows whose input is one to three texts of the generated news, and whose headline is the first one's.

    As lengths are mixed in the article's data: a post of LCSTS has about 100 characters, an abstract of CSL 158 to 270.
    Where all lengths are alike grouping has little to save, and the ratio is below the target.
    """
    chance, texts = Random(seed), list(headlines.generate(3 * count, seed, kinds))
    sizes = [chance.choice((1, 1, 2, 3)) for _ in range(count)]
    return [_joined(texts[3 * i : 3 * i + size]) for i, size in enumerate(sizes)]


def _joined(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    return rows[0] | {"input": "".join(row["input"] for row in rows)}


def trained(values: dict) -> tuple[float, float]:
    """On a rank: seconds per real token over the steps after the first, and the loss on the validation file."""
    from pardemo.finetune.logs import read_log
    from pardemo.finetune.train import train

    outcome = train(recipe.from_dict(values))
    rows = read_log(Path(outcome.run))
    rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row][2:]  # the first steps start things
    return 1 / median(rates), next(row["eval_loss"] for row in rows if "eval_loss" in row)


def shares(values: dict) -> dict[str, float]:
    """On a rank: of the time of a step, by a profile of some, each part of ``PARTS`` and of ``REST``; 1 together."""
    from transformers import TrainerCallback

    from pardemo.finetune.train import train

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    begin, end = PROFILED
    at_s = {}

    class Profiled(TrainerCallback):
        def on_step_begin(self, arguments, state, control, **kwargs):
            if state.global_step == begin:
                profile.__enter__()
                at_s[begin] = time.perf_counter()

        def on_step_end(self, arguments, state, control, **kwargs):
            if state.global_step == end:
                at_s[end] = time.perf_counter()
                profile.__exit__(None, None, None)

    train(recipe.from_dict(values), callbacks=[Profiled()])
    microseconds = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    whole = 1e6 * (at_s[end] - at_s[begin])
    made = {
        part: sum(spent for key, spent in microseconds.items() if any(name in key for name in names)) / whole
        for part, names in PARTS.items()
    }
    operators = sum(spent for key, spent in microseconds.items() if key.startswith("aten::")) / whole
    return {**made, "operators": operators - sum(made.values()), "outside": 1 - operators}


def matrices(rounds: int) -> dict[str, list[float]]:
    """On a rank: seconds per token, in each round, of all layers' products in bf16: x·Wᵀ, and dy·W for the gradient.

    Without attention's own products, the head's (few tokens have a label) and the adapters' (of rank 8).
    """
    tokens = 1536  # about as many as a rank's step has; a product's rate does not depend on it
    h, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    weights = [torch.randn(*shape).bfloat16() for shape in ((3 * h, h), (h, h), (inner, h), (inner, h), (h, inner))]
    inputs = [torch.randn(tokens, weight.shape[1]).bfloat16() for weight in weights]
    gradients = [torch.randn(tokens, weight.shape[0]).bfloat16() for weight in weights]

    def layer() -> None:
        for x, dy, weight in zip(inputs, gradients, weights, strict=True):
            torch.nn.functional.linear(x, weight)
            dy @ weight

    seconds = by_turns({"layer": layer}, rounds, warm=2)["layer"]
    return {"layer": [SIZES["num_hidden_layers"] * each / tokens for each in seconds]}


def predicting() -> list[BenchRow]:
    """Generation for a file of prompts: batches of like length, dealt to the ranks, against the file's order.

    Prompts of one to five news texts, most of one as in CSL and LCSTS, in random order.
    """
    rows, chance = 192, Random(0)
    texts = [row | {"output": "", "source": "generated"} for row in headlines.generate(5 * rows, seed=7)]
    sizes = [chance.choice((1, 1, 1, 1, 1, 1, 2, 5)) for _ in range(rows)]
    prompts = [_joined(texts[5 * i : 5 * i + size]) for i, size in enumerate(sizes)]
    job = recipe.override(recipe.load("tiny-cpu"), ["predict.max_new_tokens=32"])
    times: dict[str, list[float]] = {"length": [], "file": []}
    answers: dict[str, list[str]] = {}
    with World(2, preload=["pardemo.finetune.predict"]) as world:
        for turn in range(ROUNDS + 1):
            for order in times:
                predictions = predict.predict_on(world, job, None, prompts, order=order, timeout_s=300)
                answers[order] = predictions.texts
                if turn:
                    times[order].append(predictions.seconds)
    if answers["length"] != answers["file"]:
        raise RuntimeError("the two orders gave different texts")
    return [compare("predict.file", times["length"], times["file"], "s", 2.0, "batches in the file's order")]


def loss_head() -> list[BenchRow]:
    """The loss with logits only where there is a label, against all logits: the real vocabulary, a tenth labelled."""
    with World(1) as world:
        measured = slowest(world.run(both_losses, 2, 256, 125_696))
    peer = "all logits, 2 × 256 × 125,696"
    return [
        compare("loss_head.time", measured["labelled"], measured["all"], "s", None, peer),
        compare("loss_head.peak", measured["labelled.peak"], measured["all.peak"], "B", None, peer),
    ]


def both_losses(batch: int, length: int, vocabulary: int) -> dict[str, list[float]]:
    """Seconds of both losses, forward and backward, and the peaks of their memory."""
    hidden_size, labelled = 512, 0.1
    torch.manual_seed(0)
    head = NormHead(hidden_size, vocabulary)
    torch.nn.init.normal_(head.weight, std=0.02)
    head.requires_grad_(False)  # as under LoRA
    hidden = torch.randn(batch, length, hidden_size).requires_grad_()
    labels = torch.randint(3, vocabulary, (batch, length))
    labels[:, : round(length * (1 - labelled))] = -100
    ways = {
        "labelled": lambda: label_loss(head, hidden, labels).backward(),
        "all": lambda: cross_entropy(head(hidden)[:, :-1], labels[:, 1:]).backward(),
    }
    measured = by_turns(ways, 5, warm=1)
    for name, way in ways.items():
        with MemoryMeter(head) as meter:
            way()
        measured[f"{name}.peak"] = [meter.peak_bytes - meter.baseline_bytes]
    return measured
