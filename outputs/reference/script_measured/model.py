import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        shape = tokens.shape[1], tokens.device
        mask = nn.Transformer.generate_square_subsequent_mask(*shape)
        return self.head(self.blocks(self.words(tokens), mask, is_causal=True))


def text(samples, length, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        numbers = torch.rand(samples, length + 1, generator=generator) ** 2
        words = (vocabulary * numbers).long()
        yield words[:, :-1], words[:, 1:].contiguous()
