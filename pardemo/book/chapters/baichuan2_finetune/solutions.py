"""One way to solve each exercise of this chapter."""


def my_labels(prompt, answer, cutoff):
    total = len(prompt) + len(answer)
    if total > cutoff:  # each keeps its head; // rounds down, so both fit
        prompt = prompt[: cutoff * len(prompt) // total]
        answer = answer[: cutoff * len(answer) // total]
    return prompt + answer, [-100] * len(prompt) + answer


def my_merge(weight, a, b, alpha, rank):
    # W·x + (α/r)·B·(A·x), with x taken out; a new tensor, so that W stays as it was.
    return weight + alpha / rank * (b @ a)
