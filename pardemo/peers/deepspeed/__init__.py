"""DeepSpeed: its ZeRO engine on CPU ranks, its pipeline, offload to disk, and its settings checked before a start."""
