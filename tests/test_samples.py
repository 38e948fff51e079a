"""Samples: what has a label, what is cut, packed rows that see nothing of one another, batches, wrong files."""

import json

import numpy as np
import pytest
import small_baichuan2
import torch
from conftest import says
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo.finetune.samples import IGNORED, Collator, Order, Samples, encode, pack, prompt_of, source_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_baichuan2.tokenizer(tmp_path_factory.mktemp("spm"))


class Letters:
    """A token a letter, so that lengths can be counted by eye; 1 and 2 begin the messages, 0 ends."""

    eos_token_id = 0

    def text_ids(self, text):
        return [ord(letter) for letter in text]

    def prompt_ids(self, messages):
        return [1, *self.text_ids(messages[0]["content"]), 2]


def row(source, target):
    """A row of so many tokens with :class:`Letters`, pieces and EOS counted in."""
    return {"instruction": "i", "input": "s" * (source - 3), "output": "t" * (target - 1)}


def test_the_prompt_is_instruction_and_input_in_the_official_layout(tokenizer):
    sample = small_baichuan2.rows(1)[0]
    assert prompt_of(sample) == sample["instruction"] + sample["input"]
    encoded = encode(sample, tokenizer, 1000)
    source = [tokenizer.user_id, *tokenizer.text_ids(prompt_of(sample)), tokenizer.assistant_id]
    target = [*tokenizer.text_ids(sample["output"]), tokenizer.eos_token_id]
    assert encoded == {"input_ids": source + target, "labels": [IGNORED] * len(source) + target}
    assert source_ids(sample, tokenizer) == source


@pytest.mark.parametrize(
    ("source", "target", "cutoff", "kept_source", "kept_target"),
    [
        (90, 10, 100, 90, 10),  # fits to the token
        (90, 10, 50, 45, 5),  # by halves
        (90, 11, 100, 89, 10),  # int(89.1) and int(10.9): one token short of the cutoff
        (15, 85, 20, 3, 17),
        (200, 3, 64, 63, 0),  # no label is left: int(0.95)
        (7, 60, 8, 0, 7),  # int(0.84); then nothing is there to predict the first label from
    ],
)
def test_both_sides_are_cut_in_proportion_and_keep_their_heads(source, target, cutoff, kept_source, kept_target):
    uncut = encode(row(source, target), Letters(), 10**6)["input_ids"]
    ids, unlabelled = uncut[:kept_source] + uncut[source:][:kept_target], max(kept_source, 1)
    labels = [IGNORED] * unlabelled + ids[unlabelled:]
    assert encode(row(source, target), Letters(), cutoff) == {"input_ids": ids, "labels": labels}
    assert (ids[-1] == 0) == (source + target <= cutoff), "a cut sample has lost its EOS"


def test_counts_of_labels_and_of_what_was_cut():
    samples = Samples.of([row(10, 5), row(20, 20), row(40, 2)], Letters(), 30)
    assert samples.lengths == [15, 30, 29]
    assert samples.tokens == 74
    assert samples.labelled_tokens == 5 + 15 + 1 == sum(n != IGNORED for s in samples for n in s["labels"])
    assert samples.report == ("3 samples, 74 tokens, 21 of them labels; 2 were longer than 30 tokens and cut")
    assert says(Samples.of([row(10, 5), row(200, 3)], Letters(), 30).report, "1", "label")


def test_a_cutoff_that_leaves_no_label():
    with pytest.raises(ValueError, match=r"cutoff_len.*1"):
        Samples.of([row(10, 5)], Letters(), 1)


def of_lengths(lengths):
    """Samples whose tokens tell which sample they are."""
    ids = [np.full(length, number, np.int32) for number, length in enumerate(lengths)]
    return Samples(ids, [1] * len(lengths), 0, max(lengths))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 30))
def test_packing_keeps_every_sample_whole_and_once(lengths, more):
    length = max(lengths) + more
    packed = pack(of_lengths(lengths), length)
    seen = {}
    for item in packed:
        assert len(item["input_ids"]) <= length
        starts = [place for place, position in enumerate(item["position_ids"]) if position == 0]
        for begin, end in zip(starts, [*starts[1:], len(item["input_ids"])], strict=True):
            (number,) = set(item["input_ids"][begin:end])
            assert number not in seen
            seen[number] = item["position_ids"][begin:end]
            assert item["labels"][begin:end] == [IGNORED] + [number] * (end - begin - 1)
    assert seen == {number: list(range(size)) for number, size in enumerate(lengths)}
    assert packed.lengths == [len(item["input_ids"]) for item in packed]
    assert (packed.tokens, packed.labelled_tokens) == (sum(lengths), sum(lengths) - len(lengths))
    assert len(packed) <= 11 / 9 * optimum_at_most(lengths, length) + 6 / 9
    assert [dict(item) for item in pack(of_lengths(lengths), length)] == [dict(item) for item in packed]


def optimum_at_most(lengths, length):
    """Rows that first fit, a plain way, needs: no fewer than the optimum."""
    rooms = []
    for size in lengths:
        place = next((i for i, room in enumerate(rooms) if room >= size), None)
        if place is None:
            rooms.append(length - size)
        else:
            rooms[place] -= size
    return len(rooms)


def test_a_sample_longer_than_a_row():
    with pytest.raises(ValueError, match=r"sample.*9.*8"):
        pack(of_lengths([3, 9]), 8)


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_packed_rows_have_the_logits_and_the_loss_of_their_samples(tokenizer, position):
    samples = Samples.of(small_baichuan2.rows(7), tokenizer, 90)
    assert samples.cut
    packed, model, collate = pack(samples, 200), small_baichuan2.model(position), Collator(0, 8)
    assert len(packed) < len(samples) - 2
    labels = samples.labelled_tokens
    losses, logits = [], {}
    with torch.no_grad():
        for data in (samples, packed):
            batch = collate([data[i] for i in range(len(data))])
            losses.append(model(**batch, num_items_in_batch=labels).loss.item())
            logits[data] = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        for number, members in enumerate(packed._rows):
            begin = 0
            for member in members:
                size = samples.lengths[member]
                torch.testing.assert_close(
                    logits[packed][number, begin : begin + size], logits[samples][member, :size], rtol=1e-4, atol=1e-4
                )
                begin += size
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # sums in another order


def test_batches_are_padded_at_the_right_without_a_mask():
    samples = of_lengths([3, 5, 2])
    batch = Collator(77, 4)([samples[0], samples[1]])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].tolist() == [[0] * 3 + [77] * 5, [1] * 5 + [77] * 3]
    assert batch["labels"].tolist() == [[IGNORED, 0, 0] + [IGNORED] * 5, [IGNORED] + [1] * 4 + [IGNORED] * 3]
    packed = pack(samples, 7)  # 5 + 2, 3
    batch = Collator(77)([packed[0], packed[1]])
    assert batch["input_ids"].shape == (2, 7)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 0, 0, 0]]


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_an_order_has_every_sample_once_and_groups_like_lengths(count, step, epoch, grouped):
    order = ordered(count, step, 3, epoch, [(i * 37) % 91 for i in range(count)] if grouped else None)
    assert sorted(order) == list(range(count))
    assert list(order) == list(order)


def ordered(count, step, seed, epoch, lengths):
    order = Order(count, step, seed, lengths)
    order.set_epoch(epoch)
    return order


def test_each_epoch_and_seed_has_an_order_of_its_own():
    lengths = [i % 91 for i in range(400)]
    assert len({tuple(ordered(400, 8, seed, epoch, lengths)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_grouping_leaves_little_padding():
    lengths = [20 + (i * 7919) % 200 for i in range(4000)]

    def padded(order):
        batches = [list(order)[i : i + 8] for i in range(0, 4000, 8)]
        return sum(8 * max(lengths[i] for i in batch) for batch in batches) / sum(lengths)

    assert padded(Order(4000, 16, 0)) > 1.4
    assert padded(Order(4000, 16, 0, lengths)) < 1.03


def test_files_of_rows(tmp_path, tokenizer):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(small_baichuan2.rows(9)))
    samples = Samples.read(path, tokenizer, 64, limit=4)
    assert len(samples) == 4
    assert samples[-1] == encode(small_baichuan2.rows(4)[3], tokenizer, 64)


GOOD = {"instruction": "a", "input": "b", "output": "c", "source": "d"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"instruction": "a",\n "input": }]', "line 1"),
        ("[]".encode("utf-16"), "not UTF-8"),
        (b"[]", "holds no row"),
        ([GOOD, {"instruction": "a", "input": "b"}], "missing field output"),
        ([GOOD | {"output": " \n"}], "empty output"),
    ],
)
def test_files_that_are_wrong(tmp_path, tokenizer, content, message):
    path = tmp_path / "rows.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=message) as error:
        Samples.read(path, tokenizer, 64)
    assert "rows.json" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        Samples.read(tmp_path / "none.json", tokenizer, 64)
