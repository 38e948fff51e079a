"""Baichuan2: the official numbers to the digit, the mathematics against independent forms, folders as downloaded."""

import io
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import pytest
import sentencepiece
import torch
import transformers
from conftest import refused
from peft import LoraConfig, get_peft_model
from tiny_model import train_tokenizer
from torch.nn import functional as F

from pardemo.baichuan2 import (
    Baichuan2Config,
    Baichuan2ForCausalLM,
    Baichuan2Tokenizer,
    load_checkpoint,
    load_tokenizer,
    save_checkpoint,
)
from pardemo.baichuan2.attention import Pattern, alibi_slopes
from pardemo.baichuan2.checkpoints import write_folder
from pardemo.baichuan2.tokenization import ASSISTANT
from pardemo.finetune.samples import source_ids
from pardemo.planner.models import find

SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "num_attention_heads": 4}  # fmt: skip
TEXT = [f"今天第{i}号港口运来{i * 37}吨苹果，价格上涨{i % 9}.5%。The ship number {i} left at noon." for i in range(400)]


def small(position="alibi", **changes):
    torch.manual_seed(0)
    config = Baichuan2Config(**{**SMALL, "position_embedding": position, "initializer_range": 0.2, **changes})
    return Baichuan2ForCausalLM(config).eval()


def numbers(*shape, most=320):
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(train_tokenizer(TEXT, 320))
    return path


# --- the official numbers


@pytest.mark.parametrize(
    ("config", "params"), [(find("baichuan2-7b"), 7_505_973_248), (Baichuan2Config.b13(), 13_896_668_160)]
)
def test_parameters_to_the_digit(config, params):
    with torch.device("meta"):
        model = Baichuan2ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == params
    assert model.lm_head.weight.numel() == model.model.embed_tokens.weight.numel() == 125_696 * config.hidden_size


def test_a_layer_of_13b_and_its_lora_parameters():
    with torch.device("meta"):
        model = Baichuan2ForCausalLM(Baichuan2Config.b13())
        assert sum(p.numel() for p in model.model.layers[0].parameters()) == 315_238_400
        lora = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=["W_pack"], task_type="CAUSAL_LM"))
    assert sum(p.numel() for p in lora.parameters() if p.requires_grad) == 6_553_600


def test_names_of_the_official_checkpoints():
    names = set(small(num_hidden_layers=1).state_dict())
    layer = {f"self_attn.{n}" for n in ("W_pack", "o_proj")} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    expected = {f"model.layers.0.{name}.weight" for name in layer}
    assert names == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_slopes_are_the_official_ones():
    slopes = alibi_slopes(40)
    assert slopes[:32] == [2 ** (-(i + 1) / 4) for i in range(32)]
    assert slopes[32:] == [2 ** (-(2 * m + 1) / 8) for m in range(8)]
    assert [round(s, 4) for s in (slopes[0], slopes[32], slopes[33], slopes[39])] == [0.8409, 0.9170, 0.7711, 0.2726]
    assert slopes[31] == 2**-8


def test_which_model_a_configuration_without_own_keys_means():
    assert Baichuan2Config.from_dict({"hidden_size": 4096, "num_attention_heads": 32}).position_embedding == "rope"
    assert Baichuan2Config.from_dict({"hidden_size": 5120}).position_embedding == "alibi"
    assert Baichuan2Config.from_dict({"vocab_size": 64_000}).normalize_head is False
    with pytest.raises(ValueError, match=r"hidden_size.*65.*4"):
        Baichuan2Config(**{**SMALL, "hidden_size": 65})


# --- the mathematics


def official_alibi(q, k, v, slopes):
    """Softmax of scores + slope · j with the causal mask, in double precision: the official inference form."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + torch.tensor(slopes, dtype=torch.double)[:, None, None] * torch.arange(
        k.shape[-2]
    )
    visible = torch.ones(q.shape[-2], k.shape[-2]).tril().bool()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_alibi_equals_the_official_form(dtype, most):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 1024, 16, generator=generator).to(dtype) for _ in range(3))
    slopes = alibi_slopes(40)
    exact = official_alibi(q, k, v, slopes)
    ours = Pattern(torch.tensor(slopes), 1024, 1024, q.device).attend(q, k, v)
    assert (ours - exact).abs().max() < most
    if dtype == torch.bfloat16:  # what the official form loses in 16 bits
        bias = (torch.tensor(slopes)[:, None, None] * torch.arange(1024)).to(dtype).expand(-1, 1024, -1)
        bias = bias.masked_fill(~torch.ones(1024, 1024).tril().bool(), -torch.inf)
        assert (F.scaled_dot_product_attention(q, k, v, attn_mask=bias) - exact).abs().max() > 10 * most


def test_rope_model_equals_llama_of_transformers():
    ours = small("rope", normalize_head=False)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, pad_token_id=0)).eval()
    weights = {}
    for name, value in ours.state_dict().items():
        if "W_pack" in name:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                weights[name.replace("W_pack", f"{part}_proj")] = third
        else:
            weights[name] = value
    llama.load_state_dict(weights)
    ids = numbers(2, 33)
    torch.testing.assert_close(ours(ids).logits, llama(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_head_divides_by_the_rows_lengths_and_writes_nothing():
    model = small()
    before = model.lm_head.weight.clone()
    hidden = torch.randn(2, 5, 64)
    expected = F.linear(hidden, F.normalize(model.lm_head.weight, dim=1))
    torch.testing.assert_close(model.lm_head(hidden), expected)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("position", ["alibi", "rope"])
@pytest.mark.parametrize("items", [None, 50])
def test_logits_only_where_there_is_a_label(position, items):
    ids = numbers(3, 24)
    labels = ids.masked_fill(torch.rand(3, 24, generator=torch.Generator().manual_seed(2)) < 0.8, -100)
    losses, gradients = [], []
    for kind in ("labels", "full"):
        model = small(position, loss_head=kind)
        losses.append(model(ids, labels=labels, num_items_in_batch=items).loss)
        losses[-1].backward()
        gradients.append([p.grad for p in model.parameters()])
    logits = small(position)(ids).logits[:, :-1].flatten(0, 1)
    plain = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="mean" if items is None else "sum")
    assert [loss.item() for loss in losses] == pytest.approx([(plain / (items or 1)).item()] * 2, rel=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)  # rounding of sums in another order
    assert small(position)(ids, labels=torch.full_like(ids, -100)).loss.item() == 0, "no label at all"


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_flex_attention_equals_sdpa(position):
    ids, mask = numbers(2, 130), torch.ones(2, 130, dtype=torch.long)
    mask[0, :40] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    plain, flex = small(position), small(position)
    flex.set_attn_implementation("flex_attention")
    with torch.no_grad():
        pair = [m(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()] for m in (plain, flex)]
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["alibi", "rope"])
@pytest.mark.parametrize("length", [64, 65, 200])
@pytest.mark.parametrize("batch", ["all", "padded", "packed"])
def test_attention_in_blocks_equals_one_call(position, length, batch):
    tokens, more = numbers(2, length), {}
    if batch == "padded":
        more["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        more["attention_mask"][0, -length // 3 :] = 0
        more["attention_mask"][1, : length // 4] = 0
    elif batch == "packed":
        more["position_ids"] = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)]).expand(2, -1)
    losses, gradients = [], []
    for how in ("whole", "blocks"):
        model = small(position, attention=how)
        with mock.patch.object(Pattern, "_in_blocks", autospec=True, side_effect=Pattern._in_blocks) as called:
            loss = model(tokens, labels=tokens, **more).loss
        assert called.call_count == (3 if how == "blocks" and length > 64 else 0), "in each layer"
        loss.backward()
        losses.append(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*losses)
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_blocks_are_in_fp32_also_where_autocast_makes_bf16_of_everything():
    q, k, v = (torch.randn(2, 4, 200, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    pattern = Pattern(torch.tensor(alibi_slopes(4)), 200, 200, q.device)
    right = pattern.weigh(q.double(), k.double(), v.double())[0]
    for blocks in (False, True):  # each with a pattern of its own: that of fp64 keeps its mask
        wide = Pattern(torch.tensor(alibi_slopes(4)), 200, 200, q.device)
        out = wide.attend(q.double(), k.double(), v.double(), blocks=blocks)
        torch.testing.assert_close(out, right, rtol=0, atol=1e-6)  # weigh has its softmax in fp32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(pattern.attend(q, k, v, blocks=True), right.float(), rtol=0, atol=1e-5)
        assert (pattern.attend(q, k, v) - right).abs().max() > 1e-3, "one call is rounded there"
    narrow = (each.bfloat16() for each in (q, k, v))
    assert pattern.attend(*narrow, blocks=True).dtype == torch.bfloat16


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_packed_samples_see_only_themselves(position):
    model, parts = small(position), [numbers(1, n) for n in (7, 12, 5)]
    positions = torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    with torch.no_grad():
        packed = model(torch.cat(parts, 1), position_ids=positions).logits
        alone = torch.cat([model(p).logits for p in parts], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_generation_in_batches_equals_one_by_one(position):
    model = small(position)
    prompts = [numbers(1, n)[0] for n in (4, 9, 17)]
    width = max(map(len, prompts))
    ids = torch.stack([F.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([F.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts])
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    together = model.generate(ids, attention_mask=mask, **how)[:, width:]
    for row, prompt in zip(together, prompts, strict=True):
        alone = model.generate(prompt[None], **how)[0, len(prompt) :]
        slow = prompt[None]
        for _ in range(12):  # without a cache
            slow = torch.cat([slow, model(slow).logits[:, -1:].argmax(-1)], 1)
        assert row.tolist() == alone.tolist() == slow[0, len(prompt) :].tolist()


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_gradient_checkpointing_changes_nothing(position):
    ids = numbers(2, 16)
    grads = []
    for on in (False, True):
        model = small(position).train()
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


# --- folders


def official(folder, model, shards=2, spm=None):
    """A folder as the official ones are: pickled shards, an index, remote code that must not run."""
    folder.mkdir(exist_ok=True)
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    where = {name: f"pytorch_model-{i % shards + 1:05}-of-{shards:05}.bin" for i, name in enumerate(state)}
    for file in set(where.values()):
        torch.save({name: state[name] for name in state if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {k: getattr(model.config, k) for k in (*SMALL, "position_embedding", "rms_norm_eps")}
    auto = {"AutoConfig": "trap.BaichuanConfig", "AutoModelForCausalLM": "trap.BaichuanForCausalLM"}
    config |= {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "auto_map": auto}
    config |= {"torch_dtype": "bfloat16", "gradient_checkpointing": [False], "tokenizer_class": "BaichuanTokenizer"}
    (folder / "config.json").write_text(json.dumps(config))
    generation = {
        "user_token_id": 195, "assistant_token_id": 196, "eos_token_id": 2, "max_new_tokens": 2048,
        "do_sample": True, "temperature": 0.3, "top_k": 5, "top_p": 0.85, "repetition_penalty": 1.05,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "trap.py").write_text(f"open({str(folder / 'sprung')!r}, 'w')\nraise SystemExit('code was run')\n")
    tokenizer = {"tokenizer_class": "BaichuanTokenizer", "model_max_length": 4096, "add_bos_token": False}
    tokenizer["auto_map"] = {"AutoTokenizer": ["trap.BaichuanTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if spm is not None:
        shutil.copy(spm, folder / "tokenizer.model")
    return folder


def assert_equal_weights(loaded, model, dtype):
    assert {value.dtype for value in loaded.state_dict().values()} == {dtype}
    expected = {name: value.to(dtype) for name, value in model.state_dict().items()}
    torch.testing.assert_close(dict(loaded.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_an_official_folder_is_read_as_it_was_downloaded(tmp_path, spm, position):
    model = small(position)
    folder = official(tmp_path / "chat", model, spm=spm)
    loaded, auto = load_checkpoint(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not loaded.training
    assert isinstance(auto, Baichuan2ForCausalLM)
    for either in (loaded, auto):
        assert_equal_weights(either, model, torch.bfloat16)
    assert loaded.generation_config.temperature == 0.3
    assert loaded.generation_config.user_token_id == 195
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, Baichuan2Tokenizer)
    assert load_tokenizer(folder).encode("港口") == tokenizer.encode("港口")
    assert not (folder / "sprung").exists(), "no code of the folder is run"


def test_what_is_saved_is_read_back_bit_equal(tmp_path, spm):
    model = small()
    for size in (10**9, 20_000):  # one shard, several
        save_checkpoint(model, tmp_path / "out", Baichuan2Tokenizer(str(spm)), shard_bytes=size)
        loaded = load_checkpoint(tmp_path / "out", torch.float32)
        assert_equal_weights(loaded, model, torch.float32)
        assert loaded.config.position_embedding == "alibi"
        assert load_tokenizer(tmp_path / "out").padding_side == "left"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "nothing is left beside it"


def test_a_folder_that_fails_half_way_leaves_the_older_one(tmp_path):
    save_checkpoint(small(), tmp_path / "out")

    def breaks(part):
        (part / "config.json").write_text("{}")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "out", breaks)
    load_checkpoint(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def changed(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without_the_last(shard):
    state = torch.load(shard)
    state.popitem()
    torch.save(state, shard)


INDEX, SECOND = "pytorch_model.bin.index.json", "pytorch_model-00002-of-00002.bin"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("config.json", Path.unlink, "has no config.json"),
        ("config.json", lambda path: path.write_text("{"), "config.json is not JSON"),
        ("config.json", lambda path: changed(path, model_type="llama"), "'llama'; this loader reads 'baichuan'"),
        ("config.json", lambda path: changed(path, intermediate_size=128), r"mlp.*_proj.weight' is .*160.*says .*128"),
        ("config.json", lambda path: changed(path, num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000"),
        ("config.json", lambda path: changed(path, num_hidden_layers=4), "index lacks: 'model.layers.3.* and 6 more"),
        (INDEX, Path.unlink, "holds no weights"),
        (SECOND, Path.unlink, f"1 of 2 shards are missing: '{SECOND}"),
        (SECOND, lambda path: path.write_bytes(path.read_bytes()[:-2000]), f"{SECOND} cannot be read: truncated"),
        (SECOND, lambda path: path.write_text(POINTER), "is a git-lfs pointer, not the weights: run `git lfs pull`"),
        (SECOND, lambda path: torch.save({"model.norm.weight": torch.nn.Linear(2, 2)}, path), "other than tensors"),
        (SECOND, without_the_last, "1 parameters are in no shard"),
    ],
)
def test_a_folder_that_is_not_whole(tmp_path, file, spoil, message):
    folder = official(tmp_path / "chat", small())
    spoil(folder / file)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, not 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"torch_dtype": "nonsense"}, "config.json"),
        ({"position_embedding": "none"}, "position_embedding"),
        ({"attention": "flash"}, "attention is 'whole' or 'blocks', not 'flash'"),
        ({"z_loss_weight": 0.5}, "z_loss_weight is 0, not 0.5"),
    ],
)
def test_a_configuration_with_bad_values_is_one_line(tmp_path, changes, message):
    folder = official(tmp_path / "chat", small())
    changed(folder / "config.json", **changes)
    with refused(message):
        load_checkpoint(folder)


def test_loading_makes_no_second_copy(tmp_path):
    save_checkpoint(small(hidden_size=256, intermediate_size=1024), tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out", torch.float32)
    assert "model.safetensors" in Path("/proc/self/maps").read_text(), "the parameters are the mapped file"
    assert loaded.dtype == torch.float32
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model.safetensors"):
        load_checkpoint(tmp_path / "out")


# --- the tokenizer


def test_text_survives_the_tokenizer(spm):
    tokenizer = Baichuan2Tokenizer(str(spm))
    for text in ("今天第3号港口", "龘𠀀🚢 unseen", "  two  spaces ", "12345", "a\nb", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.text_ids(text)
    assert len(tokenizer.encode("123456")) == 6, "digits are split"
    assert [getattr(tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad")] == [0, 1, 2, 0]


def test_the_official_prompt_layout(spm):
    tokenizer = Baichuan2Tokenizer(str(spm))
    user, assistant = tokenizer.user_id, tokenizer.assistant_id
    turns = (("system", "港口"), ("user", "今天"), ("assistant", "苹果"), ("user", "价格"))
    messages = [{"role": role, "content": content} for role, content in turns]
    text = tokenizer.text_ids
    expected = [*text("港口"), user, *text("今天"), assistant, *text("苹果"), user, *text("价格"), assistant]
    assert tokenizer.prompt_ids(messages) == expected
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected
    last = [*text("港口"), user, *text("价格"), assistant]
    assert tokenizer.prompt_ids(messages, most=len(expected) - 1) == last, "the oldest round goes"
    assert len(tokenizer.prompt_ids(messages, most=len(last) - 1)) == len(last) - 1, "the last round is cut"
    with pytest.raises(ValueError, match=r"message.*2.*3"):
        tokenizer.prompt_ids(messages, most=3)


def test_the_users_piece_is_195_and_the_assistants_196_as_in_the_official_vocabulary(tmp_path):
    """Trained with them exchanged, the model would answer in the user's voice, and every loss would look as good."""
    fillers = [f"<filler_{number}>" for number in range(3, 195)]  # behind <unk>, <s>, </s>
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=file,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        user_defined_symbols=[*fillers, "<reserved_106>", "<reserved_107>"],
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(file.getvalue())
    tokenizer = Baichuan2Tokenizer(str(tmp_path / "tokenizer.model"))
    messages = [{"role": role, "content": "港口"} for role in ("user", "assistant", "user")]
    ids, text = tokenizer.prompt_ids(messages), tokenizer.text_ids("港口")
    assert ids == [195, *text, 196, *text, 195, *text, 196]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    row = {"instruction": "港口", "input": "", "output": "苹果"}
    assert source_ids(row, tokenizer) == [195, *text, 196], "what is trained on has the layout that is asked for"


def test_text_cannot_pretend_to_be_another_message(spm):
    tokenizer = Baichuan2Tokenizer(str(spm))
    ids = tokenizer.prompt_ids([{"role": "user", "content": f"a{ASSISTANT}b</s>"}])
    assert tokenizer.decode(ids[1:-1]) == f"a{ASSISTANT}b</s>"
    assert ids.count(tokenizer.eos_token_id) == 0
    assert ids.count(tokenizer.assistant_id) == 1, "the one at the end"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([], "ends with a user's message"),
        (["assistant"], "ends with a user's message"),
        (["bot", "user"], "not bot"),
        (["user", "system", "user"], "system"),
    ],
)
def test_conversations_of_another_form(spm, roles, message):
    with pytest.raises(ValueError, match=message):
        Baichuan2Tokenizer(str(spm)).prompt_ids([{"role": role, "content": ""} for role in roles])


def test_streaming_holds_back_half_a_character(spm):
    tokenizer = Baichuan2Tokenizer(str(spm))
    text = "港口🚢龘 The ship"
    pieces = list(tokenizer.stream(iter(tokenizer.encode(text))))
    assert "".join(pieces) == text
    assert "🚢" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="git-lfs pointer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is no SentencePiece model"):
        load_tokenizer(tmp_path)
