"""The book's chapters in their order: names, titles and numbers."""

#: Every chapter by its name, with its title, in the book's order. A chapter's number is its place in this list; the
#: notebook's file name has it, too, and ``python .ci/chapter_order.py`` renames files and links after a change here.
CHAPTERS = {
    "your_machine": "Your machine",
    "data_parallel": "Data parallelism",
    "megatron_mlp": "Megatron's MLP",
    "megatron_attention": "Megatron's attention",
    "sequence_parallel": "Sequence parallelism",
    "vocabulary": "The vocabulary",
    "pipeline_parallel": "Pipeline parallelism",
    "long_sequences": "Long sequences",
    "experts": "Experts",
    "pipelines_without_bubbles": "Pipelines without bubbles",
    "hybrid_parallel": "Hybrid parallelism",
    "zero_memory": "ZeRO's memory",
    "zero_communication": "ZeRO's traffic",
    "zero_r": "ZeRO-R",
    "optimizers": "What an optimizer costs",
    "fewer_bits": "Fewer bits",
    "overlap": "Overlap",
    "accelerate": "Accelerate",
    "baichuan2_plan": "Baichuan2: the plan",
    "baichuan2_finetune": "Baichuan2: the fine-tune",
    "baichuan2_evaluate": "Baichuan2: before and after",
    "cluster": "The cluster",
    "which_layout": "Which layout?",
    "trace": "A trace, line by line",
    "script_measured": "A script, measured",
    "is_it_right": "Is it right?",
    "host_fails": "When a host fails",
    "scorecard": "The scorecard",
}


def number_of(chapter: str) -> str:
    """A chapter's number as its notebook's file name begins: ``01`` of ``data_parallel``.

    Raises:
        ValueError: no chapter of that name.
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(CHAPTERS)}")
    return f"{list(CHAPTERS).index(chapter):02d}"


def notebook_of(chapter: str) -> str:
    """The notebook of a chapter, without its suffix: ``01_data_parallel`` of ``data_parallel``.

    Raises:
        ValueError: no chapter of that name.
    """
    return f"{number_of(chapter)}_{chapter}"
