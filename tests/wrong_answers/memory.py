"""Wrong answers about memory, ZeRO and optimizers, and about the fine-tune and its plan."""

import difflib
from collections import Counter

import torch
import torch.distributed as dist

from pardemo.book.chapters.accelerate.exercises import my_config, my_in_step
from pardemo.book.chapters.fewer_bits.exercises import my_mxfp8
from pardemo.book.chapters.scorecard.exercises import my_verdict
from pardemo.book.chapters.which_layout.exercises import my_headroom, my_reason
from pardemo.book.chapters.zero_memory.exercises import my_stage
from pardemo.book.chapters.zero_r.exercises import my_order
from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.formulas import memory
from pardemo.optimizers import orthogonalised
from wrong_answers.common import divides_by_zero, everything_to_everyone, gathered, raises_at_length


def orthogonalised_by_columns(part, norm=True, gram=True):
    squares = (part**2).sum()
    if norm:
        dist.all_reduce(squares)
    x = part / squares.sqrt()
    for _ in range(5):
        product = x @ x.T
        if gram:
            dist.all_reduce(product)
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


def orthogonalised_of_gathered(part):
    return orthogonalised(torch.cat(gathered(part), 1)).float().chunk(dist.get_world_size(), 1)[dist.get_rank()]


def untidy_order(arena):
    addresses = []
    for turn in range(12):
        temporary = arena.take(30 if turn % 2 else 40)
        addresses.append(arena.take(3))
        arena.give_back(temporary)
    return addresses


def temporaries_first(arena):
    for turn in range(12):
        arena.give_back(arena.take(30 if turn % 2 else 40))
    return [arena.take(3) for _ in range(12)]


def clipped(mean, max_norm):
    return mean * min(1.0, max_norm / mean.norm().item())


def step_by_all_gather(parameters, gradient, lr, max_norm):
    return parameters - lr * clipped(everything_to_everyone(gradient) / 4, max_norm)


def clipped_after_all_reduce(parameters, gradient, lr, max_norm):
    return parameters - lr * clipped(ring_all_reduce(gradient) / 4, max_norm)


def clipped_by_own_chunk(parameters, gradient, lr, max_norm):
    mine = clipped(ring_reduce_scatter(gradient) / 4, max_norm)
    return ring_all_gather(parameters.chunk(4)[dist.get_rank()] - lr * mine)


def clipped_by_sum(parameters, gradient, lr, max_norm):
    total = ring_all_reduce(gradient)
    return parameters - lr * total / 4 * min(1.0, max_norm / total.norm().item())


def always_scaled(parameters, gradient, lr, max_norm):
    mean = ring_all_reduce(gradient) / 4
    return parameters - lr * mean * max_norm / mean.norm()


def fsdp2_but(**changes):
    return lambda: my_config() | changes


def rouge_l_of_blocks(predicted, reference):
    """The longest run first, as difflib matches: 3 words of abcbdab and bdcaba, where 4 are common in order."""
    blocks = difflib.SequenceMatcher(None, predicted, reference, autojunk=False).get_matching_blocks()
    return 200 * sum(block.size for block in blocks) / (len(predicted) + len(reference))


def rouge_1(predicted, reference):
    return 200 * (Counter(predicted) & Counter(reference)).total() / (len(predicted) + len(reference))


def same_sum(model):
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    return all(torch.isclose(total, other, rtol=1e-12) for other in gathered(total))


def same_as_the_mean(model):
    here = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = here.clone()
    dist.all_reduce(mean)
    return torch.allclose(here, mean / dist.get_world_size())


def same_digest_and_rounded(model):
    answer = my_in_step(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().to(parameter.dtype)
    return answer


#: Of each exercise the answers that are wrong, and what is said to each.
WRONG = {
    "zero_memory.bytes": [
        (lambda p, n, s, k: memory.model_states_bytes(p, n, min(s, 1)), "ZeRO-2 shards the gradients, too"),
        (lambda p, n, s, k: 16 * p / n, "which are divided by N?"),
    ],
    "zero_memory.stage": [
        (lambda p, g, tp, room: my_stage(p, g, 1, room), "a rank holds 1/tp of the parameters"),
        (lambda p, g, tp, room: 3, "it should be 0, not 3: the smallest one that fits"),
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a ZeRO stage"),
    ],
    "zero_communication.clipped_step": [
        (lambda p, g, lr, most: p, "this is not the step with the clipped mean gradient ("),
        (lambda p, g, lr, most: p - lr * ring_all_reduce(g) / 4, "it has to be scaled down"),
        (lambda p, g, lr, most: p - lr * ring_all_reduce(g), "a step with the sum of the gradients"),
        (clipped_by_own_chunk, "each rank took the norm of its own chunk"),
        (clipped_by_sum, "is scaled by 0.025 instead of 0.1"),
        (always_scaled, "only longer ones are scaled"),
        (step_by_all_gather, "a rank sends 4.0Ψ(N−1)/N, and 2 are enough"),
        (clipped_after_all_reduce, "after an all-reduce every rank updates"),
        (lambda p, g, lr, most: p.int(), "this is not the step with the clipped mean gradient ("),
    ],
    "zero_communication.psi": [
        (lambda stage, m: 3 if stage == 3 else 2, "each micro-batch is reduced"),
        (lambda stage, m: [2, 2, m + 1, 3][stage], "each micro-batch gathers for its forward"),
        (raises_at_length, "Your function raised ValueError: what is wrong"),
    ],
    "zero_r.checkpoints": [
        (lambda b, s, h, n, r, p: 2 * b * s * h * n / r, "without P_a every rank keeps all of it"),
        (lambda b, s, h, n, r, p: 2 * b * s * h * n, "with P_a each rank keeps its part"),
    ],
    "zero_r.order": [
        (untidy_order, "Out of memory: "),
        (lambda arena: [arena.take(3) for _ in range(12)], "Temporaries of 40 and 30 by turns"),
        (lambda arena: [arena.give_back(arena.take(40)) for _ in range(12)], "Temporaries of 40 and 30 by turns"),
        (temporaries_first, "Temporary 2 comes before the checkpoint"),
        (lambda arena: [my_order(arena)[0]] * 12, "overlap, or"),
    ],
    "optimizers.by_columns": [
        (lambda part: part.T, "it should return a tensor of shape (24, 32), not (32, 24)"),
        (lambda part: orthogonalised_by_columns(part, norm=False, gram=False), "without the other ranks' columns"),
        (lambda part: orthogonalised_by_columns(part, norm=False), "divided by the norm of its own columns"),
        (lambda part: part, "not the columns of the orthogonalised matrix"),
        (orthogonalised_of_gathered, "Right, but 1 all-gathers bring the columns"),
    ],
    "fewer_bits.largest": [
        (lambda e, f: 448, "For exponent = 5, fraction = 2 it should be"),
    ],
    "fewer_bits.block": [
        (lambda x: my_mxfp8(x / 1.5) * 1.5, "these are not MXFP8's numbers"),
        (lambda x: my_mxfp8(x) + torch.nan, "there are NaNs"),
    ],
    "accelerate.config": [
        (fsdp2_but(num_procs=2), "the configuration has no key 'num_procs'; did you mean 'num_processes'?"),
        (fsdp2_but(num_processes=3), "Two processes are asked for: num_processes is 3"),
        (fsdp2_but(fsdp_config={}), "fsdp_config needs fsdp_version: 2"),
        (fsdp2_but(fsdp_config={"fsdp_version": 2}), "one single shard"),
        (fsdp2_but(mixed_precision="no"), "mixed_precision is 'no', not 'bf16'"),
    ],
    "accelerate.in_step": [
        (lambda m: True, "On rank 2 one element of the last parameter is another. Your answer: True"),
        (lambda m: dist.get_rank() < 2, "The ranks do not agree"),
        (same_sum, "a sum does not tell. Your answer: True"),
        (same_digest_and_rounded, "look at the model, and leave it alone"),
        (same_as_the_mean, "as much as parameters: send a few numbers"),
    ],
    "baichuan2_plan.lora_states": [
        (lambda f, t, n, z: 10 * (f + t), "Which ZeRO stage divides which"),
    ],
    "baichuan2_plan.steps": [
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a number of steps"),
    ],
    "baichuan2_finetune.labels": [
        (lambda p, a, c: (p + a, p + a), "the prompt is trained on too"),
        (lambda p, a, c: (p + a, a), "both need one length"),
        (lambda p, a, c: ((p + a)[:c], ([-100] * len(p) + a)[:c]), "30 tokens of the prompt and 10 of the"),
        (lambda *a: (1, 2), "it returned [1, 2]; it should return two lists, input_ids and labels"),
    ],
    "baichuan2_finetune.lora": [
        (lambda w, a, b, alpha, r: w + b @ a, "the scale is missing"),
        (lambda w, a, b, alpha, r: w.add_(alpha / r * (b @ a)), "W itself was changed"),
        (lambda w, a, b, alpha, r: w + a.t().mul_(alpha / r).t().T.mm(b.T).T, "A itself was changed"),
        (lambda w, a, b, alpha, r: w - b @ a, "it should return W + (lora_alpha/r)·lora_B·lora_A"),
        (lambda w, a, b, alpha, r: w + alpha // r * (b @ a), "it should return W + (lora_alpha/r)·lora_B·lora_A"),
        (
            lambda w, a, b, alpha, r: w + 1.00003 * alpha / r * (b @ a),
            "it should return W + (lora_alpha/r)·lora_B·lora_A",
        ),
        (lambda w, *a: w.int(), "it should return W + (lora_alpha/r)·lora_B·lora_A"),
    ],
    "baichuan2_evaluate.rouge_l": [
        (lambda p, r: 100.0, "2 words in common, in order"),
        (rouge_l_of_blocks, "the longest run first, as difflib matches"),
        (rouge_1, "1 words in common, in order"),
    ],
    "baichuan2_evaluate.split": [
        (lambda pairs, n: (pairs[n:], pairs[:n]), "are in both, such as 'body 0'"),
        (lambda pairs, n: ([], pairs[:n]), "Only 0 pairs are left"),
        (lambda pairs, n: (pairs, []), "test has 0 pairs, not 10"),
        (lambda *a: (1, 2), "Return (train, test), two lists of pairs, not tuple"),
    ],
    "which_layout.headroom": [
        (lambda c, room, free: min(c, key=lambda one: one[1])[0], "of the room and not of what it"),
        (lambda c, room, free: min(c, key=lambda one: one[2])[0], "fits as well, with"),
        (
            lambda c, room, free: min((one for one in c if one[2] <= (1 - free) * room), key=lambda one: one[1])[0],
            "both are within 3 % of the quickest; the first takes",
        ),
        (lambda c, room, free: my_headroom(c, room, 0.0), "has to stay free"),
    ],
    "which_layout.reason": [
        (
            lambda quick, slow: max(slow, key=lambda part: slow[part] / max(quick.get(part, 0), 1e-12)),
            "by the largest factor, from nothing",
        ),
        (lambda quick, slow: my_reason(slow, quick), "tensor-parallel traffic has grown by"),
    ],
    "scorecard.step_bytes": [
        (divides_by_zero, "Your function raised ZeroDivisionError"),
        (lambda *a: float("nan"), "bytes, not nan"),
        (lambda *a: 10**2000, "cannot be compared with the answer (OverflowError"),
    ],
    "scorecard.verdict": [
        (lambda p, m, *rest: "holds" if p == m else "fails", "101 lies within 2 % of 100"),
        (lambda p, m, *rest: "holds", "without a tolerance 101 is not 100"),
        (lambda p, m, rel, e, i: my_verdict(p, m, rel, e, None), "'differs', not 'fails': the second"),
        (lambda p, m, rel, e, i: my_verdict(p, m, rel, "wire", i), "'off', not 'fails': a time may be off"),
        (
            lambda p, m, rel, e, i: "differs" if i == m else my_verdict(p, m, rel, e, i),
            "the first prediction holds; the second is not asked",
        ),
        (
            lambda p, m, rel, e, i: "holds" if abs(m - p) <= rel * p else my_verdict(abs(p), m, rel, e, i),
            "a share of |predicted|",
        ),
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a verdict"),
    ],
}
