"""The loss with logits only where there is a label, against all logits: the real vocabulary, a tenth labelled."""

import time

import torch

from pardemo.bench import BenchRow, compare
from pardemo.meters import MemoryMeter

BATCH, LENGTH, HIDDEN, VOCABULARY, LABELLED = 2, 256, 512, 125_696, 0.1
ROUNDS = 5


def rows() -> list[BenchRow]:
    from pardemo.baichuan2.head import NormHead, label_loss

    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    head = NormHead(HIDDEN, VOCABULARY)
    torch.nn.init.normal_(head.weight, std=0.02, generator=generator)
    head.requires_grad_(False)  # as under LoRA
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[:, : round(LENGTH * (1 - LABELLED))] = -100
    times: dict[bool, list[float]] = {False: [], True: []}
    peaks: dict[bool, list[float]] = {False: [], True: []}
    try:
        for turn in range(ROUNDS + 1):
            for everywhere in times:
                begin = time.perf_counter()
                label_loss(head, hidden, labels, everywhere=everywhere).backward()
                if turn:
                    times[everywhere].append(time.perf_counter() - begin)
        for everywhere in peaks:
            with MemoryMeter(head) as meter:
                label_loss(head, hidden, labels, everywhere=everywhere).backward()
            peaks[everywhere].append(meter.peak_bytes - meter.baseline_bytes)
    finally:
        torch.set_num_threads(threads)
    peer = f"all logits, {BATCH} × {LENGTH} × {VOCABULARY:,}"
    return [
        compare("loss_head.time", times[False], times[True], "s", None, peer),
        compare("loss_head.peak", peaks[False], peaks[True], "B", None, peer),
    ]
