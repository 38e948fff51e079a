"""Tables of *Baichuan2: the fine-tune*: a row of the training file and headlines, each beside its English."""

from collections.abc import Mapping, Sequence

from pardemo.book.chapters.baichuan2_finetune.english import english_of
from pardemo.tables import show


def beside_english(row: Mapping[str, str]):
    """A row's instruction, input and output, each beside its English."""
    return show(
        [{"": key, "text": row[key], "in English": english_of(row[key])} for key in ("instruction", "input", "output")]
    )


def headlines_of_groups(groups: Mapping[str, Sequence[Mapping[str, str]]]):
    """The first headline of each group, beside its English."""
    return show(
        [
            {"group": name, "headline": rows[0]["output"], "in English": english_of(rows[0]["output"])}
            for name, rows in groups.items()
        ]
    )
