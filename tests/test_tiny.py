"""The tiny Baichuan2: rebuilt alike, its pages exchanged alike, and the one in data/ what it should be."""

import random
from itertools import islice

import tiny_model as tiny
import torch

from pardemo import headlines, project
from pardemo.baichuan2 import load_checkpoint, load_tokenizer

FOLDER = project.root() / "data" / "tiny-baichuan2"


def test_the_same_command_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "BATCH", 4)  # rows of a step; so many that torch's threads still share the work
    for name in ("one", "other"):
        torch.manual_seed(random.randrange(1000))
        tiny.build(tmp_path / name, count=1500, steps=2)
    for file in ("model.safetensors", "tokenizer.model", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_pages_hold_no_test_pair_and_are_exchanged_alike():
    train, test = headlines.corpus(train=300, test=100, style="plain")
    texts = list(islice(tiny.pages(train, 0), 900))
    pages = [text for text in texts if len(set(text.split("\n"))) > 1]
    assert 0.2 < 1 - len(pages) / len(texts) < 0.3, "the others are lines written twice"
    bodies = {row["input"] for row in train}
    exchanged = 0
    for page in pages:
        parts = sorted(page.split("\n"), key=len)
        assert len(parts) == 2
        exchanged += parts[1] not in bodies
        digits = [c for c in parts[0] if c.isdigit()]
        assert all(c in parts[1] for c in digits), "figures are copied as they are"
    assert 0.6 < exchanged / len(pages) < 0.8
    text = "\n".join(pages)
    assert not any(row["input"] in text or row["output"] in text for row in test)


def test_an_exchange_keeps_what_body_and_headline_share():
    row = headlines.corpus(train=50, test=10, style="plain")[0][3]
    table = tiny._exchange(row["output"], sorted(set("春夏秋冬东西南北山川湖海日月星云")) * 4, random.Random(1))
    body, headline = row["input"].translate(table), row["output"].translate(table)
    shared = [c for c in row["output"] if c in row["input"]]
    assert all(c.translate(table) in body for c in shared)
    assert len(headline) == len(row["output"])


def test_the_one_in_data():
    model = load_checkpoint(FOLDER)
    params = sum(p.numel() for p in model.parameters())
    assert 2e6 < params < 4e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10e6
    config = model.config
    assert (config.position_embedding, config.normalize_head, config.num_attention_heads) == ("alibi", True, 6)
    assert model.dtype == torch.bfloat16
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer.vocab_size == config.vocab_size <= tiny.VOCABULARY
    row = headlines.corpus(train=0, test=1, seed=1, style="plain")[1][0]
    assert tokenizer.decode(tokenizer.encode(row["input"])) == row["input"]
    body, title = tokenizer.text_ids(row["input"] + "\n"), tokenizer.text_ids(row["output"])
    labels = torch.tensor([[-100] * len(body) + title])
    assert model(torch.tensor([body + title]), labels=labels).loss.item() < 2.0, "it has read pages; untrained it is 7"
    words = sorted(
        {c for other in headlines.read(project.root() / "data" / "headlines" / "test.json") for c in other["output"]}
    )
    line = tokenizer.text_ids("".join(random.Random(3).choices([c for c in words if tiny._is_word(c)], k=20)))
    labels = torch.tensor([[-100] * (len(line) + 2) + line[1:]])
    copied = model(torch.tensor([[*line, *tokenizer.text_ids("\n"), *line]]), labels=labels).loss.item()
    assert copied < 1.0, "it copies what it never saw"
