"""Layers that are alike are run once: what is told of many is what a dry run of all of them finds, event by event."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, LlamaConfig

from pardemo import project
from pardemo.baichuan2 import Baichuan2Config
from pardemo.cli import main
from pardemo.planner import composed, examples, fake, gradient_buckets, hardware, layers, memory, table
from pardemo.planner.dryrun import dry_run
from pardemo.planner.job import RankJob
from pardemo.planner.memory import Curve
from pardemo.planner.operation_cache import MISSING, VIEWS, OperationCache
from pardemo.planner.repeats import Irregular, MemoryEvent, Stretch, insertions
from pardemo.planner.samples import AnyBatch

LAYERS = 9
SAMELY = ("flops", "traffic", "step_traffic", "kernels", "sent", "sizes", "lines", "phases", "modules", "peak_phase",
          "peak_module", "building_bytes", "resident_bytes", "params", "trained_params")  # fmt: skip


def job(name, engine, lora, checkpointing, micro_batches):
    one = examples.job(name, engine, 1 if engine == "plain" else 4, lora, checkpointing)
    config = one.config
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = LAYERS * config.layer_types[:1]
    return one.but(config=config, labels=1.0, on_gpu=True, clipping=1.0, accumulation=micro_batches)


def step(found):
    """The second step's events, storages numbered as they appear; before it, what is alive when it begins."""
    who, nbytes = found.changes.T.tolist()
    first, held = found.first_event, {}
    for one, change in zip(who[:first], nbytes[:first], strict=True):
        held[one] = held.get(one, 0) + change
    events = [(one, change) for one, change in held.items() if change] + list(
        zip(who[first:], nbytes[first:], strict=True)
    )
    numbers: dict[int, int] = {}
    lives = found.lives
    return [
        (numbers.setdefault(one, len(numbers)), change, int(found.line_of[one]), lives[one].phase, lives[one].module,
         lives[one].origin, lives[one].kind)
        for one, change in events
    ]  # fmt: skip


def assert_same(told, whole):
    assert step(told) == step(whole)
    for name in SAMELY:
        assert getattr(told, name) == getattr(whole, name), name
    assert memory.reserved_of(told) == memory.reserved_of(whole)


@pytest.mark.parametrize(
    ("name", "engine", "lora", "checkpointing", "micro_batches"),
    [
        ("llama", "plain", False, False, 2),
        ("baichuan2", "plain", True, True, 2),
        ("qwen2", "fsdp2", False, True, 2),
        ("baichuan2", "fsdp2", True, False, 1),
        ("llama", "fsdp2", False, False, 1),
        ("qwen2", "zero-0", True, True, 2),
        ("llama", "zero-0", False, False, 1),
    ],
)
def test_of_few_layers_is_of_all(name, engine, lora, checkpointing, micro_batches):
    one = job(name, engine, lora, checkpointing, micro_batches)
    assert_same(layers.stretched(one).footprint(3), dry_run(one.but(batch=3)))


def test_buckets_that_go_by_elements_and_not_by_layers():
    """Stage 0 sums 500 million elements at a time: of 202 million a layer, 32,000 × 4,096 at each end."""
    config = LlamaConfig(num_hidden_layers=11, max_position_embeddings=4096)
    one = RankJob(config, batch=2, sequence=512, engine="zero-0", ranks=8, accumulation=2, clipping=1.0)
    whole = dry_run(one)
    assert len(gradient_buckets.buckets_in(whole).elements) > 4
    assert_same(layers.stretched(one).footprint(2), whole)


#: Buckets that end within layers, sub-groups too; of stage 3 little that is kept or gathered ahead.
SMALL = examples.BUCKETS | {
    "sub_group_size": 200_000,
    "stage3_max_live_parameters": 1 << 19,
    "stage3_max_reuse_distance": 1 << 19,
}


@pytest.mark.parametrize(
    ("name", "engine", "lora", "checkpointing", "micro_batches"),
    [
        ("llama", "zero-1", False, False, 2),
        ("baichuan2", "zero-1", True, True, 1),
        ("qwen2", "zero-2", False, True, 2),
        ("baichuan2", "zero-2", True, False, 1),
        ("llama", "zero-2", False, False, 1),
        ("baichuan2", "zero-3", False, True, 2),
        ("qwen2", "zero-3", False, False, 1),
        ("llama", "zero-3", True, True, 1),
    ],
)
def test_an_engine_that_goes_by_elements(name, engine, lora, checkpointing, micro_batches):
    """Its own work with all layers, theirs from a few of them; the head of Qwen2 is its embedding."""
    one = job(name, engine, lora, checkpointing, micro_batches).but(zero=SMALL)
    one.config.tie_word_embeddings = name == "qwen2"
    told = layers.stretched(one, layers._needed(one))
    assert_same(told.footprint(3), dry_run(one.but(batch=3)))


def test_a_partition_that_ends_anywhere():
    """The last of 8 is padded, and so is what buckets are reduced in."""
    one = job("llama", "zero-2", False, False, 1).but(
        ranks=8, zero={"reduce_bucket_size": 300_001, "overlap_comm": True}
    )
    assert_same(layers.stretched(one).footprint(2), dry_run(one.but(batch=2)))


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gpt2"])
def test_other_architectures(kind):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "num_hidden_layers": LAYERS}
    heads = {"num_key_value_heads": 2, "intermediate_size": 128}
    more = {"qwen3": heads | {"head_dim": 16}, "mistral": heads | {"sliding_window": None}}
    one = RankJob(CONFIG_MAPPING[kind](**sizes, **more.get(kind, {})), batch=2, sequence=32, accumulation=2)
    assert_same(layers.stretched(one).footprint(2), dry_run(one))


def test_no_architecture_is_taken_for_regular_that_is_not_tested_here():
    assert {"qwen3", "mistral", "gpt2", "llama", "qwen2", "baichuan"} == set(layers.ALIKE)


@pytest.mark.parametrize(
    ("name", "engine", "lora", "labels"),
    [("llama", "zero-1", False, 1.0), ("baichuan2", "zero-2", True, 1.0), ("baichuan2", "zero-2", True, 0.3)],
)
def test_of_any_number_of_samples_from_one_run(name, engine, lora, labels):
    one = examples.job(name, engine, 4, lora, True).but(labels=labels)
    if labels < 1:  # logits there alone: 38 of a sample's 127 tokens
        one = one.but(config=Baichuan2Config(**one.config.to_dict() | {"loss_head": "labels"}))
    found = AnyBatch.of(dry_run(one.but(batch=layers.SAMPLES[0])))
    for samples in (2, 5):
        whole = dry_run(one.but(batch=samples))
        told = found.footprint(samples)
        assert (told.changes == whole.changes).all()
        assert_same(told, whole)


def test_a_curve_is_of_both_and_exact():
    one = examples.job("llama", "zero-3", 4, False, True).but(labels=1.0)
    curve = Curve(one)
    exact = Curve.at_one(one.but(batch=7))
    assert curve.affine
    assert curve.estimate(7) == exact.estimate(7)


def test_what_the_runs_do_not_show_is_run_whole(monkeypatch):
    one = job("llama", "zero-2", False, True, 1)
    seen = []
    monkeypatch.setattr(layers, "dry_run", lambda job: seen.append(job.config.num_hidden_layers) or dry_run(job))
    layers.any_batch(one)
    assert seen == [LAYERS]  # so few that all are run
    monkeypatch.setattr(layers, "stretched", lambda job: (_ for _ in ()).throw(Irregular("so")))
    layers.any_batch(job("qwen2", "plain", False, True, 1))
    assert seen == [LAYERS, LAYERS]


def test_an_engine_that_does_something_else_without_layers_is_refused(monkeypatch):
    one = job("llama", "zero-2", False, True, 1)
    with pytest.raises(Irregular, match="no whole numbers"):
        layers.stretched(one.but(ranks=3))
    own = composed.dry_run
    monkeypatch.setattr(composed, "_ENGINES", {})
    other = {"reduce_bucket_size": 1 << 19}
    monkeypatch.setattr(composed, "dry_run", lambda job, order: own(job.but(zero=job.zero | other), order))
    with pytest.raises(Irregular, match="something else where there are layers"):
        layers.stretched(one)


def events(text):
    """A letter is a storage that is made, its capital that it goes: each word of its own size."""
    made, found = {}, []
    for letter in text:
        new = letter.islower()
        key = letter.lower()
        if new:
            made[key] = len(found)
        found.append(MemoryEvent((new, key), made[key], (1 if new else -1, False), None))
    return [found]


@pytest.mark.parametrize(
    ("few", "many", "told"),
    [
        ("xaAaAyY", "xaAaAbByY", "a layer that is like no other"),
        ("xaAaAyY", "xaAyY", "the deeper run lacks something"),
        ("aA", "aAzZ", "a layer that is like no other"),
    ],
)
def test_what_does_not_repeat_is_refused(few, many, told):
    with pytest.raises(Irregular, match=told):
        Stretch(events(few), events(many))


def test_what_is_more_is_found_where_it_repeats():
    assert insertions([0, 1, 2, 1, 2, 9], [0, 1, 2, 1, 2, 1, 2, 9]) == [(5, 2)]
    # two rows side by side: each its own
    assert insertions([1, 1, 2, 2, 3], [1, 1, 1, 2, 2, 2, 3]) == [(2, 1), (5, 1)]
    assert insertions([1, 2], [1, 2]) == []


def test_an_operation_known_makes_what_torch_makes():
    """New tensors, views at an offset, several at once, and in place."""
    with fake.world(RankJob(examples.config("llama"))) as mode:
        cache = OperationCache(mode)
        a = torch.empty(6, 8, dtype=torch.bfloat16)
        aten = torch.ops.aten
        for func, args, kwargs in (
            (aten.mm.default, (a, a.t()), {}),
            (aten.slice.Tensor, (a, 0, 2, 4), {}),
            (aten.split.Tensor, (a, 3), {}),
            (aten.add_.Tensor, (a, a), {}),
            (aten._to_copy.default, (a,), {"dtype": torch.float32}),
            (aten.native_layer_norm.default, (a, [8], None, None, 1e-5), {}),
        ):
            key = cache.key(func, args, kwargs)
            out = func(*args, **kwargs)
            cache.learn(key, func, args, kwargs, out)
            again = cache.again(key, args)
            assert again is not MISSING, func
            pairs = zip(again, out, strict=True) if isinstance(out, (list, tuple)) else [(again, out)]
            assert type(again) is type(out)
            for mine, torchs in pairs:
                told = [
                    (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes())
                    for t in (mine, torchs)
                ]
                assert told[0] == told[1]
                shares = [t.untyped_storage() is a.untyped_storage() for t in (mine, torchs)]
                assert shares[0] == shares[1]
        assert cache.key(aten.mm.default, (a, torch.nn.Module()), {}) is None


def test_a_view_is_what_torch_makes():
    """Below autograd, where the recorder asks for it."""
    aten, told, real = torch.ops.aten, [], torch.zeros(2, 2)

    def what_it_is(t):
        return (
            type(t), tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.fake_device, t.requires_grad,
            torch._C._dispatch_key_set(t), t.untyped_storage() is flat.untyped_storage(),
        )  # fmt: skip

    class Both(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in VIEWS:
                told.append((func, what_it_is(out), what_it_is(cache.view(func, args))))
            return out

    with fake.world(RankJob(examples.config("llama"))) as mode:
        cache = OperationCache(mode)
        flat = torch.empty(64, dtype=torch.bfloat16)
        x = flat[8:56].view(6, 8)
        with Both():
            for func, *args in (
                (aten.view.default, x, [48]), (aten._unsafe_view.default, x, [2, 24]), (aten.slice.Tensor, x, 0, 1, 3),
                (aten.slice.Tensor, x, 1, 2, 2**63 - 1, 2), (aten.slice.Tensor, x, -1, -3), (aten.detach.default, x),
                (aten.t.default, x), (aten.transpose.int, x, 0, -1), (aten.expand.default, flat[:1], [5]),
                (aten.unsqueeze.default, x, -1), (aten.select.int, x, 0, -2),
            ):  # fmt: skip
                func(*args)
        assert cache.view(aten.t.default, (real,)) is MISSING, "not fake"
    assert {func for func, *_ in told} == VIEWS
    for func, torchs, mine in told:
        assert mine == torchs, func


def test_the_same_plan_with_and_without(monkeypatch):
    """Each number of each row."""
    one = job("baichuan2", "plain", True, True, 1).but(batch=1)
    one.config.num_hidden_layers = 2 * layers.FEW + 1
    cluster = table.Hardware(hardware.gpu("A800-80GB"), 4)
    asked = table.Request(one, cluster, 8, 10, engines=("zero-0", "fsdp2"), checkpointing=(True,))
    monkeypatch.setattr(memory, "_DONE", {})
    monkeypatch.setattr(memory, "_ANY", {})
    told = table.plan(asked)
    monkeypatch.setattr(memory, "_DONE", {})
    monkeypatch.setattr(memory, "_ANY", {})
    monkeypatch.setattr(layers, "may_be_any_batch", lambda job: False)
    whole = table.plan(asked)
    assert told.rows == whole.rows


MOE = {
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MOE)
def test_a_config_with_experts_is_planned(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(project, "available_cores", lambda: 1)  # two small runs: no processes for them
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    CONFIG_MAPPING[kind](**sizes, vocab_size=512, **MOE[kind]).save_pretrained(tmp_path)
    how = "--full --gpus 1 --zero 0 --sequence 64 --batch 2 --per-step 2 --checkpointing on --json"
    assert main(["plan", "--model", str(tmp_path), *how.split()]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["fits"]
    assert row["lines"]["parameters"] > 0


def test_lora_of_experts_asks_where_it_goes(tmp_path, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    CONFIG_MAPPING["deepseek_v3"](**sizes, vocab_size=512, **MOE["deepseek_v3"]).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "deepseek_v3: name LoRA's modules (--target) among " in error
    assert error.count("\n") == 1
