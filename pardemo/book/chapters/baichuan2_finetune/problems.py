"""The problems of this chapter, and the way to each answer."""

from pardemo.book.page.problems import problem
from pardemo.finetune import recipe
from pardemo.formulas import communication
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of
from pardemo.planner.layouts.tuning import Tuning, adapted, adapter_params

_BF16, _FP32 = 2, 4  # bytes
_ALL_LINEAR = ("W_pack", "o_proj", "gate_proj", "up_proj", "down_proj")
_BAICHUAN, _LLAMA = (shape_of(name) for name in ("baichuan2-13b", "llama3-70b"))
_A800, _H100 = hardware.gpu("A800-80GB"), hardware.gpu("H100")


@problem("million")
def _all_linear():
    """LoRA with r = 8 goes beside all five matrices of each of Baichuan2-13B's 40 layers: `W_pack` (5,120 in, 15,360
    out), `o_proj` (5,120 in and out), `gate_proj` and `up_proj` (5,120 in, 13,696 out) and `down_proj` (the other way
    round). How many parameters are trained?"""
    tuning = Tuning(rank=8, target=_ALL_LINEAR)
    trained, sides = adapter_params(tuning, _BAICHUAN), sum(map(sum, adapted(tuning, _BAICHUAN)))
    times = trained / adapter_params(Tuning(rank=8, target=("W_pack",)), _BAICHUAN)
    return trained / 1e6, f"""Each matrix gets r · (in + out) numbers. In and out of a layer's five matrices add up to
        (5,120 + 15,360) + 2 · 5,120 + 3 · (5,120 + 13,696) = {sides:,}, so the layer gets 8 times that, and the
        {_BAICHUAN.layers} layers get {trained / 1e6:.1f} million. That is {times:.2f} times as many as beside `W_pack`
        alone, and still {100 * trained / _BAICHUAN.params:.1f} % of the model."""  # fmt: skip


@problem()
def _same_strength():
    """Your recipe has r = 8 and `lora_alpha` = 32, and its learning rate suits it. You want to try r = 64. Which
    `lora_alpha` lets the adapter count as strongly as before?"""
    lora = recipe.load("baichuan2-13b-lora-bf16").lora
    strength = lora.lora_alpha / lora.r
    alpha = strength * 64
    return alpha, f"""What lies beside W counts `lora_alpha` / r times, here {lora.lora_alpha:g} / {lora.r} =
        {strength:g}. With r = 64 and the old `lora_alpha` it would count {lora.lora_alpha / 64:g} times, and the
        learning rate would no longer suit it. To keep the ratio of {strength:g} you set {strength:g} · 64 =
        {alpha:g}."""  # fmt: skip


@problem("GB")
def _logits_of_labels():
    """A micro-batch has 16 samples of 512 tokens, of which 15 % have a label. Baichuan2's vocabulary has 125,696
    entries. How much memory of fp32 logits does `loss_head: labels` save?"""
    full = _FP32 * 16 * 512 * _BAICHUAN.vocabulary / 1e9
    saved = 0.85 * full
    return saved, f"""Logits of all {16 * 512:,} tokens take {full:.2f} GB, 4 bytes for each token and entry. With
        `loss_head: labels` only 15 % of them are made, {full - saved:.2f} GB, so {saved:.2f} GB are saved. The loss is
        the same, since it never looks at the others."""  # fmt: skip


@problem("adapters")
def _tasks_of_one_gpu():
    """An A800 has room for 78.4 GB. It holds Baichuan2-13B (13.9 billion parameters) once, in bf16, and an adapter for
    each task: r = 64 beside all five matrices of each layer, 223 million numbers in bf16. How many tasks' adapters fit
    beside the base?"""
    room = 0.92 * _A800.memory_bytes
    base = _BF16 * _BAICHUAN.params
    adapter = _BF16 * adapter_params(Tuning(rank=64, target=_ALL_LINEAR), _BAICHUAN)
    tasks = (room - base) // adapter
    return tasks, f"""The base takes {base / 1e9:.1f} GB and leaves {(room - base) / 1e9:.1f} GB. An adapter of
        {adapter / _BF16 / 1e6:.0f} million numbers takes {adapter / 1e9:.3f} GB, so {tasks:.0f} of them fit. Of models
        whose parameters were all trained, {room // base:.0f} would fit. (What a running request needs comes on
        top.)"""  # fmt: skip


@problem("tokens")
def _gathers_that_hide():
    """Llama 3 70B does not fit on one H100, so you train LoRA under ZeRO-3 on eight. All weights are gathered twice in
    a micro-batch, in bf16 at 360 GB/s, nothing is recomputed, and a GPU reaches 636 TFLOP/s. If you leave out
    attention's scores, with how many tokens in a GPU's micro-batch does computing take as long as gathering?"""
    gathered = 2 * communication.ring_half(_BF16 * _LLAMA.params, 8).sent
    rate, link = rates.matrix(_H100), rates.inside(_H100)
    tokens = gathered / link * rate / (4 * _LLAMA.params)
    return tokens, f"""Gathering twice sends 2 · 7/8 · 2Ψ bytes, {gathered / 1e9:.0f} GB, which takes
        {1e3 * gathered / link:.0f} ms. A token costs 4 operations for each frozen weight, 2 forward
        and 2 backward, which takes {1e6 * 4 * _LLAMA.params / rate:.0f} µs. The two are equal at {tokens:,.0f} tokens,
        whatever Ψ is. So inside a node ZeRO-3 costs little even with LoRA, if micro-batches are not
        tiny."""  # fmt: skip
