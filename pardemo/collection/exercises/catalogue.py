"""Every exercise of the collection, with the name of its stub and a hint.

``NN_name`` is checked by ``check_name`` of ``chapter_NN`` and solved by the function of the stub's name in
``solutions/chapter_NN``. A hint is what a teacher says over the shoulder: one or two sentences that say where to look,
and leave the code to the reader.
"""

from typing import NamedTuple


class Exercise(NamedTuple):
    """What the notebook's stub is called, and what leads on who is stuck."""

    stub: str
    hint: str


EXERCISES = {
    "00_bus_bandwidth": Exercise(
        "my_bus_bandwidth",
        "Ask what one rank has to send on a ring, not how large the array is. How many times does each of the three "
        "collectives go round?",
    ),
    "00_neighbour": Exercise(
        "my_neighbour",
        "Every rank sends to the right and receives from the left. Which of the two calls goes on without waiting for "
        "the other side, so that nobody waits for everybody?",
    ),
    "01_all_reduce": Exercise(
        "my_all_reduce",
        "Cut the tensor into as many chunks as there are ranks, and make each rank responsible for one of them. Who "
        "needs to hear of chunk 2 before it is summed, and who afterwards?",
    ),
    "01_unequal_shards": Exercise(
        "my_combine",
        "The mean over one sample must not weigh as much as the mean over eight. Besides the gradients, what else do "
        "the ranks have to add up?",
    ),
    "02_bubble": Exercise(
        "my_micro_batches",
        "Take the forward and backward of one micro-batch as the unit of time. How many units does a rank work, and "
        "how many does it wait?",
    ),
    "02_order": Exercise(
        "my_order",
        "Write down the loop of section 3 with yield. Which number in it decides how many micro-batches a rank holds, "
        "and how large may it be now?",
    ),
    "03_f": Exercise(
        "my_f",
        "Every rank has x already, so what is left to do forward? Backward, each rank is handed only its own share of "
        "the gradient.",
    ),
    "03_split": Exercise(
        "my_mlp",
        "Cut a so that each rank can take the GeLU of its part without asking anybody. Then look at which numbers of b "
        "that part meets, and where the ranks' results still have to be added.",
    ),
    "04_qkv_rows": Exercise(
        "my_rows",
        "The weight is three matrices in one. A head is of use to a rank only with all three of its parts.",
    ),
    "04_shared_heads": Exercise(
        "my_shared_sum",
        "Which ranks ask the same key and value head? They need a group of their own, and a group is made by all ranks "
        "together, also by those that are not in it.",
    ),
    "04_vocabulary_loss": Exercise(
        "my_loss",
        "The log of a sum of exps, minus the target's own logit, and the largest logit so that exp stays small: which "
        "rank knows how much of each? Two of the three numbers are sums.",
    ),
    "04_norm_gradients": Exercise(
        "my_sum",
        "Each rank's gradient comes from its own tokens, and the loss is a sum over all of them. Several small tensors "
        "become one if you flatten them and lay them side by side.",
    ),
    "04_activations": Exercise(
        "my_kept",
        "Which of the 34 lie inside attention and MLP, where each rank has its heads and columns, and which outside? "
        "Sequence parallelism cuts those, too.",
    ),
    "05_groups": Exercise(
        "my_groups",
        "How many ranks does a group along this axis have, and how far apart are two neighbours in it? With these two "
        "numbers, a group is known by its first rank.",
    ),
    "05_mfu": Exercise(
        "my_mfu",
        "What does one token need, forward and backward, in products with weights and in the attention's, which have "
        "none? Then ask how many of that all GPUs together could do in a second.",
    ),
    "05_order": Exercise(
        "my_order",
        "The name that comes first runs fastest: its groups are ranks side by side. Which of the three talks the most, "
        "and which the least?",
    ),
    "06_bytes": Exercise(
        "my_bytes",
        "There are three kinds of model states, and each stage shares out one kind more. It begins with the largest.",
    ),
    "06_stage": Exercise(
        "my_stage",
        "Tensor parallelism leaves a rank fewer parameters, and fewer ranks to share them with. With that, ask your "
        "function from the exercise before, one stage after the other.",
    ),
    "07_clipped_step": Exercise(
        "my_step",
        "After the reduce-scatter each rank has its own chunk of the mean gradient. The norm's square is a sum of "
        "squares, so which single number does each rank have to add to the others' before it scales its chunk?",
    ),
    "07_psi": Exercise(
        "my_psi",
        "Count reduce-scatters and all-gathers: each is one Ψ(N−1)/N. Which come once a step, and which with every "
        "micro-batch, because a rank has no room for the whole?",
    ),
    "08_checkpoints": Exercise(
        "my_checkpoints",
        "One activation stays for each layer: count its elements. Tensor parallelism gives every rank a copy of it, "
        "unless P_a steps in.",
    ),
    "08_order": Exercise(
        "my_order",
        "Holes appear where something temporary goes and something that stays stands behind it. Where should the "
        "checkpoints stand before the first temporary comes?",
    ),
    "09_config": Exercise(
        "my_config",
        "Most keys stand at the top: how many processes, which distributed_type, which precision. What FSDP needs "
        "stands under fsdp_config: its version, and how it finds the layers that become units of their own.",
    ),
    "09_in_step": Exercise(
        "my_in_step",
        "Different parameters can have the same sum and the same mean. Which short text changes when a single bit of "
        "them does?",
    ),
    "10_lora_states": Exercise(
        "my_lora_states",
        "Count the three kinds one by one: which parameters have a gradient, which have optimizer states? Then ask of "
        "each kind from which stage on it is shared out.",
    ),
    "10_steps": Exercise(
        "my_steps",
        "Follow one epoch: how many batches, how many of them on each GPU, how many accumulations? What is left over "
        "at each of these still counts as one.",
    ),
    "11_labels": Exercise(
        "my_labels",
        "Both lists are equally long, and −100 is the label that the loss skips. If the two together are too long, "
        "each is cut in the same proportion.",
    ),
    "11_lora": Exercise(
        "my_merge",
        "Write down what the layer gives for an input x with the adapter beside it, and take x out of the sum. The "
        "adapter's part has a scale.",
    ),
    "12_rouge_l": Exercise(
        "my_rouge_l",
        "Ask for the first i words of one list and the first j of the other, and answer from smaller i and j: do the "
        "two last words match or not? F1 then needs only that length and those of both lists.",
    ),
    "12_split": Exercise(
        "my_split",
        "Choose the test pairs first. Then go through the rest: what gives away a test pair is its body, not the whole "
        "pair.",
    ),
    "13_crossing": Exercise(
        "my_crossing",
        "Write down the seconds of both ways, steps times products plus bytes over B, and set them equal. Which of the "
        "two has the bytes only in some of its steps?",
    ),
    "13_order": Exercise(
        "my_order",
        "When does a ring have to leave a host, and when does it do so for nothing? Put together what lives together.",
    ),
    "14_headroom": Exercise(
        "my_headroom",
        "First say who may stay, then what the quickest of these takes. Layouts within 3 % of it are equal as far as "
        "anybody can predict: what decides among them?",
    ),
    "14_reason": Exercise(
        "my_reason",
        "The largest part of the slow step may be as large in the quick one. Lay both steps beside each other, part by "
        "part; one that is missing takes no time.",
    ),
    "15_step_bytes": Exercise(
        "my_step_bytes",
        "Two things travel: activations among the tp ranks, in each direction once, and gradients among the dp copies. "
        "Ask of both how large they are on one rank, and what an all-reduce on a ring sends of that.",
    ),
    "15_verdict": Exercise(
        "my_verdict",
        'Write a little function for "is near to", and ask it twice. Only if neither prediction is near does the '
        "kind of evidence matter.",
    ),
}
