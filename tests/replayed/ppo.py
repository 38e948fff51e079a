"""PPO as a loop of one's own: each rank samples its answers, from a generator with the rank in its seed.

--wrong tokens: means over each micro-batch's tokens (verl 5625, 5867, 4710). --wrong advantages: they are
normalised by the rank's own rewards. --wrong old: old log-probabilities are of rows that are padded to the rank's
longest one, and the model sees the padding. --outside 1: tokens are drawn by a generator of the script's own, as by
another process; then --late 1 counts the tokens of all ranks behind the model's call, and not before.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, WIDTH, PROMPT, ANSWER, ENDS = 13, 16, 3, 8, 5  # tokens below 5 end an answer

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--wrong", default="nothing")
parser.add_argument("--outside", type=int, default=0)
parser.add_argument("--late", type=int, default=0)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Policy(nn.Module):
    """Logits of the next token, of the mean of all tokens so far. [b, s] -> [b, s, v]"""

    def __init__(self):
        super().__init__()
        self.embed, self.inside = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.head(x + F.gelu(self.inside(x)))


def log_probabilities(model, tokens):
    logits = model(tokens)[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)  # [b, answer]


def rollout(model, prompts, generator):
    tokens = prompts
    for _ in range(ANSWER):
        weights = model(tokens)[:, -1].softmax(-1)
        chosen = torch.multinomial(weights, 1, generator=generator) if args.outside else torch.multinomial(weights, 1)
        tokens = torch.cat([tokens, chosen], 1)
    ends = (tokens[:, PROMPT:] < ENDS).long()
    return tokens, (ends.cumsum(1) - ends == 0).to(weights.dtype)


def normalised(rewards):
    total, count = torch.stack([rewards.sum(), rewards.square().sum()]), len(rewards)
    if args.wrong != "advantages":
        dist.all_reduce(total)
        count *= ranks
    mean = total[0] / count
    return (rewards - mean) / (total[1] / count - mean**2).sqrt().clamp(min=1e-6)


def over_ranks(value):
    dist.all_reduce(value)
    return value


torch.manual_seed(0)
plain = Policy()
model = DistributedDataParallel(plain)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
torch.manual_seed(1000 + rank)
generator = torch.Generator().manual_seed(2000 + rank)
share = args.batch * args.accumulate
for step in range(4):
    prompts = torch.randint(1, VOCAB, (share * ranks, PROMPT), generator=torch.Generator().manual_seed(step))
    prompts = prompts.chunk(ranks)[rank]
    with torch.no_grad():
        tokens, mask = rollout(plain, prompts, generator)
        longest = int(mask.sum(1).max()) if args.wrong == "old" else 0
        old = log_probabilities(plain, F.pad(tokens, (longest, 0)))[:, -ANSWER:]
        old += 0.1 * torch.sin(tokens[:, PROMPT:])  # as of a policy that is a few steps behind
        rewards = (tokens[:, PROMPT:] * mask).sum(1) / VOCAB
        advantages = normalised(rewards)
    counted = over_ranks(mask.sum())
    for number, part in enumerate(torch.arange(share).split(args.batch), 1):
        model.require_backward_grad_sync = number == args.accumulate
        ratio = (log_probabilities(model, tokens[part]) - old[part]).exp()
        if args.late:
            counted = over_ranks(mask.sum())
        gain = torch.minimum(ratio * advantages[part, None], ratio.clamp(0.8, 1.2) * advantages[part, None])
        loss = -(gain * mask[part]).sum()
        loss = loss / mask[part].sum() / args.accumulate if args.wrong == "tokens" else loss * ranks / counted
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
