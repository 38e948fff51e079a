"""The fine-tune against the plain way: same Trainer, model, data, ranks, steps and precision.

Plain: batches in random order padded to the longest, logits everywhere, gradient checkpointing, as the article's tool
had it, and attention by one call of torch's kernel, as Transformers' models have it. Ours: samples grouped by length,
logits only where there is a label, scores only where a key is seen, and no recomputation where memory allows.

Of these, logits, scores and recomputation change nothing but rounding: with the plain order of samples the final loss
in fp32 is to be the plain one, no lower and no higher. In bf16 training makes some percent of rounding, either way, and
another order is another training: those losses are rows that inform.

The samples are of one, two or three texts of the generated news, as lengths are mixed in the article's data: a post of
LCSTS has about 100 characters, an abstract of CSL 158 to 270. Where all lengths are alike, as in the generated corpus
itself, grouping has little to save and the ratio is below the target.

``matrices`` sets a step beside what it cannot do without: the products of its frozen matrices, forward and for the
gradients of their inputs, as fast as this machine makes them with nothing between them. Of the step itself a profile
says how much of its time all matrix products take, and how much attention's kernel; the rest is what is computed
element by element (norms, activations, casts), the exchange, the optimizer, the loader and Python.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from pardemo import World, headlines
from pardemo.bench import BenchRow, by_turns, compare

STEPS, ROUNDS = 100, 3
TOKENS = 1536  # about as many as a rank's step has; a product's rate does not depend on it
PROFILED = (20, 40)  # from the step of that number to the other's end
PARTS = {"products": ("aten::mm", "aten::bmm", "aten::addmm"), "attention": ("aten::_scaled_dot_product",)}
REST = {
    "operators": "torch's other operators, most of them element by element",
    "outside": "between operators: Python, the loader, the exchange, and the profile's own work",
}
IN_FP32 = ("train.precision=fp32", "train.max_steps=40", "train.eval_steps=40")
RANDOM_ORDER = "data.group_by_length=false"
KINDS = {
    "ours": (),
    "ours, in the plain order": (RANDOM_ORDER,),
    "plain": (
        RANDOM_ORDER,
        "train.loss_head=full",
        "train.attention=whole",
        "train.gradient_checkpointing=true",
    ),
}


def mixed(count: int, seed: int, kinds: Sequence[str] = ("seen",)) -> list[dict[str, str]]:
    """Rows whose input is one to three texts, and whose headline is the first one's."""
    chance, texts = Random(seed), list(headlines.generate(3 * count, seed, kinds))
    rows = []
    for i in range(count):
        parts = texts[3 * i : 3 * i + chance.choice((1, 1, 2, 3))]
        rows.append(parts[0] | {"input": "".join(part["input"] for part in parts)})
    return rows


def trained(values: dict) -> tuple[float, float]:
    """On a rank: seconds per real token over the steps after the first, and the loss on the validation file."""
    from pardemo.finetune.recipes import recipe
    from pardemo.finetune.training.logs import read_log
    from pardemo.finetune.training.train import train

    outcome = train(recipe.from_dict(values))
    rows = read_log(Path(outcome.run))
    rates = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row][2:]  # the first steps start things
    return 1 / median(rates), next(row["eval_loss"] for row in rows if "eval_loss" in row)


def shares(values: dict) -> dict[str, float]:
    """On a rank: of the time of a step, by a profile of some, each part of ``PARTS`` and of ``REST``; 1 together."""
    import time

    import torch
    from transformers import TrainerCallback

    from pardemo.finetune.recipes import recipe
    from pardemo.finetune.training.train import train

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


def final_loss(world: World, changes: Sequence[str], folder: Path) -> float:
    """Of the tiny recipe with these changes."""
    from pardemo.finetune.recipes import recipe

    job = recipe.override(recipe.load("tiny-cpu"), changes)
    loss = world.run(trained, recipe.to_dict(job), timeout_s=300)[0][1]
    shutil.rmtree(folder / "run")
    return loss


def products(tokens: int, rounds: int) -> list[float]:
    """On a rank: seconds per token, in each round, of all layers' products in bf16: x·Wᵀ, and dy·W for the gradient.

    Without attention's own products, the head's (few tokens have a label) and the adapters' (of rank 8).
    """
    import torch

    from pardemo.finetune.tiny import SIZES

    h, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    weights = [torch.randn(*shape).bfloat16() for shape in ((3 * h, h), (h, h), (inner, h), (inner, h), (h, inner))]
    inputs = [torch.randn(tokens, weight.shape[1]).bfloat16() for weight in weights]
    gradients = [torch.randn(tokens, weight.shape[0]).bfloat16() for weight in weights]

    def layer() -> None:
        for x, dy, weight in zip(inputs, gradients, weights, strict=True):
            torch.nn.functional.linear(x, weight)
            dy @ weight

    seconds = by_turns({"layer": layer}, rounds, warm=2)["layer"]
    return [SIZES["num_hidden_layers"] * each / tokens for each in seconds]


def rows() -> list[BenchRow]:
    from pardemo.finetune.recipes import recipe
    from pardemo.finetune.training.launch import PRELOAD

    folder = Path(tempfile.mkdtemp(prefix="pardemo-bench-"))
    # the validation has kinds that training lacks: of the others the loss goes to nothing, and 1 % of nothing is noise
    for name, found in (("train", mixed(STEPS * 16, 1)), ("valid", mixed(160, 2, ("seen", "unseen")))):
        (folder / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    common = [
        f"data.train={folder / 'train.json'}", f"data.valid={folder / 'valid.json'}", "data.cutoff_len=512",
        f"train.eval_steps={STEPS}", f"train.max_steps={STEPS}", "train.save_steps=null", "train.precision=bf16",
        f"output_dir={folder / 'run'}",
    ]  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    try:
        with World(2, preload=PRELOAD) as world:
            for seed in range(ROUNDS):  # of the adapter's weights and of the order
                for name, changes in KINDS.items():
                    job = recipe.override(recipe.load("tiny-cpu"), [*common, *changes, f"train.seed={seed}"])
                    ranks = world.run(trained, recipe.to_dict(job), timeout_s=300)
                    times[name].append(max(seconds for seconds, _ in ranks))
                    losses[name].append(ranks[0][1])
                    shutil.rmtree(folder / "run")
            exact = {
                name: final_loss(world, [*common, *KINDS[name], *IN_FP32], folder) for name in KINDS if name != "ours"
            }
            job = recipe.override(recipe.load("tiny-cpu"), [*common, f"train.max_steps={PROFILED[1]}"])
            of_ranks = world.run(shares, recipe.to_dict(job), timeout_s=300)
            at_once = [world.run(products, TOKENS, 9) for _ in range(ROUNDS)]  # on both ranks: each makes half
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peer = "random order, padded to the longest, whole attention, full logits, gradient checkpointing"
    matrices = [max(median(of_rank) for of_rank in ranks) / len(ranks) for ranks in at_once]
    same_order, plain = losses["ours, in the plain order"], losses["plain"]
    alike, whole = ([exact[name]] for name in ("ours, in the plain order", "plain"))
    return [
        compare("finetune.per_token", times["ours"], times["plain"], "s", 2.5, peer),
        # 1e-4: some hundred times what fp32's rounding leaves after so few steps
        compare("finetune.loss.fp32", alike, whole, "nats", 1.0, "the same batches: the final loss", within=1e-4),
        compare("finetune.loss", same_order, plain, "nats", None, "the same batches in bf16: the final loss"),
        compare("finetune.order", losses["ours"], plain, "nats", None, "random order: the final loss"),
        compare("finetune.matrices", times["ours"], matrices, "s", None, "the frozen matrices' products alone"),
        *(
            compare(
                f"finetune.step.{part}",
                times["ours"],
                [median(of[part] for of in of_ranks) * each for each in times["ours"]],
                "s",
                None,
                f"of the step, by a profile: {told}",
            )
            for part, told in ({part: part for part in PARTS} | REST).items()
        ),
    ]
