"""Baichuan2 as a user of Transformers expects a model: what its common model and generation tests ask of any."""

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


def close(one, other, most=1e-5):
    torch.testing.assert_close(one, other, rtol=most, atol=most)


def padded():
    """A batch with padding on the left, and its mask."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    return numbers(ROWS, LENGTH).masked_fill(mask == 0, 0), mask


# --- outputs


@BOTH
def test_hidden_states_are_those_of_every_layer(position):
    found, ids = model(position), numbers(ROWS, LENGTH)
    seen = []
    for layer in found.model.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        out = found(ids, output_hidden_states=True)
        assert found(ids).hidden_states is None
    assert [h.shape for h in out.hidden_states] == [(ROWS, LENGTH, HIDDEN)] * (LAYERS + 1)
    assert torch.equal(out.hidden_states[0], found.model.embed_tokens(ids))
    assert torch.equal(out.hidden_states[1], seen[0][1])
    close(found.lm_head(out.hidden_states[-1]), out.logits)
    found.config.output_hidden_states = True
    assert len(found(ids).hidden_states) == LAYERS + 1


@BOTH
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_attention_weights_are_those_that_make_the_output(position, how):
    ids, mask = padded()
    found = model(position)
    found.set_attn_implementation(how)
    with torch.no_grad():
        plain, out = found(ids, attention_mask=mask), found(ids, attention_mask=mask, output_attentions=True)
    assert plain.attentions is None
    close(out.logits, plain.logits)
    assert [a.shape for a in out.attentions] == [(ROWS, HEADS, LENGTH, LENGTH)] * LAYERS
    for weights in out.attentions:
        close(weights.sum(-1), torch.ones(ROWS, HEADS, LENGTH))
        assert not weights.triu(1).any(), "what comes after is not seen"
        assert not weights[0, :, 4:, :4].any(), "nor is padding"
    layer = found.model.layers[0]
    v = layer.self_attn.W_pack(layer.input_layernorm(found.model.embed_tokens(ids))).chunk(3, -1)[2]
    by_hand = out.attentions[0] @ v.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    expected = layer.self_attn.o_proj(by_hand.transpose(1, 2).flatten(2))
    with torch.no_grad():
        again = found(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1]
        x = found.model.embed_tokens(ids) + expected
        close(again, x + layer.mlp(layer.post_attention_layernorm(x)))


@BOTH
def test_eager_attention_equals_the_fused_one_gradients_too(position):
    ids, mask = padded()
    grads = []
    for how in ("eager", "sdpa"):
        found = model(position).train()
        found.set_attn_implementation(how)
        found(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        grads.append([p.grad for p in found.parameters()])
    for one, other in zip(*grads, strict=True):
        close(one, other)


@BOTH
def test_a_cache_is_made_as_the_configuration_says_but_not_in_training(position):
    found, ids = model(position), numbers(ROWS, LENGTH)
    with torch.no_grad():
        first = found(ids[:, :5])
        rest = found(ids[:, 5:], past_key_values=first.past_key_values)
        close(rest.logits, found(ids).logits[:, 5:])
    assert rest.past_key_values.get_seq_length() == LENGTH
    assert found(ids, labels=ids).past_key_values is None
    assert found.train()(ids).past_key_values is None
    found.eval().config.use_cache = False
    assert found(ids).past_key_values is None


@BOTH
def test_a_whole_mask_is_taken_as_it_is(position):
    """Two continuations of one beginning in one row, each blind to the other: the four-dimensional mask's use."""
    found = model(position)
    begin, one, other = numbers(1, 4), numbers(1, 2, seed=1), numbers(1, 2, seed=2)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen[6:, 4:6] = False
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]])
    added = torch.zeros(8, 8).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = found(torch.cat([begin, one], 1)).logits[:, 4:]
        for mask in (seen, added):
            both = found(torch.cat([begin, one, other], 1), attention_mask=mask[None, None], position_ids=positions)
            close(both.logits[:, 4:6], expected)
            if position == "rope":  # ALiBi's distances are those of the row
                close(both.logits[:, 6:], found(torch.cat([begin, other], 1)).logits[:, 4:])


def test_one_kind_of_input_and_not_both():
    found, ids = model(), numbers(1, 4)
    embedded = found.model.embed_tokens(ids)
    close(found(inputs_embeds=embedded).logits, found(ids).logits)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match=r"input_ids.*inputs_embeds"):
            found(**inputs)


# --- generation


@BOTH
def test_a_cache_of_fixed_length_generates_the_same(position):
    ids, mask = padded()
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    found = model(position)
    expected = found.generate(ids, **how)
    assert torch.equal(found.generate(ids, use_cache=False, **how), expected)
    assert torch.equal(found.generate(ids, cache_implementation="static", disable_compile=True, **how), expected)
    cache = StaticCache(config=found.config, max_cache_len=20)
    with torch.no_grad():
        plain, fixed = found(ids), found(ids, past_key_values=cache)
        close(fixed.logits, plain.logits)
        more = numbers(ROWS, 1)
        close(found(more, past_key_values=cache).logits, found(more, past_key_values=plain.past_key_values).logits)


@BOTH
def test_generation_goes_on_from_a_cache_and_from_embeddings(position):
    found, ids = model(position), numbers(1, LENGTH)
    how = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    whole = found.generate(ids, max_new_tokens=6, **how)
    first = found.generate(ids, max_new_tokens=3, **how)
    rest = found.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, **how)
    assert torch.equal(rest.sequences, whole.sequences)
    embedded = found.generate(inputs_embeds=found.model.embed_tokens(ids), max_new_tokens=6, **how)
    assert torch.equal(embedded.sequences, whole.sequences[:, LENGTH:])
    guessed = found.generate(ids, max_new_tokens=6, prompt_lookup_num_tokens=2, **how)
    assert torch.equal(guessed.sequences, whole.sequences)


# --- the vocabulary


@BOTH
@pytest.mark.parametrize("size", [VOCABULARY + 10, VOCABULARY - 20])
@pytest.mark.parametrize("mean", [True, False])
def test_the_vocabulary_is_resized_and_the_head_stays_a_norm_head(position, size, mean, tmp_path):
    found, ids = model(position), numbers(ROWS, LENGTH).clamp_max(VOCABULARY - 21)
    with torch.no_grad():
        before = found(ids).logits
    found.resize_token_embeddings(size, mean_resizing=mean)
    same = min(size, VOCABULARY)
    assert found.config.vocab_size == found.get_input_embeddings().num_embeddings == size
    assert isinstance(found.get_output_embeddings(), NormHead)
    assert found.get_output_embeddings().out_features == size
    with torch.no_grad():
        after = found(ids).logits
    assert after.shape[-1] == size
    assert torch.equal(after[..., :same], before[..., :same])
    kept = found.lm_head.weight.clone()
    found.post_init()
    assert torch.equal(found.lm_head.weight, kept)
    found(ids, labels=ids).loss.backward()
    save_checkpoint(found, tmp_path / "resized")
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
    found, ids = model(position).train(), numbers(ROWS, LENGTH)
    if checkpointing is not None:
        found.activation_checkpointing_enable({"use_reentrant": checkpointing})
    found(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in found.parameters())


@BOTH
def test_the_full_head_returns_logits_beside_the_loss(position):
    ids = numbers(ROWS, LENGTH)
    found = model(position, loss_head="full")
    out = found(ids, labels=ids)
    close(out.logits, found(ids).logits)
    close(out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    assert model(position)(ids, labels=ids).logits is None


def smoothed_by_hand(logits, labels, factor):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=factor)


def test_label_smoothing_of_the_trainer_knows_the_model(tmp_path):
    """It shifts labels for models that it knows by name alone."""
    ids = numbers(ROWS, LENGTH)
    arguments = transformers.TrainingArguments(str(tmp_path), label_smoothing_factor=0.2, use_cpu=True, report_to=[])
    found = model()
    trainer = transformers.Trainer(found, arguments)
    loss = trainer.compute_loss(found, {"input_ids": ids, "labels": ids.clone()})
    close(loss, smoothed_by_hand(found(ids).logits, ids, 0.2))


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
    found = model("alibi")
    with torch.no_grad():
        ours = found(ids, attention_mask=mask).logits
        for layer in found.model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0], Official(mask, args[1].slopes), *args[2:]))
        theirs = found(ids).logits
    close(ours[mask.bool()], theirs[mask.bool()])


class Official:
    def __init__(self, padding, slopes):
        self.mask = official_mask_of_13b(padding, slopes)

    def attend(self, q, k, v, flex, blocks):
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.mask
        return scores.softmax(-1) @ v
