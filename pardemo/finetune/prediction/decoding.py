"""The generation loop: many prompts at once, step by step, rows leaving the batch as they end.

Of its own rather than ``transformers.generate``, for three reasons: each row draws from random numbers of its own, so
that what it becomes does not depend on which others share its batch; a row that has ended costs nothing more; and
nothing of a folder's ``generation_config.json`` (repetition_penalty 1.05, top_k 5 …) leaks into greedy decoding. Greedy
tokens are those of ``generate``: a test compares them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import DynamicCache, PreTrainedModel

from pardemo.finetune.recipes.recipe_schema import Predict


@torch.inference_mode()
def steps(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: Predict,
    eos: int,
    draws: Sequence[np.random.Generator] | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """After each step, (prompt's number, token) of every prompt that has not ended; EOS itself is left out.

    Args:
        prompts: token numbers, none of them empty; padded at the left to the longest.
        draws: random numbers for each prompt, needed where ``settings.do_sample``.

    Raises:
        ValueError: the model's logits are no numbers, as this model's are in fp16, which overflows.
    """
    alive, width = list(range(len(prompts))), max(map(len, prompts))
    padded = any(len(prompt) < width for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache()
    for step in range(settings.max_new_tokens):
        shared = {"attention_mask": mask, "position_ids": positions} if padded else {}
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **shared).logits[:, -1]
        if step == 0 and not logits.isfinite().all():
            raise ValueError(f"the model's logits are no numbers in {logits.dtype}: take train.precision=bf16 or fp32")
        tokens = _sampled(logits, settings, [draws[row] for row in alive]) if settings.do_sample else logits.argmax(-1)
        token_ids = tokens.tolist()
        yield [(row, token) for row, token in zip(alive, token_ids, strict=True) if token != eos]
        if eos in token_ids:
            on = [place for place, token in enumerate(token_ids) if token != eos]
            if not on:
                return
            alive, index = [alive[place] for place in on], torch.tensor(on, device=model.device)
            cache.batch_select_indices(index)
            tokens, mask, positions = tokens[index], mask[index], positions[index]
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)


def _sampled(logits: torch.Tensor, settings: Predict, draws: Sequence[np.random.Generator]) -> torch.Tensor:
    """One token a row [b] from logits [b, v]: temperature, then the top k, then the top p, as ``generate`` orders them.

    Each row takes one number of its own and looks it up in its cumulative probabilities.
    """
    most = min(settings.top_k or logits.shape[-1], logits.shape[-1])
    best, tokens = (logits.double() / settings.temperature).topk(most)  # [b, k], falling
    probabilities = best.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    total = probabilities.masked_fill_(before >= settings.top_p, 0).cumsum(-1)  # the first always stays: 0 < top_p
    drawn = torch.tensor([[draw.random()] for draw in draws], device=logits.device, dtype=total.dtype) * total[:, -1:]
    place = (total <= drawn).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # should the product have been rounded up to the whole
    return tokens.gather(-1, torch.minimum(place, last)).squeeze(-1)
