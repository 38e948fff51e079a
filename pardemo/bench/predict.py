"""Generation for a file of prompts: batches of like length, dealt to the ranks, against batches in the file's order."""

from random import Random

from pardemo import World, headlines
from pardemo.bench import BenchRow, compare

ROWS, RANKS, ROUNDS = 192, 2, 3


def mixed_rows() -> list[dict[str, str]]:
    """Prompts of one to five news texts, as long and short ones are mixed in real data, in random order."""
    chance = Random(0)
    texts = [row["input"] for row in headlines.generate(5 * ROWS, seed=7)]
    row = {"instruction": "", "output": "", "source": "generated"}
    sizes = [chance.choice((1, 1, 1, 1, 1, 1, 2, 5)) for _ in range(ROWS)]  # most are short, as in CSL and LCSTS
    return [row | {"input": "".join(texts[5 * i : 5 * i + size])} for i, size in enumerate(sizes)]


def rows() -> list[BenchRow]:
    from pardemo.finetune.prediction import predict
    from pardemo.finetune.recipes import recipe

    job = recipe.override(recipe.load("tiny-cpu"), ["predict.max_new_tokens=32"])
    prompts = mixed_rows()
    times: dict[str, list[float]] = {"length": [], "file": []}
    texts: dict[str, list[str]] = {}
    with World(RANKS, preload=["pardemo.finetune.prediction.predict"]) as world:
        for turn in range(ROUNDS + 1):
            for order in times:
                predictions = predict.predict_on(world, job, None, prompts, order=order, timeout_s=300)
                texts[order] = predictions.texts
                if turn:
                    times[order].append(predictions.seconds)
    if texts["length"] != texts["file"]:
        raise RuntimeError("the two orders gave different texts")
    return [compare("predict.file", times["length"], times["file"], "s", 2.0, "batches in the file's order")]
