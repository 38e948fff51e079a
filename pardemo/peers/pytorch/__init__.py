"""PyTorch's own: FSDP2, tensor parallelism over DTensor, pipelining."""
