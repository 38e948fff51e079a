"""Labels are shifted after the sequence was cut: the last token of each shard has no target, or a wrong one.

The loss of a causal language model shifts the labels by one itself. On a shard that drops the target of its last
token, which is the first token of the next rank; here the shift wraps round, and that token learns to predict the
beginning of its own shard. transformers takes labels that were shifted before the cut for this reason (36607), and
many of its models dropped them silently (48493).
"""

import common


def shifted(labels):
    """The next token of each; of the last, the first one."""
    return labels.roll(-1, dims=-1)


def cut(whole):
    tokens = common.part(args, whole[:, :-1])
    return tokens, common.part(args, shifted(whole[:, :-1])) if args.mended else shifted(tokens)


if __name__ == "__main__":
    args = common.arguments()
    common.train(args, common.Model, cut=cut)
