"""Peaks: arithmetic by hand, which knows the methods and nothing of the planner, and a published one.

Models of full width and mostly of few layers: a dry run takes as long as they are many. Whole models are in
docs/records/planner-error.md.
"""

import pytest
from calibration import peaks
from conftest import few
from transformers import MixtralConfig

from pardemo.planner import models
from pardemo.planner.dry_run import memory_curve
from pardemo.planner.dry_run.footprint import LINES
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.tuning import Tuning

N = 8  # ranks
#: Cross-entropy of a token's logits in fp32: log-softmax, its gradient, and the one that is just being made of it.
LOGITS = 12
#: DeepSpeed's buffer for gradients on their way: 500 million elements in bf16.
BUCKET = 2 * 500_000_000
GQA = {"qwen": 4 * 128, "llama": 8 * 128}  # width of keys and values


def block(hidden, middle, grouped):
    """q and o; k and v; gate, up and down; two norms."""
    return 2 * hidden**2 + 2 * hidden * grouped + 3 * hidden * middle + 2 * hidden


def of_layers(config, layers):
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def baichuan(stage, layers=40):
    """The article's job: 8 × 1,024 tokens, LoRA of rank 8 on W_pack."""
    hidden, vocabulary, tokens = 5120, 125_696, 8 * 1024
    one = block(hidden, 13_696, hidden)
    frozen = 2 * (2 * vocabulary * hidden + layers * one + hidden)
    config = of_layers(models.find("baichuan2-13b"), layers)
    job = RankJob(config, batch=8, tuning=Tuning(8, ("W_pack",)), engine=f"zero-{stage}", ranks=N, accumulation=2)
    job = job.but(zero={"overlap_comm": False})  # as the recipe has it: one bucket
    step = LOGITS * (tokens - 8) * vocabulary + layers * tokens * hidden * 2  # each layer's input is kept
    if stage == 3:  # the head and the last layer are whole
        return job, frozen / N + 2 * (vocabulary * hidden + one) + BUCKET + step
    return job, frozen + step


def qwen(layers=28):
    """Qwen2.5-7B in full under FSDP2, 2 × 4,096 tokens; its q, k and v have biases."""
    hidden, vocabulary, tokens = 3584, 152_064, 2 * 4096
    params = 2 * vocabulary * hidden + layers * (block(hidden, 18_944, GQA["qwen"]) + hidden + 2 * GQA["qwen"]) + hidden
    job = RankJob(of_layers(models.find("qwen2.5-7b"), layers), batch=2, sequence=4096, engine="fsdp2", ranks=N)
    # fp32 parameters and two moments, cut; embedding and head, which no layer's group has, whole in bf16
    states = 12 * params / N + 2 * 2 * vocabulary * hidden
    return job, states + LOGITS * (tokens - 2) * vocabulary + layers * tokens * hidden * 2


def gpt2(layers=12):
    """GPT-2 in full under stage 1, 8 × 1,024 tokens."""
    hidden, vocabulary, tokens = 768, 50_257, 8 * 1024
    params = (vocabulary + 1024) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    config = of_layers(models.find("gpt2"), layers)
    job = RankJob(config, batch=8, sequence=1024, engine="zero-1", ranks=N)
    step = LOGITS * (tokens - 8) * vocabulary + layers * tokens * hidden * 2
    return job, 2 * params + 12 * params / N + step


def llama():
    """Llama-3 8B in full under FSDP2, 32,768 tokens."""
    hidden, layers, vocabulary, tokens = 4096, 32, 128_256, 32_768
    params = 2 * vocabulary * hidden + layers * block(hidden, 14_336, GQA["llama"]) + hidden
    states = 12 * params / N + 2 * 2 * vocabulary * hidden
    return TITAN.job, states + LOGITS * (tokens - 1) * vocabulary + layers * tokens * hidden * 2


def mixtral(layers=32):
    """8 × 7B, LoRA on q and v, stage 3, 2 × 2,048 tokens: of few logits, so that a layer's experts are the peak."""
    hidden, middle, vocabulary, tokens = 4096, 14_336, 32_000, 2 * 2048
    one = block(hidden, 0, 8 * 128) + 8 * 3 * hidden * middle + 8 * hidden
    frozen = 2 * (2 * vocabulary * hidden + layers * one + hidden)
    tuning = Tuning(8, ("q_proj", "v_proj"))
    config = MixtralConfig(num_hidden_layers=layers, num_key_value_heads=8)
    job = RankJob(config, batch=2, sequence=2048, tuning=tuning, engine="zero-3", ranks=N)
    # what is gathered is copied once: all experts' gate and up are one parameter
    gathered = 2 * one + 2 * 8 * 2 * hidden * middle
    return job, frozen / N + gathered + BUCKET + layers * tokens * hidden * 2


(TITAN,) = (one for one in peaks.published() if one.counted == "reserved")
JOBS = {
    "article, stage 2": lambda: baichuan(2, layers=4), "article, stage 3": lambda: baichuan(3, layers=4),
    "Qwen2.5-7B": lambda: qwen(layers=4), "GPT-2": lambda: gpt2(layers=4), "Llama-3 8B": llama,
    "Mixtral": lambda: mixtral(layers=2),
}  # fmt: skip


@pytest.mark.parametrize("name", few(JOBS, 0, 1, 2, 3, 5))  # of the whole model with 32 layers by night
def test_a_peak_is_what_the_methods_add_up_to(name):
    job, expected = JOBS[name]()
    found = memory_curve.Curve(job, scales=False).estimate(Layout(micro_batch=job.batch))
    tensors = sum(found.lines[line] for line in LINES)
    # 8 %: the last norm's input and output, adapters, what stage 3 has prefetched and not let go of
    assert expected < tensors < 1.08 * expected
    # CUDA's context, NCCL, and blocks of the logits' size that the next ones do not fit into
    block_of_logits = 4 * job.batch * (job.sequence - 1) * job.config.vocab_size
    own = memory_curve.CONTEXT_BYTES + memory_curve.NCCL_BYTES
    assert 0 < found.peak_bytes - own - tensors < 1.7 * block_of_logits


def test_a_published_peak_of_the_same_job():
    assert peaks.planned(TITAN) / 2**30 == pytest.approx(TITAN.gib, rel=0.1)
