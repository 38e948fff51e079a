"""The adapter of a recipe: on which modules it sits, and how much its product counts."""

import pytest
import small_baichuan2
import torch

from pardemo.finetune import models, recipe

LAYERS = 2  # of the small model


def adapted(*changes):
    """A small model with a recipe's adapter, whose B is not zero any more."""
    peft = models.with_new_adapter(small_baichuan2.model(), recipe.override(recipe.load("tiny-cpu"), list(changes)))
    for name, value in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, generator=torch.Generator().manual_seed(5))
    return peft.eval()


@pytest.mark.parametrize(("rank", "alpha"), [(8, 32), (8, 8), (3, 4)])
def test_the_adapters_product_counts_alpha_over_rank(rank, alpha):
    layer = adapted(f"lora.r={rank}", f"lora.lora_alpha={alpha}").base_model.model.model.layers[0].self_attn.W_pack
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (len(a), b.shape[1]) == (rank, rank)
    x = torch.randn(5, a.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = x @ (layer.base_layer.weight + alpha / rank * b @ a).T
        # sums in another order: some eps of fp32, 1e-7, of values around 100
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("target", [["W_pack"], ["o_proj", "down_proj"]])
def test_only_the_recipes_modules_are_adapted_and_only_the_adapter_is_trained(target):
    model = small_baichuan2.model().requires_grad_(False)  # as models.base hands it on
    peft = models.with_new_adapter(model, recipe.override(recipe.load("tiny-cpu"), [f"lora.target_modules={target}"]))
    trained = {name for name, value in peft.named_parameters() if value.requires_grad}
    place = {"W_pack": "self_attn.W_pack", "o_proj": "self_attn.o_proj", "down_proj": "mlp.down_proj"}
    assert trained == {
        f"base_model.model.model.layers.{layer}.{place[name]}.lora_{part}.default.weight"
        for layer in range(LAYERS)
        for name in target
        for part in "AB"
    }
