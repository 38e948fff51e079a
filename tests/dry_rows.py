"""A plan's rows with the memory that dry runs of their engines take."""

from dataclasses import replace

from pardemo.planner import checked, table


def dry_rows(request):
    """A row of each engine, way of checkpointing, offload and micro-batch that is asked for."""
    rows = []
    for row in table.plan(request).rows:
        run = checked.compare_with_dry_run(request, row).run
        rows.append(replace(row, memory=run, fits=run.peak_bytes <= request.cluster.most_bytes))
    return rows
