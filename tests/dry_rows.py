"""Rows of a plan by dry runs of their engines, which the plan itself reckons."""

from pardemo.planner import table
from pardemo.planner.memory import Curve


def dry_rows(request):
    """A row of each engine, way of checkpointing, offload and micro-batch that is asked for."""
    return [
        table.row(request, curve, engine, offload, batch)
        for (engine, _), curve in ((way, Curve(job)) for way, job in table.jobs(request).items())
        for offload in request.offloads
        if offload in table.OFFLOADED[engine]
        for batch in request.micro_batches
    ]
