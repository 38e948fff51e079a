"""Prediction, export and chat: the same tokens in whatever batch and on however many ranks; folders; faults."""

import io
import json
import os
import shutil
import signal
import sys
import threading
from unittest import mock

import pytest
import small_baichuan2
import torch
from conftest import says

from pardemo import World, cli, project
from pardemo.baichuan2 import load_checkpoint, load_tokenizer, save_checkpoint
from pardemo.finetune import models
from pardemo.finetune import recipe as recipes
from pardemo.finetune.models import export
from pardemo.finetune.predict import batches_of, chat, deal, generate, predict_on, prompts_of, read_predictions, steps
from pardemo.finetune.recipe import Predict

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = small_baichuan2.rows(13)
FULL_DISK = mock.Mock(side_effect=OSError(28, "No space left on device"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return small_baichuan2.folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def small(base):
    return load_checkpoint(base), load_tokenizer(base)


@pytest.fixture(scope="module")
def recipe_file(base, tmp_path_factory):
    return small_baichuan2.recipe_file(tmp_path_factory.mktemp("recipe"), base)


@pytest.fixture(scope="module")
def recipe(recipe_file):
    return recipes.load(recipe_file)


@pytest.fixture(scope="module")
def adapter(recipe, tmp_path_factory):
    return small_baichuan2.adapter(tmp_path_factory.mktemp("adapter") / "adapter", recipe)


@pytest.fixture(scope="module")
def ranks():
    """Two ranks that have loaded what they need before they are forked, as the command's."""
    with World(2, preload=["pardemo.finetune.predict"], timeout_s=180) as world:
        yield world


def predict(rows, model, tokenizer, settings, seed=0, order="length", as_text=False):
    """The tokens of each row, in this process."""
    prompts, _ = prompts_of(rows, tokenizer, model.config.model_max_length, settings, as_text)
    batches = batches_of([len(prompt) for prompt in prompts], settings.batch, order)
    tokens, _ = generate(model, prompts, batches, settings, tokenizer.eos_token_id, seed)
    return [tokens[row] for row in range(len(rows))]


# --- the same tokens


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_greedy_tokens_are_those_of_transformers_one_by_one(small, position):
    tokenizer, settings = small[1], Predict(max_new_tokens=16, batch=5)
    model = small_baichuan2.model(position)
    model.generation_config.eos_token_id = None  # the end is chosen below
    prompts, _ = prompts_of(ROWS, tokenizer, 400, settings)
    how = {"max_new_tokens": 16, "do_sample": False}
    plain = [model.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist() for ids in prompts]
    # an EOS that is often met, so that rows end at different steps
    every = [token for tokens in plain for token in tokens]
    eos = max(set(every), key=every.count)
    expected = [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in plain]
    assert len({len(tokens) for tokens in expected}) > 2
    ours = [[] for _ in prompts]
    for step in steps(model, prompts, settings, eos, ()):
        for row, token in step:
            ours[row].append(token)
    assert ours == expected


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 1.3, "top_k": 0}, {"do_sample": True}])
def test_batches_and_order_change_nothing(small, how):
    tokens, *others = (
        predict(ROWS, *small, Predict(max_new_tokens=10, batch=batch, **how), seed=3, order=order)
        for batch, order in ((1, "file"), (5, "length"), (5, "file"), (13, "length"))
    )
    assert others == [tokens] * 3
    again = predict(ROWS, *small, Predict(max_new_tokens=10, **how), seed=4)
    assert (again == tokens) == (not how), "the seed is of sampling"


def test_what_the_folder_says_of_generation_is_not_greedy(small):
    model, tokenizer = small
    assert model.generation_config.repetition_penalty == 1.9
    clean = small_baichuan2.model()
    settings = Predict(max_new_tokens=10)
    assert predict(ROWS, model, tokenizer, settings) == predict(ROWS, clean, tokenizer, settings)


def test_sampling_draws_what_temperature_top_k_and_top_p_leave(small):
    model, tokenizer = small
    prompts, _ = prompts_of(ROWS[:1], tokenizer, 400, Predict(max_new_tokens=1))
    with torch.no_grad():
        logits = model(torch.tensor(prompts)).logits[0, -1].double() / 1.5
    best = logits.topk(6)
    probabilities = best.values.softmax(-1)
    kept = int((probabilities.cumsum(-1) - probabilities < 0.8).sum())
    assert 1 < kept < 6
    expected = (probabilities[:kept] / probabilities[:kept].sum()).tolist()
    settings = Predict(max_new_tokens=1, batch=1000, do_sample=True, temperature=1.5, top_k=6, top_p=0.8)
    drawn = [ids[0] for ids in predict(ROWS[:1] * 4000, model, tokenizer, settings) if ids]
    shares = [drawn.count(token) / len(drawn) for token in best.indices[:kept].tolist()]
    assert sum(shares) == 1
    assert shares == pytest.approx(expected, abs=0.04)  # 5 standard deviations of 4,000 draws


def test_as_text_a_model_goes_on_from_the_input_alone(ranks, recipe, small):
    prompts, _ = prompts_of(ROWS, small[1], 400, recipe.predict, as_text=True)
    assert [small[1].decode(ids) for ids in prompts] == [row["input"] + "\n" for row in ROWS]
    tokens = predict_on(ranks, recipe, None, ROWS, as_text=True).tokens
    assert tokens == predict(ROWS, *models.base(recipe), recipe.predict, as_text=True)
    assert tokens != predict(ROWS, *models.base(recipe), recipe.predict)


def test_two_ranks_and_no_rank_at_all(ranks, recipe, adapter):
    model = models.with_adapter(models.base(recipe)[0], adapter)
    here = predict(ROWS, model, load_tokenizer(recipe.model.path), recipe.predict)
    predictions = predict_on(ranks, recipe, adapter, ROWS)
    assert predictions.tokens == here
    assert predictions.steps == 2
    decode = load_tokenizer(recipe.model.path).decode
    assert predictions.texts == [decode(ids, skip_special_tokens=True) for ids in here]
    without = predict_on(ranks, recipe, None, ROWS[:1])  # one rank has nothing to do
    assert without.tokens != here[:1], "the adapter counts"
    assert without.tokens == predict(ROWS[:1], *models.base(recipe), recipe.predict)
    sampled = recipes.override(recipe, ["predict.do_sample=true", "predict.batch=3"])
    here = predict(ROWS, *models.base(sampled), sampled.predict, seed=sampled.train.seed)
    assert predict_on(ranks, sampled, None, ROWS).tokens == here


def test_batches_of_like_length_are_dealt_evenly():
    lengths = [5, 90, 7, 80, 6, 100, 8, 85]
    assert batches_of(lengths, 3, "file") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    batches = batches_of(lengths, 2, "length")
    assert batches == [[5, 1], [7, 3], [6, 2], [4, 0]]
    assert deal(batches, lengths, 2) == [[[5, 1]], [[7, 3], [6, 2], [4, 0]]]
    assert deal(batches, lengths, 6)[4:] == [[], []]


# --- prompts and models that do not fit


def test_a_prompt_too_long_keeps_its_head(small):
    model, tokenizer = small
    long = ROWS[0] | {"input": "第1号渡口" * 200}
    prompts, cut = prompts_of([long, ROWS[0]], tokenizer, 400, Predict(max_new_tokens=10))
    assert cut == 1
    assert prompts[0] == tokenizer.prompt_ids([{"role": "user", "content": long["instruction"] + long["input"]}])[:390]
    tokens = predict([long, ROWS[0]], model, tokenizer, Predict(max_new_tokens=10))
    assert tokens[1] == predict(ROWS[:1], model, tokenizer, Predict(max_new_tokens=10))[0]
    with pytest.raises(ValueError, match=r"max_new_tokens.*400"):
        predict(ROWS, model, tokenizer, Predict(max_new_tokens=400))
    with pytest.raises(ValueError, match="there is no row"):
        predict([], model, tokenizer, Predict())


def test_an_adapter_of_another_model(recipe, adapter, tmp_path):
    other = small_baichuan2.model(hidden_size=32)
    with pytest.raises(ValueError, match=r"adapter.*mismatch"):
        models.with_adapter(other, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    lame = shutil.copytree(adapter, tmp_path / "lame")
    (lame / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["W_pack", "o_proj"]}))
    with pytest.raises(ValueError, match="Found"):
        models.with_adapter(small_baichuan2.model(), lame)
    (lame / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"adapter.*model"):
        models.with_adapter(small_baichuan2.model(), lame)


# --- pardemo predict


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_the_files_that_predict_writes(recipe_file, recipe, adapter, tmp_path, capsys):
    out = tmp_path / "out"
    set_eight = ("--set", "predict.batch=8")
    assert run("predict", recipe_file, "--adapter", adapter, "--out", out, "--ranks", 2, "--limit", 9, *set_eight) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert says(printed.out, "rouge-l", "9 samples in")
    rows = read_predictions(out / "generated_predictions.jsonl", "prompt", "source")
    assert [row["label"] for row in rows] == [row["output"] for row in ROWS[:9]], "in the file's order"
    assert [row["source"] for row in rows[:2]] == ["even", "odd"]
    assert rows[3]["prompt"] == ROWS[3]["instruction"] + ROWS[3]["input"]
    model = models.with_adapter(models.base(recipe)[0], adapter)
    expected = predict(ROWS[:9], model, load_tokenizer(recipe.model.path), recipe.predict)
    decode = load_tokenizer(recipe.model.path).decode
    assert [row["predict"] for row in rows] == [decode(ids, skip_special_tokens=True) for ids in expected]
    results = json.loads((out / "predict_results.json").read_text())
    assert results["predict_steps_per_second"] == pytest.approx(1 / results["predict_runtime"], rel=0.01, abs=0.001)
    assert run("score", out / "generated_predictions.jsonl", "--json") == 0
    (scored,) = json.loads(capsys.readouterr().out)
    assert all(results[f"predict_{name}"] == scored[name] for name in ("bleu-4", "rouge-1", "char-rouge-l"))
    assert sorted(path.name for path in out.iterdir()) == ["generated_predictions.jsonl", "predict_results.json"]


def test_where_predictions_go_unless_told_and_json_alone_is_printed(recipe_file, recipe, capsys):
    assert run("predict", recipe_file, "--limit", 2, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["samples"] == 2
    assert printed.err == ""
    assert (recipes.locate(recipe.output_dir) / "predict-base" / "predict_results.json").is_file()


def change(recipe_file, tmp_path, **sections):
    values = json.loads(recipe_file.read_text())
    for name, value in sections.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    (tmp_path / "changed.yaml").write_text(json.dumps(values))
    return tmp_path / "changed.yaml"


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        (None, ["--adapter", "{here}"], "is no adapter's folder: it has no adapter_config.json"),
        (shutil.rmtree, [], "is no model folder: it has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), [], "holds no weights"),
        (lambda folder: (folder / "tokenizer.model").unlink(), [], "has no tokenizer.model"),
        (None, ["--data", "{here}/none.json"], "there is no /"),
        (lambda base: (base.parent / "a.json").write_text("[]"), ["--data", "{here}/a.json"], "holds no row"),
        (None, ["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (None, ["--set", "predict.max_new_tokens=400"], "leaves no room for a prompt"),
        (None, ["--out", "{here}/changed.yaml/out"], "Not a directory"),
        (None, ["--set", "predict.max_tokens=4"], "did you mean 'max_new_tokens'"),
    ],
)
def test_errors_before_a_rank_starts(recipe_file, base, tmp_path, monkeypatch, capsys, spoil, more, message):
    monkeypatch.setattr("pardemo.world.World._start", lambda self: pytest.fail("ranks were started"))
    folder = shutil.copytree(base, tmp_path / "base")
    changed = change(recipe_file, tmp_path, model={"path": str(folder)})
    if spoil is not None:
        spoil(folder)
    assert run("predict", changed, "--out", tmp_path / "out", *(text.format(here=tmp_path) for text in more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_rank_that_is_killed_leaves_no_predictions(small, recipe_file, tmp_path, monkeypatch, capsys):
    """A model that never says EOS, and has room for hours of answers, so that the ranks are at work when one dies."""
    endless = load_checkpoint(recipes.load(recipe_file).model.path, model_max_length=10**6)
    endless.lm_head.weight.data[small[1].eos_token_id] = 0
    save_checkpoint(endless, tmp_path / "base", small[1])
    changed = change(recipe_file, tmp_path, model={"path": str(tmp_path / "base")}, predict={"max_new_tokens": 10**5})
    out = tmp_path / "out"
    out.mkdir()
    (out / "predict_results.json").write_text("{}")
    original = World.run

    def run_and_kill(world, *arguments, **named):
        threading.Timer(1.0, lambda: os.kill(world.pids[1], signal.SIGKILL)).start()
        return original(world, *arguments, **named)

    monkeypatch.setattr(World, "run", run_and_kill)
    assert run("predict", changed, "--ranks", 2, "--out", out) == 1
    error = capsys.readouterr().err
    assert says(error, "1", "SIGKILL", "nothing was written")
    assert "Traceback" not in error
    assert [path.name for path in out.iterdir()] == ["predict_results.json"], "what was there, and nothing of this run"


def test_a_full_disk_leaves_the_older_predictions_and_no_results_of_others(recipe_file, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run("predict", recipe_file, "--out", out, "--limit", 2) == 0
    before = (out / "generated_predictions.jsonl").read_bytes()
    monkeypatch.setattr(project.os, "replace", FULL_DISK)
    assert run("predict", recipe_file, "--out", out, "--limit", 3) == 2
    assert says(capsys.readouterr().err, "space", "device")
    assert (out / "generated_predictions.jsonl").read_bytes() == before
    assert [path.name for path in out.iterdir()] == ["generated_predictions.jsonl"], "results would be another run's"


# --- pardemo export


def test_the_exported_model_is_base_and_adapter(recipe, adapter, tmp_path, capsys):
    out = export(recipe, adapter, tmp_path / "merged")
    merged = load_checkpoint(out)
    ids = torch.tensor([load_tokenizer(out).text_ids(small_baichuan2.TEXT[3])])
    base = models.base(recipe)[0]
    with torch.no_grad():
        plain = base(ids).logits
        both = models.with_adapter(base, adapter)(ids).logits
        logits = merged(ids).logits
    torch.testing.assert_close(logits, both, rtol=1e-4, atol=1e-4)
    assert (logits - plain).abs().max() > 0.1
    assert merged.generation_config.top_k == 5
    names = set(load_checkpoint(recipe.model.path).state_dict())
    assert set(merged.state_dict()) == names, "the official names and no other"


def test_what_is_exported_is_read_back_bit_equal(recipe_file, recipe, adapter, base, tmp_path, capsys):
    before = (base / "model.safetensors").read_bytes()
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert run("export", recipe_file, "--adapter", adapter, "--out", tmp_path / dtype, "--dtype", dtype) == 0
        assert "GB, in" in capsys.readouterr().out
        merged = models.with_adapter(models.base(recipe)[0], adapter).merge_and_unload().to(kind)
        exported = load_checkpoint(tmp_path / dtype)
        torch.testing.assert_close(dict(exported.state_dict()), dict(merged.state_dict()), rtol=0, atol=0)
    assert (base / "model.safetensors").read_bytes() == before, "the base is only read"


def test_folders_that_export_does_not_write_to(recipe_file, recipe, adapter, base, tmp_path, capsys):
    out = tmp_path / "out"
    export(recipe, adapter, out)
    command = ["export", recipe_file, "--adapter", adapter, "--out"]
    assert run(*command, out) == 2
    assert says(capsys.readouterr().err, "--overwrite")
    assert run(*command, out, "--overwrite") == 0
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    capsys.readouterr()
    for target, message in (
        (tmp_path / "home", "holds no model (no config.json)"),
        (base, "would replace"),
        (base.parent, "would replace"),
        (adapter, "would replace"),
        (recipe_file, "is a file"),
    ):
        assert run(*command, target, "--overwrite") == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    assert run("export", recipe_file, "--adapter", tmp_path, "--out", tmp_path / "new") == 2
    assert "is no adapter's folder" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_model_that_was_there(recipe, adapter, tmp_path, monkeypatch):
    export(recipe, adapter, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", FULL_DISK)
    with pytest.raises(OSError, match="No space left"):
        export(recipe, adapter, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- pardemo chat


def said(small, lines, settings=None):
    pieces = []
    chat(*small, settings or Predict(max_new_tokens=12), lines, pieces.append)
    return pieces


def answer(small, messages, new=12, most=388):
    model, tokenizer = small
    prompt = tokenizer.prompt_ids(messages, most=most)
    tokens = [token for step in steps(model, [prompt], Predict(max_new_tokens=new), 2, ()) for _, token in step]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_chat_answers_in_pieces_and_remembers_until_it_is_told_to_forget(small):
    first, second = {"role": "user", "content": "渡口"}, {"role": "user", "content": "票价"}
    reply = answer(small, [first])
    next_reply = answer(small, [first, {"role": "assistant", "content": reply}, second])
    pieces = said(small, ["渡口\n", "  \n", "票价\n", "/new\n", "票价\n", "/quit\n", "渡口\n"])
    assert "".join(pieces) == f"{reply}\n{next_reply}\n{answer(small, [second])}\n"
    assert next_reply != answer(small, [second])
    assert len(pieces) > 15, "as they come"


def test_a_long_chat_is_cut_to_what_the_model_can_see(small, monkeypatch):
    seen = []

    def recorded(model, prompts, *rest):
        seen.extend(prompts)
        return steps(model, prompts, *rest)

    monkeypatch.setattr("pardemo.finetune.predict.steps", recorded)
    assert said(small, ["第1号渡口开通夜航" * 8] * 12 + ["第1号" * 300]).count("\n") == 13
    assert all(len(prompt) <= 388 for prompt in seen)
    assert len(seen[-1]) == 388
    assert seen[5].count(small[1].user_id) > 1, "as many rounds as there is room for"
    with pytest.raises(ValueError, match=r"leaves.*message"):
        said(small, ["渡口"], Predict(max_new_tokens=398))


def test_chat_with_an_adapter_and_an_end_of_input(recipe_file, adapter, small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("渡口\n".encode() + b"\xff\n")))
    assert run("chat", recipe_file, "--adapter", adapter) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first != answer(small, [{"role": "user", "content": "渡口"}], 10, 390)


def test_an_interrupted_chat_ends_cleanly(recipe_file, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run("chat", recipe_file) == 0
    assert capsys.readouterr().out == "\n"
