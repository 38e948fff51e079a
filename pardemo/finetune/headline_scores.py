"""The scores of :mod:`pardemo.finetune.metrics` as a metric of the ``evaluate`` library."""

import shutil
import tempfile
import weakref

from pardemo import extras

with extras.needed_by(__name__):
    import datasets
    import evaluate

from pardemo.finetune import metrics


class HeadlineScores(evaluate.Metric):
    """``HeadlineScores().compute(predictions=…, references=…)`` is :func:`pardemo.finetune.metrics.score`.

    Nothing is loaded from the hub. What ``add_batch`` collects is kept in memory, and evaluate's folder is a temporary
    one that goes with the metric; several processes (``num_process``) need a ``cache_dir`` that they share.
    """

    def __init__(self, cache_dir: str | None = None, num_process: int = 1, **settings):
        if cache_dir is None and num_process == 1:
            cache_dir = tempfile.mkdtemp(prefix="pardemo-evaluate-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
            settings.setdefault("keep_in_memory", True)
        super().__init__(cache_dir=cache_dir, num_process=num_process, **settings)

    def _info(self) -> evaluate.MetricInfo:
        texts = {name: datasets.Value("string") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="BLEU-4 over characters and ROUGE over jieba's words, as LLaMA-Factory computes them.",
            citation="", inputs_description=metrics.score.__doc__, features=datasets.Features(texts),
        )  # fmt: skip

    def _compute(self, predictions: list[str], references: list[str]) -> dict:
        return metrics.score(predictions, references)
