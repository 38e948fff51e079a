"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch

from pardemo.book.page.exercises import Exercise, Mistake, call

EXERCISES = {
    "labels": Exercise(
        "my_labels",
        "Both lists are equally long, and −100 is the label that the loss skips. If the two together are too long, "
        "each is cut in the same proportion.",
    ),
    "lora": Exercise(
        "my_merge",
        "Write down what the layer gives for an input x with the adapter beside it, and take x out of the sum. The "
        "adapter's part has a scale.",
    ),
}


def check_labels(function: Callable[[list[int], list[int], int], tuple[list[int], list[int]]]) -> str:
    """``function(prompt, answer, cutoff)`` returns input_ids and labels, both tails cut in proportion."""
    for prompt, answer, cutoff in (([5] * 6, [7] * 4, 20), ([5] * 60, [7] * 20, 40), ([5] * 30, [7] * 31, 50)):
        s, t = len(prompt), len(answer)
        if s + t > cutoff:
            s, t = cutoff * s // (s + t), cutoff * t // (s + t)
        expected = [5] * s + [7] * t, [-100] * s + [7] * t
        returned = call(function, list(prompt), list(answer), cutoff)
        case = f"{len(prompt)} + {len(answer)} tokens, cutoff {cutoff}"
        try:
            ids, labels = (list(part) for part in returned)
        except (TypeError, ValueError):
            raise Mistake(f"For {case}: return two lists, input_ids and labels, not {returned!r}.") from None
        if len(ids) != len(labels):
            raise Mistake(f"For {case}: input_ids and labels need one length: −100 is for no label.")
        if labels == ids:
            raise Mistake(f"For {case}: the prompt is trained on too; its labels are −100.")
        if ids != expected[0]:
            lengths = f"{s} tokens of the prompt and {t} of the answer stay, not {ids.count(5)} and {ids.count(7)}"
            raise Mistake(f"For {case}: {lengths}: each keeps its head, int(cutoff · part / total).")
        if labels != expected[1]:
            raise Mistake(f"For {case}: {t} positions have a label, those of the answer.")
    return "Only the answer is trained on, and a long sample loses both tails."


def check_lora(function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor]) -> str:
    """``function(W, lora_A, lora_B, lora_alpha, r)`` is the merged weight."""
    generator = torch.Generator().manual_seed(0)
    for rank, alpha in ((1, 1.0), (2, 32.0), (3, 8.0), (8, 32.0)):
        w, a, b = (torch.randn(*s, generator=generator) for s in ((12, 6), (rank, 6), (12, rank)))
        originals = {"W": (w, w.clone()), "lora_A": (a, a.clone()), "lora_B": (b, b.clone())}
        merged = call(function, w, a, b, alpha, rank)
        if not isinstance(merged, torch.Tensor) or merged.shape != w.shape:
            shape = list(merged.shape) if isinstance(merged, torch.Tensor) else merged
            raise Mistake(f"The merged weight has W's shape, [12, 6], not {shape}: lora_B·lora_A is [out, in].")
        merged = merged.detach().to(w.dtype)
        if changed := [name for name, (now, before) in originals.items() if not torch.equal(now, before)]:
            raise Mistake(f"{changed[0]} itself was changed: return a new tensor, it may be needed again.")
        if torch.allclose(merged, w + b @ a, atol=1e-5) and alpha != rank:
            raise Mistake(
                f"The scale is missing: with lora_alpha = {alpha:g} and r = {rank} LoRA counts {alpha / rank:g} times."
            )
        # elements reach 50, and a sum of 8 products in another order is off by some 1e-7 of that
        if not torch.allclose(merged, w + alpha / rank * b @ a, atol=1e-4):
            raise Mistake("It is W + (lora_alpha/r)·lora_B·lora_A.")
    return "The adapter is gone, and no step of inference is slower for it."


def my_labels(prompt, answer, cutoff):
    total = len(prompt) + len(answer)
    if total > cutoff:  # each keeps its head; // rounds down, so both fit
        prompt = prompt[: cutoff * len(prompt) // total]
        answer = answer[: cutoff * len(answer) // total]
    return prompt + answer, [-100] * len(prompt) + answer


def my_merge(weight, lora_a, lora_b, lora_alpha, r):
    # W·x plus what LoRA adds to it, with x taken out; a new tensor, so that W stays as it was.
    return weight + lora_alpha / r * (lora_b @ lora_a)
