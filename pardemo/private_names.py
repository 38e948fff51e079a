"""The table of private names that :mod:`pardemo.compat` resolves: where each is, and what it is for."""

from typing import NamedTuple


class Private(NamedTuple):
    """A private name: where it is, and what it is for."""

    path: str
    why: str


#: Names that can be asked of this module, as ``compat.tree_leaves``.
NAMES = {
    # --- torch: passes and hooks
    "graph_task": Private("torch._C._current_graph_task_id", "the backward pass that runs, −1 outside of one"),
    "execution_engine": Private("torch.autograd.Variable._execution_engine", "a call when the backward pass ends"),
    "will_run": Private("torch._C._will_engine_execute_node", "whether a backward pass reaches a parameter"),
    "autograd_node": Private("torch._C._current_autograd_node", "the node that runs: whose layer's backward it is"),
    "sequence_number": Private("torch._C._autograd._get_sequence_nr", "the number that the next node gets"),
    "JoinConfig": Private("torch.distributed.algorithms.join._JoinConfig", "uneven inputs: Join leaves its own on"),
    "DropoutNd": Private("torch.nn.modules.dropout._DropoutNd", "every kind of dropout, to be seeded by rank"),
    "NormBase": Private("torch.nn.modules.batchnorm._NormBase", "every kind of batch norm"),
    "assert_async": Private("torch._assert_async", "a check that waits for no GPU"),
    # --- torch: dispatch, operators, fake tensors
    "tree_map": Private("torch.utils._pytree.tree_map", "rounds otherwise what a module returns"),
    "tree_leaves": Private("torch.utils._pytree.tree_leaves", "the tensors in what a module takes and returns"),
    "TorchDispatchMode": Private("torch.utils._python_dispatch.TorchDispatchMode", "meters that see each operator"),
    "without_modes": Private("torch.utils._python_dispatch._disable_current_modes", "messages that no meter counts"),
    "modes": Private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "a thread takes over its meters"),
    "push_mode": Private("torch.utils._python_dispatch._push_mode", "a thread takes over its caller's meters"),
    "pop_mode": Private("torch.utils._python_dispatch._pop_mode", "and gives them back"),
    "DispatchKey": Private("torch._C.DispatchKey", "measure: where a collective is noted"),
    "scaled_mm": Private("torch._scaled_mm", "prove: an fp8 product, in fp64"),
    "functional_wait": Private("torch.ops._c10d_functional.wait_tensor", "measure: a DTensor's collective is over"),
    "dispatch_keys_after": Private("torch._C._dispatch_keyset_full_after", "measure: a collective, below that"),
    "without_functions": Private("torch._C.DisableTorchFunctionSubclass", "gradients of one rank, as plain tensors"),
    "without_functions_of_torch": Private(
        "torch._C.DisableTorchFunction", "kernels of our own: a script's modes see none"
    ),
    "bf16_in_onednn": Private("torch.ops.mkldnn._is_mkldnn_bf16_supported", "bf16: which kernel multiplies matrices"),
    "FakeTensor": Private("torch._subclasses.fake_tensor.FakeTensor", "dry runs: shapes without memory"),
    "FakeTensorMode": Private("torch._subclasses.fake_tensor.FakeTensorMode", "dry runs: shapes without memory"),
    "FakeStore": Private("torch.testing._internal.distributed.fake_pg.FakeStore", "dry runs: a group without ranks"),
    "ShardingPropagator": Private("torch.distributed.tensor._sharding_prop.ShardingPropagator", "dry runs of DTensors"),
    "unsafe_view": Private("torch.ops.aten._unsafe_view", "a view of what nobody else has: no copy, no graph of views"),
    "local_scalar": Private("torch.ops.aten._local_scalar_dense", "dry runs: .item()"),
    "grouped_mm": Private("torch.ops.aten._grouped_mm", "operations of experts"),
    "attention_cpu": Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "operations of attention; ring attention's blocks"
    ),
    "attention_cpu_backward": Private(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "the same, backward"
    ),
    "attention_flash": Private("torch.ops.aten._scaled_dot_product_flash_attention", "operations of attention"),
    "attention_efficient": Private("torch.ops.aten._scaled_dot_product_efficient_attention", "operations of attention"),
    "attention_cudnn": Private("torch.ops.aten._scaled_dot_product_cudnn_attention", "operations of attention"),
    "gather_base": Private("torch.ops.c10d._allgather_base_", "dry runs: what gloo copies"),
    "scatter_base": Private("torch.ops.c10d._reduce_scatter_base_", "dry runs: what gloo copies"),
    "foreach_norm": Private("torch._foreach_norm", "torch's clip_grad_norm_ on gradients of cut layers"),
    "unscale_": Private("torch._amp_foreach_non_finite_check_and_unscale_", "GradScaler on gradients of cut layers"),
    # --- torch: processes
    "local_offset_of": Private(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "prove: where a DTensor's part begins"
    ),
    "resolve_process_group": Private("torch._C._distributed_c10d._resolve_process_group", "a group by its name"),
    "default_store": Private("torch.distributed.distributed_c10d._get_default_store", "a launched World's store"),
    "load_library": Private("torch.utils.cpp_extension._import_module_from_library", "DeepSpeed's, compiled before"),
    # --- frameworks
    "AcceleratorState_reset": Private("accelerate.state.AcceleratorState._reset_state", "several runs in a process"),
    "GradientState_reset": Private("accelerate.state.GradientState._reset_state", "several runs in a process"),
    "PartialState_shared": Private("accelerate.state.PartialState._shared_state", "CPU ranks are ranks to Accelerate"),
    "validate_launch": Private("accelerate.commands.launch._validate_launch_command", "what a configuration asks for"),
    "deepspeed_loaded_ops": Private("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", "libraries made before"),
    # --- pytest
    "assertion_util": Private("_pytest.assertion.util", "asserts on ranks that say where two values differ"),
    "assertrepr_compare": Private("_pytest.assertion.pytest_assertrepr_compare", "where two values differ, in lines"),
    "MultiCapture": Private("_pytest.capture.MultiCapture", "capsys on ranks"),
    "SysCapture": Private("_pytest.capture.SysCapture", "capsys on ranks"),
    # --- Python
    "finalizers": Private("weakref.finalize._registry", "a forked process does not end its parent's things"),
    "run_exit_functions": Private("atexit._run_exitfuncs", "a forked process ends by os._exit"),
    "end_threads": Private("threading._shutdown", "a forked process ends by os._exit"),
}
