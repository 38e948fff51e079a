"""Transformers' GPT-2, small, trained on text of its own: what is recorded for another engine."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 12


def trained():
    """The model before its first step: each run has the same."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.2))


if __name__ == "__main__":
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        tokens = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
