"""Baichuan2 as a user of Transformers expects a model: what its common model and generation tests ask of any."""

import functools

import pytest
import torch
import transformers
from small_baichuan2 import VOCABULARY, model
from torch.nn import functional as F
from transformers import StaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pardemo.baichuan2 import Baichuan2ForCausalLM, Baichuan2Model, load_checkpoint, save_checkpoint
from pardemo.baichuan2.head import NormHead
from pardemo.finetune import lora

BOTH = pytest.mark.parametrize("position", ["rope", "alibi"])  # 7B, 13B
ROWS, LENGTH, HEADS, LAYERS, HIDDEN = 3, 9, 4, 2, 64


def numbers(*shape, seed=0):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def padded():
    """A batch with padding on the left, and its mask."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    return numbers(ROWS, LENGTH).masked_fill(mask == 0, 0), mask


# --- outputs


@BOTH
def test_hidden_states_are_those_of_every_layer(position):
    tiny, ids = model(position), numbers(ROWS, LENGTH)
    seen = []
    for layer in tiny.model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        out = tiny(ids, output_hidden_states=True)
        assert tiny(ids).hidden_states is None
    assert [h.shape for h in out.hidden_states] == [(ROWS, LENGTH, HIDDEN)] * (LAYERS + 1)
    assert torch.equal(out.hidden_states[0], tiny.model.embed_tokens(ids))
    assert torch.equal(out.hidden_states[1], seen[0][1])
    close(tiny.lm_head(out.hidden_states[-1]), out.logits)
    tiny.config.output_hidden_states = True
    assert len(tiny(ids).hidden_states) == LAYERS + 1


@BOTH
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_attention_weights_are_those_that_make_the_output(position, how):
    ids, mask = padded()
    tiny = model(position)
    tiny.set_attn_implementation(how)
    with torch.no_grad():
        plain, out = tiny(ids, attention_mask=mask), tiny(ids, attention_mask=mask, output_attentions=True)
    assert plain.attentions is None
    close(out.logits, plain.logits)
    assert [a.shape for a in out.attentions] == [(ROWS, HEADS, LENGTH, LENGTH)] * LAYERS
    for weights in out.attentions:
        close(weights.sum(-1), torch.ones(ROWS, HEADS, LENGTH))
        assert not weights.triu(1).any(), "what comes after is not seen"
        assert not weights[0, :, 4:, :4].any(), "nor is padding"
    layer = tiny.model.layers[0]
    v = layer.self_attn.W_pack(layer.input_layernorm(tiny.model.embed_tokens(ids))).chunk(3, -1)[2]
    by_hand = out.attentions[0] @ v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    expected = layer.self_attn.o_proj(by_hand.transpose(1, 2).flatten(2))
    with torch.no_grad():
        again = tiny(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
        x = tiny.model.embed_tokens(ids) + expected
        close(again, x + layer.mlp(layer.post_attention_layernorm(x)))


@BOTH
def test_eager_attention_equals_the_fused_one_gradients_too(position):
    ids, mask = padded()
    grads = []
    for how in ("eager", "sdpa"):
        tiny = model(position).train()
        tiny.set_attn_implementation(how)
        tiny(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        grads.append([p.grad for p in tiny.parameters()])
    close(*grads)


@BOTH
def test_a_cache_is_made_as_the_configuration_says_but_not_in_training(position):
    tiny, ids = model(position), numbers(ROWS, LENGTH)
    with torch.no_grad():
        first = tiny(ids[:, :5])
        rest = tiny(ids[:, 5:], past_key_values=first.past_key_values)
        close(rest.logits, tiny(ids).logits[:, 5:])
    assert rest.past_key_values.get_seq_length() == LENGTH
    assert tiny(ids, labels=ids).past_key_values is None
    assert tiny.train()(ids).past_key_values is None
    tiny.eval().config.use_cache = False
    assert tiny(ids).past_key_values is None


@BOTH
def test_a_whole_mask_is_taken_as_it_is(position):
    """Two continuations of one beginning in one row, each blind to the other: the four-dimensional mask's use."""
    tiny = model(position)
    begin, first, second = numbers(1, 4), numbers(1, 2, seed=1), numbers(1, 2, seed=2)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[6:, 4:6] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]])
    added = torch.zeros(8, 8).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = tiny(torch.cat([begin, first], 1)).logits[:, 4:]
        for mask in (seen, added):
            both = tiny(torch.cat([begin, first, second], 1), attention_mask=mask[None, None], position_ids=positions)
            close(both.logits[:, 4:6], expected)
            if position == "rope":  # ALiBi's distances are those of the row
                close(both.logits[:, 6:], tiny(torch.cat([begin, second], 1)).logits[:, 4:])


def test_one_kind_of_input_and_not_both():
    tiny, ids = model(), numbers(1, 4)
    embedded = tiny.model.embed_tokens(ids)
    close(tiny(inputs_embeds=embedded).logits, tiny(ids).logits)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match=r"input_ids.*inputs_embeds"):
            tiny(**inputs)


# --- generation


@BOTH
def test_a_cache_of_fixed_length_generates_the_same(position):
    ids, mask = padded()
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tiny = model(position)
    expected = tiny.generate(ids, **how)
    assert torch.equal(tiny.generate(ids, use_cache=False, **how), expected)
    assert torch.equal(tiny.generate(ids, cache_implementation="static", disable_compile=True, **how), expected)
    cache = StaticCache(config=tiny.config, max_cache_len=20)
    with torch.no_grad():
        plain, fixed = tiny(ids), tiny(ids, past_key_values=cache)
        close(fixed.logits, plain.logits)
        more = numbers(ROWS, 1)
        close(tiny(more, past_key_values=cache).logits, tiny(more, past_key_values=plain.past_key_values).logits)


@BOTH
def test_generation_goes_on_from_a_cache_and_from_embeddings(position):
    tiny, ids = model(position), numbers(1, LENGTH)
    how = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    whole = tiny.generate(ids, max_new_tokens=6, **how)
    first = tiny.generate(ids, max_new_tokens=3, **how)
    rest = tiny.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, **how)
    assert torch.equal(rest.sequences, whole.sequences)
    embedded = tiny.generate(inputs_embeds=tiny.model.embed_tokens(ids), max_new_tokens=6, **how)
    assert torch.equal(embedded.sequences, whole.sequences[:, LENGTH:])
    guessed = tiny.generate(ids, max_new_tokens=6, prompt_lookup_num_tokens=2, **how)
    assert torch.equal(guessed.sequences, whole.sequences)


# --- the vocabulary


@BOTH
@pytest.mark.parametrize("size", [VOCABULARY + 10, VOCABULARY - 20])
@pytest.mark.parametrize("mean", [True, False])
def test_the_vocabulary_is_resized_and_the_head_stays_a_norm_head(position, size, mean, tmp_path):
    tiny, ids = model(position), numbers(ROWS, LENGTH).clamp_max(VOCABULARY - 21)
    with torch.no_grad():
        before = tiny(ids).logits
    tiny.resize_token_embeddings(size, mean_resizing=mean)
    same = min(size, VOCABULARY)
    assert tiny.config.vocab_size == tiny.get_input_embeddings().num_embeddings == size
    assert isinstance(tiny.get_output_embeddings(), NormHead)
    assert tiny.get_output_embeddings().out_features == size
    with torch.no_grad():
        after = tiny(ids).logits
    assert after.shape[-1] == size
    assert torch.equal(after[..., :same], before[..., :same])
    kept = tiny.lm_head.weight.clone()
    tiny.post_init()
    assert torch.equal(tiny.lm_head.weight, kept)
    tiny(ids, labels=ids).loss.backward()
    save_checkpoint(tiny, tmp_path / "resized")
    with torch.no_grad():
        assert torch.equal(load_checkpoint(tmp_path / "resized", torch.float32)(ids).logits, after)


def test_no_adapter_beside_a_norm_head():
    """Merged into its weight it would be normalised too: B·A beside the head is not B·A in it."""
    with pytest.raises(ValueError, match="'lm_head'"):
        lora.config(model(), ["lm_head"])
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)
    )  # fmt: skip
    assert {"q_proj", "lm_head"} <= lora.linear_names(llama)


# --- training


@BOTH
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_training_step_as_transformers_tests_it(position, checkpointing):
    """Labels where the class is known as one that predicts the next token, a backward pass, a gradient for all."""
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["baichuan"] == Baichuan2ForCausalLM.__name__
    config = model(position).config
    assert type(transformers.AutoModelForCausalLM.from_config(config)) is Baichuan2ForCausalLM
    assert type(transformers.AutoModel.from_config(config)) is Baichuan2Model
    tiny, ids = model(position).train(), numbers(ROWS, LENGTH)
    if checkpointing is not None:
        tiny.activation_checkpointing_enable({"use_reentrant": checkpointing})
    tiny(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tiny.parameters())


@BOTH
def test_the_full_head_returns_logits_beside_the_loss(position):
    ids = numbers(ROWS, LENGTH)
    tiny = model(position, loss_head="full")
    out = tiny(ids, labels=ids)
    close(out.logits, tiny(ids).logits)
    close(out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert model(position)(ids, labels=ids).logits is None


def test_label_smoothing_of_the_trainer_knows_the_model(tmp_path):
    """It shifts labels for models that it knows by name alone."""
    ids = numbers(ROWS, LENGTH)
    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.2, use_cpu=True, report_to=[])
    tiny = model()
    trainer = transformers.Trainer(tiny, arguments)
    loss = trainer.compute_loss(tiny, {"input_ids": ids, "labels": ids.clone()})
    close(loss, F.cross_entropy(tiny(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.2))


# --- the configuration, the official loss


def official_mask_of_13b(padding, slopes):
    """What the official 13B adds to its scores: where query or key is padding the lowest number; ALiBi by key."""
    length = padding.shape[1]
    seen = (padding[:, :, None] * padding[:, None, :]).tril().bool()
    alibi = slopes[:, None, None] * torch.arange(length) + torch.full((length, length), -torch.inf).triu(1)
    return (~seen).float()[:, None] * torch.finfo(torch.float32).min + alibi


def test_real_tokens_beside_padding_have_the_official_logits():
    """Those of padding are nobody's: a padding query sees itself here, and all before it alike in the official code."""
    ids, mask = padded()
    mask = mask.flip(1)  # on the right, as in training
    tiny = model("alibi")
    with torch.no_grad():
        ours = tiny(ids, attention_mask=mask).logits
        for layer in tiny.model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0], Official(mask, args[1].slopes), *args[2:]))
        theirs = tiny(ids).logits
    close(ours[mask.bool()], theirs[mask.bool()])


class Official:
    def __init__(self, padding, slopes):
        self.mask = official_mask_of_13b(padding, slopes)

    def attend(self, q, k, v, flex, blocks):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.mask
        return scores.softmax(-1) @ v
