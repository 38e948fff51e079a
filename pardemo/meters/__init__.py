"""Measures a run: bytes on the wire, bytes in memory, collectives called, and when.

:class:`WireMeter` reads the kernel's TCP counters, :class:`MemoryMeter` follows every tensor's storage,
:class:`CallMeter` counts collectives, :class:`Timeline` notes when computation and communication began and ended.
"""

from pardemo.meters.calls import CallMeter
from pardemo.meters.memory import MemoryMeter
from pardemo.meters.timeline import Span, Timeline
from pardemo.meters.wire import WireMeter

__all__ = ["CallMeter", "MemoryMeter", "Span", "Timeline", "WireMeter"]
