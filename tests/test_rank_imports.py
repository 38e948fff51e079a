"""Large libraries are loaded without torch's code generator and without the garbage collector's walks."""

import gc
import subprocess
import sys

import pytest
import torch
from conftest import few

from pardemo.world.imports import compile_at_first_call, without_garbage_collection


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, and with which options; the result calls the function itself."""
    asked = []

    def compile(model=None, **options):
        asked.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile)
    return asked


def test_a_function_is_compiled_at_its_first_call_and_once(compiled):
    with compile_at_first_call():

        @torch.compile(dynamic=False)
        def double(x):
            "twice"
            return 2 * x

        halve = torch.compile(lambda x: x / 2)
    assert not compiled
    assert [double(1), double(2), halve(2)] == [2, 4, 1]
    assert [options for _, options in compiled] == [{"dynamic": False}, {}]
    assert (double.__name__, double.__doc__) == ("double", "twice")


def test_modules_are_compiled_at_once_and_torch_has_its_own_again(compiled):
    own, module = torch.compile, torch.nn.Linear(1, 1)
    with compile_at_first_call():
        assert torch.compile(module, fullgraph=True) is module
    assert compiled == [(module, {"fullgraph": True})]
    assert torch.compile is own


def test_what_was_put_off_is_torchs_own_compilation_afterwards():
    with compile_at_first_call():
        add = torch.compile(lambda a, b: a + b, backend="eager")
    assert torch.equal(add(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


def test_the_collector_is_as_it_was():
    assert gc.isenabled()
    with pytest.raises(ImportError), without_garbage_collection():
        import no_module_of_this_name  # noqa: F401
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()


@pytest.mark.parametrize("peer", few(["deepspeed.engine", "megatron"]))
def test_no_code_generator_is_loaded_with(peer):
    asked = f"import sys, pardemo.peers.{peer}; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == "False"
