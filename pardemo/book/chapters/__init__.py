"""The chapters, one folder each: drawings, figures, exercises with their solutions, claims, and its own measurements.

A notebook imports its chapter in one line, ``from pardemo.book.chapters import data_parallel as page``, and finds there
all public names of the chapter's modules beside those that every page has (:mod:`pardemo.book.page`).
"""

#: Every chapter by its name, with the number that its notebook's file begins with: the only place that knows both.
CHAPTERS = {
    "your_machine": "00",
    "data_parallel": "01",
    "pipeline_parallel": "02",
    "megatron_mlp": "03",
    "megatron_attention": "04",
    "vocabulary_and_sequence": "04",
    "hybrid_parallel": "05",
    "zero_memory": "06",
    "zero_communication": "07",
    "zero_r": "08",
    "accelerate": "09",
    "baichuan2_plan": "10",
    "baichuan2_finetune": "11",
    "baichuan2_evaluate": "12",
    "cluster": "13",
    "which_layout": "14",
    "scorecard": "15",
}


def notebook_of(chapter: str) -> str:
    """The notebook of a chapter, without its suffix: ``01_data_parallel`` of ``data_parallel``.

    Raises:
        ValueError: no chapter of that name.
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(CHAPTERS)}")
    return f"{CHAPTERS[chapter]}_{chapter}"
