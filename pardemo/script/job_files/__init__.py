"""Reads what a training job writes: flight recorder dumps, profiler traces, memory snapshots, logs."""
