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
        "Cut the tensor into as many chunks as there are ranks, and let every chunk go round the ring twice: once to "
        "collect, once to be handed out. Which chunk does rank r pass on in step s?",
    ),
    "01_unequal_shards": Exercise(
        "my_combine",
        "The mean over one sample must not weigh as much as the mean over eight. Besides the gradients, what else do "
        "the ranks have to add up?",
    ),
    "02_1f1b": Exercise(
        "my_1f1b",
        "How many forwards does a stage begin before the first gradient can be back: rank 0, and the last rank? After "
        "those, one forward and one backward take turns until only backwards are left.",
    ),
    "02_bubble": Exercise(
        "my_micro_batches",
        "Take the forward and backward of one micro-batch as the unit of time. How many units does a rank work, and "
        "how many does it wait?",
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
    "04_vocabulary_loss": Exercise(
        "my_loss",
        "The loss is the log of the sum of all exps, minus the target's own logit. Each rank can do its part of the "
        "first, one single rank knows the second, and the third number is there so that exp stays small.",
    ),
    "05_groups": Exercise(
        "my_groups",
        "How many ranks does a group along this axis have, and how far apart are two neighbours in it? With these two "
        "numbers, a group is known by its first rank.",
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
    "07_zero1_step": Exercise(
        "my_step",
        "An all-reduce is two halves, and between them each rank has the whole sum of one chunk. What can it do there, "
        "so that the second half carries something better than gradients?",
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
    "13_step_bytes": Exercise(
        "my_step_bytes",
        "Two things travel: activations among the tp ranks, in each direction once, and gradients among the dp copies. "
        "Ask of both how large they are on one rank, and what an all-reduce on a ring sends of that.",
    ),
    "13_verdict": Exercise(
        "my_verdict",
        'Write a little function for "is near to", and ask it twice. Only if neither prediction is near does the '
        "kind of evidence matter.",
    ),
}
