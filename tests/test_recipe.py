"""Recipes: the article's settings verbatim, round trips, typos named, steps as the Trainer counts them."""

import copy
import dataclasses
import re
from types import SimpleNamespace

import pytest
from conftest import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pardemo.finetune import recipe as recipes
from pardemo.finetune import strict_yaml

ARTICLE = "baichuan2-13b-lora-a800x8"
#: The article's command: flag, value as it stands there, section and key here; most keys are the flag itself.
COMMAND = [
    ("--num_gpus", "8", "world.ranks"),
    ("--cutoff_len", "1024", "data.cutoff_len"),
    ("--learning_rate", "1e-05", "train.learning_rate"),
    ("--num_train_epochs", "5.0", "train.num_train_epochs"),
    ("--max_samples", "100000", "data.max_samples"),
    ("--per_device_train_batch_size", "8", "train.per_device_train_batch_size"),
    ("--gradient_accumulation_steps", "4", "train.gradient_accumulation_steps"),
    ("--lr_scheduler_type", "cosine", "train.lr_scheduler_type"),
    ("--max_grad_norm", "1.0", "train.max_grad_norm"),
    ("--logging_steps", "5", "train.logging_steps"),
    ("--save_steps", "800", "train.save_steps"),
    ("--warmup_steps", "0", "train.warmup_steps"),
    ("--lora_rank", "8", "lora.r"),
    ("--lora_dropout", "0.1", "lora.lora_dropout"),
    ("--lora_target", "W_pack", "lora.target_modules"),
    ("--output_dir", "saves/Baichuan2-13B-Chat/lora/2023-10-08-18-20-07", "output_dir"),
    ("--fp16", "True", "train.fp16"),
    ("--dataset", "summary_instruction_train", "data.train"),
    ("--model_name_or_path", "Baichuan2-13B-Chat", "model.path"),
    ("--deepspeed", "ds_config.json", "deepspeed"),
]
#: Flags of it that need no key; the recipe says why of each.
WITHOUT_KEY = ["--stage", "--do_train", "--finetuning_type", "--template", "--plot_loss", "--overwrite_cache",
               "--resume_lora_training", "--flash_attn", "--master_port"]  # fmt: skip
#: What the command does not print, as its tool had it on that day.
INFERRED = {
    "lora.lora_alpha": 32, "train.activation_checkpointing": True, "train.seed": 42, "predict.do_sample": True,
    "predict.temperature": 0.95, "predict.top_p": 0.7, "predict.top_k": 50, "predict.max_new_tokens": 512,
    "predict.batch": 8, "data.valid": None, "data.packing": False, "data.group_by_length": False,
    "train.eval_steps": None, "train.max_steps": None, "train.save_total_limit": None,
    "train.early_stopping_patience": None,
}  # fmt: skip


def at(value, key):
    for part in key.split("."):
        value = value[part]
    return value


def leaves(value, above=""):
    """Dotted keys to values."""
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in leaves(inner, f"{above}.{name}".lstrip(".")).items()}
    return {above: value}


@pytest.fixture(scope="module")
def article():
    return recipes.to_dict(recipes.load(ARTICLE))


@pytest.fixture(scope="module")
def tiny():
    return recipes.load("tiny-cpu")


@pytest.mark.parametrize(("flag", "value", "key"), COMMAND)
def test_the_articles_command_is_in_its_recipe_verbatim(article, flag, value, key):
    ours = at(article, key)
    if flag == "--dataset":
        assert ours == f"data/{value}.json"  # --dataset_dir data
    elif flag == "--model_name_or_path":
        assert ours.rpartition("/")[2] == value
    elif flag == "--deepspeed":
        assert ours["zero_optimization"]["stage"] == 2
    elif isinstance(ours, list):
        assert ours == [value]
    else:
        assert ours == type(ours)(value)


def test_what_the_article_does_not_print_is_marked_as_inferred(article):
    for key, value in INFERRED.items():
        assert at(article, key) == value, key
    printed = {key for _, _, key in COMMAND}
    named_here = {"model.loss_head", "model.attention", "data.test", "world.device", "train.bf16"}
    for key in leaves({k: v for k, v in article.items() if k != "deepspeed"}):
        assert key in printed or key in INFERRED or key in named_here, key
    text = recipes.source(ARTICLE)
    for key in [*INFERRED, "data.test"]:
        (line,) = re.findall(rf"^  {key.partition('.')[2]}: .*$", text, re.MULTILINE)
        assert "# inferred" in line, key
    assert re.search(r"# inferred, all of it.*\n(#.*\n)+deepspeed:", text)
    comment = text.partition("model:")[0]
    assert all(flag in comment for flag in WITHOUT_KEY)
    deepspeed = article["deepspeed"]
    assert deepspeed["fp16"]["enabled"] == "auto"
    zero = {"stage": 2, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8, "overlap_comm": False,
            "reduce_scatter": True, "contiguous_gradients": True}  # fmt: skip
    assert deepspeed["zero_optimization"].items() >= zero.items()
    assert "optimizer" not in deepspeed  # so that it is the Trainer's AdamW


def changed_keys(*names):
    before, after = (leaves(recipes.to_dict(recipes.load(name))) for name in names)
    return {key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...)}


def test_the_one_to_run_differs_in_precision_and_in_the_learning_rate_of_lora():
    changed = changed_keys(ARTICLE, "baichuan2-13b-lora-bf16")
    assert {key for key in changed if not key.startswith(("deepspeed.fp16.", "deepspeed.bf16."))} == {
        "train.fp16", "train.bf16", "train.learning_rate", "train.warmup_steps", "output_dir",
    }  # fmt: skip
    train, article = recipes.load("baichuan2-13b-lora-bf16").train, recipes.load(ARTICLE).train
    assert train.precision == "bf16"
    assert train.learning_rate == 10 * article.learning_rate
    steps = recipes.steps(recipes.load("baichuan2-13b-lora-bf16"), 80_000).total
    assert train.warmup_steps == round(0.03 * steps)
    reasons = recipes.source("baichuan2-13b-lora-bf16")
    for reason in ("65,504", "2305.14314", "the article: 1e-05", "--set train.learning_rate=1e-05"):
        assert reason in reasons
    assert "take baichuan2-13b-lora-bf16" in recipes.source(ARTICLE)


def test_what_the_other_recipes_change():
    assert changed_keys("baichuan2-13b-lora-bf16", "baichuan2-7b-lora") == {
        "model.path", "train.gradient_accumulation_steps", "world.ranks", "data.group_by_length", "output_dir",
    }  # fmt: skip
    assert {key for key in changed_keys(ARTICLE, "tiny-cpu") if key.startswith("lora.")} == {"lora.lora_dropout"}
    rows = {row["name"]: row for row in recipes.listing()}
    assert list(rows) == recipes.names() == [ARTICLE, "baichuan2-13b-lora-bf16", "baichuan2-7b-lora", "tiny-cpu"]
    assert [row["samples a step"] for row in rows.values()] == [256, 256, 256, 16]
    assert all(row["about"] for row in rows.values())


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_says_every_key_and_comes_back_as_saved(name, tmp_path):
    loaded = recipes.load(name)
    written = strict_yaml.parse(recipes.source(name))
    assert leaves(written).keys() == leaves(recipes.to_dict(loaded)).keys()
    recipes.save(loaded, tmp_path / "copy.yaml")
    assert recipes.load(tmp_path / "copy.yaml") == loaded
    assert [path.name for path in tmp_path.iterdir()] == ["copy.yaml"]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_passes_and_the_trainer_fills_in_all_that_is_auto(name):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    loaded = recipes.load(name)
    train, on_cpu = loaded.train, name == "tiny-cpu"
    recipes.preflight(loaded, on_cpu)
    filled = HfTrainerDeepSpeedConfig(copy.deepcopy(loaded.deepspeed))
    arguments = SimpleNamespace(
        world_size=loaded.world.ranks, per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps, max_grad_norm=train.max_grad_norm,
        learning_rate=train.learning_rate, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0,
        save_on_each_node=False, fp16=train.fp16, fp16_full_eval=False, bf16_full_eval=False,
        bf16=train.bf16, get_warmup_steps=lambda total: train.warmup_steps,
    )  # fmt: skip
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, None, 100)
    unset_hf_deepspeed_config()
    assert "auto" not in leaves(filled.config).values()
    assert filled.config["gradient_clipping"] == train.max_grad_norm
    assert str(filled.dtype()).endswith({"fp32": "float32", "fp16": ".float16", "bf16": "bfloat16"}[train.precision])


def test_keys_are_the_names_of_trainer_peft_and_transformers():
    from peft import LoraConfig
    from transformers import GenerationConfig, TrainingArguments

    def fields(kind):
        return {field.name for field in dataclasses.fields(kind)}

    assert fields(recipes.Train) - fields(TrainingArguments) == {"early_stopping_patience"}
    assert fields(recipes.Lora) <= fields(LoraConfig)
    assert fields(recipes.Predict) - vars(GenerationConfig()).keys() == {"batch"}


WRONG = [
    ("train.learning_rte=1", "train has no key 'learning_rte'; did you mean 'learning_rate'?"),
    ("lroa.r=4", "a recipe has no key 'lroa'; did you mean 'lora'?"),
    ("learning_rate=1", "a recipe has no key 'learning_rate'; did you mean 'train.learning_rate'?"),
    ("train.qqqqq=1", "train has no key 'qqqqq'; there are learning_rate, lr_scheduler_type"),
    *((f"{old}=1", f"has no key {old.partition('.')[2]!r}; it is {new} now") for old, new in recipes.RENAMED.items()),
    ("train.learning_rate=fast", "train.learning_rate must be a valid number, not 'fast'"),
    ("train.learning_rate=.inf", "train.learning_rate must be a finite number, not inf"),
    ("train.num_train_epochs=null", "train: num_train_epochs or max_steps has to be given"),
    ("train.lr_scheduler_type=cosin", "train.lr_scheduler_type must be 'linear', 'cosine'"),
    ("train.early_stopping_patience=3", "early_stopping_patience needs eval_steps"),
    ("train.eval_steps=3", "train.eval_steps needs data.valid"),
    ("train=3", "train must be a section of keys, not 3"),
    ("train.seed.x=3", "train.seed is a value, not a section"),
    ("data.packing=true", "packing and group_by_length exclude one another"),
    ("lora.target_modules=W_pack", "lora.target_modules must be a valid list, not 'W_pack'"),
    ("lora.target_modules=[a", "expected ',' or ']'"),
    ("deepspeed.gradient_clipping=2", "deepspeed.gradient_clipping is 2, but train's max_grad_norm is 1.0: make it"),
    ("deepspeed.train_batch_size=99", "but train's samples of a step is 16"),
    ("deepspeed.scheduler.type=WarmupLR", "deepspeed.scheduler would replace train.lr_scheduler_type"),
    ("deepspeed={}", "deepspeed.gradient_clipping has to be given"),
    ("nothing", "--set takes KEY=VALUE"),
]


@pytest.mark.parametrize(("assignment", "message"), WRONG)
def test_a_wrong_assignment_is_named_in_one_line(tiny, assignment, message):
    with refused(message) as error:
        recipes.override(tiny, [assignment])
    assert "--set" in str(error.value)


def test_an_override_is_typed_and_leaves_the_rest(tiny):
    assignments = ["train.learning_rate=2e-4", "train.max_steps=7", "output_dir=2023",
                   "lora.target_modules=[W_pack, o_proj]", "deepspeed.zero_optimization.stage=3",
                   "deepspeed.gradient_clipping=1.0", "data.max_samples=null"]  # fmt: skip
    changed = recipes.override(tiny, assignments)
    assert (changed.train.learning_rate, changed.train.max_steps, changed.output_dir) == (2e-4, 7, "2023")
    assert changed.lora.target_modules == ["W_pack", "o_proj"]
    before, after = leaves(recipes.to_dict(tiny)), leaves(recipes.to_dict(changed))
    names = {text.partition("=")[0] for text in assignments} - {"data.max_samples"}
    assert {key for key in before if before[key] != after[key]} == names
    assert tiny == recipes.load("tiny-cpu"), "the recipe that was given stays as it was"
    assert recipes.override(tiny, ["deepspeed=null"]).deepspeed is None
    assert recipes.override(tiny, []) == tiny


MINIMAL = """
model: {path: some/model}
data: {train: a.json, test: b.json}
train: {learning_rate: 1e-5, max_steps: 1}
output_dir: 2023-10-08
"""


def test_a_short_file_takes_defaults_and_numbers_are_numbers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    loaded = recipes.load(path)
    assert loaded.train.learning_rate == 1e-5
    assert loaded.output_dir == "2023-10-08"
    assert loaded.deepspeed is None
    assert loaded.lora == recipes.load(ARTICLE).lora


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("learning_rate: 1e-5, ", ""), "train.learning_rate is missing"),
        (("max_steps: 1", "max_steps: 1, max_steps: 2"), "line 4: 'max_steps' stands twice"),
        (("max_steps: 1", "epochs: 1"), "train has no key 'epochs'; it is train.num_train_epochs now"),
        (("max_steps: 1", "1: 1"), "1 is no name for a key"),
        (("model:", "model: ["), "line 3: expected ',' or ']'"),
        (("a.json", "!!python/object/apply:os.system [ls]"), "could not determine a constructor"),
        ((MINIMAL, ""), "the recipe must be a section of keys, not None"),
        ((MINIMAL, "\x00"), "special characters are not allowed"),
        ((MINIMAL, "[" * 5000), "nested too deeply"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(tmp_path, change, message):
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL.replace(*change))
    with refused(message) as error:
        recipes.load(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_not_there_or_not_utf8(tmp_path):
    with pytest.raises(OSError, match=r"mine\.yaml"):
        recipes.load(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_bytes("output_dir: 今".encode("gbk"))
    with pytest.raises(ValueError, match=r"mine\.yaml is not UTF-8"):
        recipes.load(tmp_path / "mine.yaml")
    with pytest.raises(ValueError, match=r"'tiny-gpu'.*'tiny-cpu'"):
        recipes.load("tiny-gpu")
    with pytest.raises(ValueError, match=r"'qqq'.*baichuan2-13b-lora-a800x8"):
        recipes.load("qqq")


#: Without control characters and Unicode's line ends, some of which PyYAML itself does not bring back.
LINE = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
LIKE_NUMBERS = st.text("-+.0123456789e:_", max_size=8)


@settings(max_examples=400, deadline=None)
@given(st.floats(allow_nan=False) | st.integers() | LINE | LIKE_NUMBERS | st.booleans())
@example("1e5")
def test_what_is_dumped_is_read_back_the_same(value):
    read = strict_yaml.parse(strict_yaml.dump({"key": [value, None]}))
    assert read == {"key": [value, None]}
    assert type(read["key"][0]) is type(value)


def test_what_is_refused_before_any_rank_starts(tiny):
    with pytest.raises(ValueError, match=r"fp16.*DeepSpeed.*CPU.*bf16"):
        recipes.preflight(recipes.load(ARTICLE), on_cpu=True)
    wrong = recipes.override(tiny, ["deepspeed.zero_optimization.stge=2"])
    with pytest.raises(ValueError, match=r"zero_optimization.*'stge'.*'stage'"):
        recipes.preflight(wrong, on_cpu=True)


def test_the_articles_steps():
    job = recipes.load(ARTICLE)
    assert recipes.steps(job, 80_000) == (313, 1565)
    assert recipes.steps(job, 200_000) == recipes.steps(job, 100_000), "max_samples"
    assert recipes.steps(recipes.override(job, ["train.max_steps=20"]), 80_000) == (313, 20)
    with pytest.raises(ValueError, match=r"samples.*1.*0"):
        recipes.steps(job, 0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.3, 1, 2.5]))
def test_steps_are_those_of_the_trainer(samples, batch, ranks, accumulation, epochs):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler
    from transformers import Trainer

    shard = BatchSamplerShard(BatchSampler(range(samples), batch, drop_last=False), ranks, 0)
    arguments = SimpleNamespace(max_steps=-1, gradient_accumulation_steps=accumulation, num_train_epochs=epochs)
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda _: batch * ranks * accumulation, get_sp_size=lambda: 1,
        num_examples=lambda _: samples,
    )  # fmt: skip
    _, per_epoch, *_, total = Trainer.set_initial_training_values(trainer, arguments, shard)
    job = recipes.override(recipes.load("tiny-cpu"), [
        f"train.per_device_train_batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}",
        f"train.num_train_epochs={epochs}",
    ])  # fmt: skip
    assert recipes.steps(job, samples, ranks) == (per_epoch, total)
