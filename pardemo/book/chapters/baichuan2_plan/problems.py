"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.formulas import communication, memory
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

_BF16, _FP32 = 2, 4  # bytes
_BAICHUAN_7B, _BAICHUAN_13B, _LLAMA = (shape_of(name) for name in ("baichuan2-7b", "baichuan2-13b", "llama3-8b"))
_A800, _H100 = hardware.gpu("A800-80GB"), hardware.gpu("H100")


@problem("billion")
def _seven_billion():
    """Baichuan2-7B has 32 layers, h = 4,096, an MLP with a gate and a width of 11,008, and V = 125,696; embedding and
    head are two tables. How many parameters does it have?"""
    shape = _BAICHUAN_7B
    layer, ends = shape.layer_params(shape.layer_kinds[0][0]), shape.embedding_and_head_params
    ffn_hidden = shape.ffn_hidden
    return shape.params / 1e9, f"""A layer has 4h² in its attention, 3 · h · {ffn_hidden:,} in its gated MLP and 2h in
        its norms, {layer / 1e6:.1f} million together. The {shape.layers} layers make {shape.layers * layer / 1e9:.3f}
        billion, and the two tables 2 · V · h = {ends / 1e9:.3f} billion. With the last norm that is
        {shape.params / 1e9:.3f} billion, of which the tables are one in seven."""  # fmt: skip


@problem("GB")
def _logits_of_llama():
    """You train Llama 3 8B, whose vocabulary has 128,256 entries, with 2 samples of 8,192 tokens in a micro-batch and
    an ordinary head. How much memory do the three fp32 tensors of the logits' shape take at the peak, if logits are
    made for all positions that have a token after them?"""
    positions = 2 * 8191
    logits = _FP32 * positions * _LLAMA.vocabulary
    return 3 * logits / 1e9, f"""{positions:,} positions have a token after them. Their logits in fp32 are b · (s−1) · V
        · 4 bytes, {logits / 1e9:.2f} GB, and three tensors of that shape are alive: {3 * logits / 1e9:.1f} GB. The
        weights of the whole model take {_BF16 * _LLAMA.params / 1e9:.1f} GB, less than its logits do for a
        moment."""  # fmt: skip


@problem("GB")
def _on_four_gpus():
    """You get four A800s, not eight, to train all 13.9 billion parameters of Baichuan2-13B with Adam in mixed
    precision. How much of a GPU's room of 78.4 GB do the model states leave for the step under ZeRO-3?"""
    room = 0.92 * _A800.memory_bytes / 1e9
    zero_2, zero_3 = (memory.model_states_bytes(_BAICHUAN_13B.params, 4, stage) / 1e9 for stage in (2, 3))
    return room - zero_3, f"""ZeRO-3 divides all 16 bytes of a parameter by N, so a GPU keeps 4Ψ bytes, {zero_3:.1f} GB,
        and {room:.1f} − {zero_3:.1f} = {room - zero_3:.1f} GB are left. ZeRO-2 divides 14 of the 16 and keeps
        {zero_2:.1f} GB, which leaves {room - zero_2:.1f} GB. So on four GPUs only ZeRO-3 leaves room for a
        step."""  # fmt: skip


@problem("hours")
def _hours_on_one_gpu():
    """You train LoRA with recomputation on Llama 3 8B, one epoch of 100,000 samples of 512 tokens, on an H100 that
    reaches 636 TFLOP/s. In a token's forward pass 7.5 billion weights are multiplied. If you leave out
    attention's scores and the adapters, how long do the matrix multiplications take?"""
    weights = _LLAMA.params - _LLAMA.embedding_params
    tokens = 100_000 * 512
    operations = 3 * 2 * weights * tokens
    rate = rates.matrix(_H100)
    hours = operations / rate / 3600
    return hours, f"""A step with recomputation has three multiplications for each frozen weight: forward, once more,
        and the gradient of the input. At 2 operations each that makes 6 for a weight and token, and with
        {tokens / 1e6:.1f} million tokens {operations / 1e18:.2f} · 10¹⁸ operations. At {rate / 1e12:.0f} TFLOP/s they
        take {3600 * hours:,.0f} s, {hours:.3f} hours. With what works element by element it is up to {1.5 * hours:.1f}
        hours: one GPU is enough."""  # fmt: skip


@problem("minutes")
def _smaller_micro_batches():
    """You train all 13.9 billion parameters of Baichuan2-13B on eight A800s with DeepSpeed's ZeRO-2, 32 samples a step
    on each GPU. A link reaches 160 GB/s each way, and nothing is hidden. How much longer do 1,565 steps take with
    micro-batches of 4 samples than with 8, by their traffic alone?"""
    once = communication.ring_half(_BF16 * _BAICHUAN_13B.params, 8).sent
    seconds = [(2 * m + 1) * once / rates.inside(_A800) for m in (4, 8)]
    minutes = 1565 * (seconds[1] - seconds[0]) / 60
    return minutes, f"""(N−1)/N · 2 bytes for each parameter are {once / 1e9:.2f} GB. With m = 4 a step sends 9 times
        that, which takes {seconds[0]:.2f} s, and with m = 8 it sends 17 times that, which takes {seconds[1]:.2f} s. The
        difference of {seconds[1] - seconds[0]:.3f} s makes {minutes:.1f} minutes in 1,565 steps. So half the samples in
        a micro-batch cost little time, if they are what makes the job fit."""  # fmt: skip
