"""What optimizers keep and send, against torch's states and against counts by hand."""

import pytest
import torch
from torch import nn

from pardemo.formulas import optimizers as formulas
from pardemo.optimizers import orthogonalised
from pardemo.small_models import gpt

MATRICES = [(24, 16), (7, 300)]
MAKE = {
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}


@pytest.mark.parametrize("name", MAKE)
def test_what_torchs_optimizers_keep(name):
    shapes = MATRICES if name == "Muon" else [*MATRICES, (33,)]
    params = [nn.Parameter(gpt.numbers(*shape)) for shape in shapes]
    optimizer = MAKE[name](params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    assert formulas.kept_bytes(name, shapes) == kept


def test_by_hand():
    assert formulas.kept_bytes("8-bit Adam", [(16, 16), (1,)]) == 2 * (256 + 4) + 2 * (256 + 4)
    assert formulas.kept_bytes("Shampoo", [(2, 3), (5,)]) == 2 * 4 * (4 + 9) + 4 * 5
    with pytest.raises(ValueError, match=r"'Lion'.*SGD.*Adam"):
        formulas.kept_bytes("Lion", [(1,)])
    with pytest.raises(ValueError, match="Muon is for matrices"):
        formulas.kept_bytes("Muon", [(4,)])


@pytest.mark.parametrize("shape", MATRICES)
def test_the_polynomial_is_what_happens_to_singular_values(shape):
    matrix = gpt.numbers(*shape, seed=3)
    before = torch.linalg.svdvals(matrix / matrix.norm())
    after = sorted(formulas.newton_schulz(value) for value in before.tolist())
    found = torch.linalg.svdvals(orthogonalised(matrix).float()).sort().values
    assert found.tolist() == pytest.approx(after, abs=0.03), "bf16 has three digits"


def test_operations_of_the_iteration():
    assert formulas.newton_schulz_flops(4, 4, 1) == 3 * 2 * 4**3
    assert formulas.newton_schulz_flops(2, 8) == formulas.newton_schulz_flops(8, 2) == 5 * (64 + 16 + 64)


def test_what_muon_sends():
    assert formulas.muon_dtensor(8, 8, 2) == 15 * 0.5 * 64
    assert formulas.muon_by_products(4, 8, 4) == (24, 12, 24)
    assert formulas.muon_by_products(8, 4, 4) == (0, 24, 24)
    assert formulas.muon_owned(100, 2) == 50
    assert formulas.muon_across(100, 2) == 50
