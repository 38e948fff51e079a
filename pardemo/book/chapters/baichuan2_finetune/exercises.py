"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch

from pardemo.book.page.exercises import Mistake, call, compare_tensors, exercise, formula


@formula(
    [([5] * prompt, [7] * answer, cutoff) for prompt, answer, cutoff in ((6, 4, 20), (60, 20, 40), (30, 31, 50))],
    "Only the answer is trained on, and a long sample loses both tails.",
    asked="two lists, input_ids and labels",
)
def check_labels(prompt: list[int], answer: list[int], cutoff: int):
    """input_ids and labels, both tails cut in proportion."""
    s, t = len(prompt), len(answer)
    if s + t > cutoff:
        s, t = cutoff * s // (s + t), cutoff * t // (s + t)
    ids = [5] * s + [7] * t
    return (ids, [-100] * s + [7] * t), [
        (lambda given: len(given[0]) != len(given[1]), "both need one length, and −100 is for no label"),
        (lambda given: given[0] == given[1], "the prompt is trained on too; its labels are −100"),
        (
            lambda given: given[0] != ids,
            f"{s} tokens of the prompt and {t} of the answer stay: each keeps its head, int(cutoff · part / total)",
        ),
        (lambda given: given[0] == ids, f"{t} positions have a label, those of the answer"),
    ]


def check_lora(function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor]) -> str:
    """``function(W, lora_A, lora_B, lora_alpha, r)`` is the merged weight."""
    generator = torch.Generator().manual_seed(0)
    for rank, alpha in ((1, 1.0), (2, 32.0), (3, 8.0), (8, 32.0)):
        w, a, b = (torch.randn(*s, generator=generator) for s in ((12, 6), (rank, 6), (12, rank)))
        given = {"W": w.clone(), "lora_A": a.clone(), "lora_B": b.clone()}
        merged = call(function, *given.values(), alpha, rank)
        for name, before in zip(given, (w, a, b), strict=True):
            if not torch.equal(given[name], before):
                raise Mistake(f"{name} itself was changed: return a new tensor, it may be needed again.")
        scale = f"the scale is missing: with lora_alpha = {alpha:g} and r = {rank} LoRA counts {alpha / rank:g} times."
        otherwise = "it should return W + (lora_alpha/r)·lora_B·lora_A, where lora_B·lora_A is [out, in]"
        # elements reach 50, and a sum of 8 products in another order is off by some 1e-7 of that
        if problem := compare_tensors(merged, w + alpha / rank * b @ a, [(w + b @ a, scale)], otherwise):
            raise Mistake(f"With r = {rank} {problem}")
    return "The adapter is gone, and no step of inference is slower for it."


@exercise("labels")
def my_labels(prompt, answer, cutoff):
    """Both lists are equally long, and −100 is the label that the loss skips. If the two together are too long, each
    is cut in the same proportion."""
    total = len(prompt) + len(answer)
    if total > cutoff:  # each keeps its head; // rounds down, so both fit
        prompt = prompt[: cutoff * len(prompt) // total]
        answer = answer[: cutoff * len(answer) // total]
    return prompt + answer, [-100] * len(prompt) + answer


@exercise("lora")
def my_merge(weight, lora_a, lora_b, lora_alpha, r):
    """Write down what the layer gives for an input x with the adapter beside it, and take x out of the sum. The
    adapter's part has a scale."""
    # W·x plus what LoRA adds to it, with x taken out; a new tensor, so that W stays as it was.
    return weight + lora_alpha / r * (lora_b @ lora_a)
