"""Tables of the papers, cell by cell, as texts: a figure's digits are part of it. The formulas stand elsewhere.

Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), Tables 1 and 2; Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053),
Table 1. Figures read off a plot (Megatron-LM's Figure 5) are in :mod:`pardemo.formulas.scaling`.
"""

from collections.abc import Iterator
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import NamedTuple

from pardemo.formulas import memory, scaling


class TableFigure(NamedTuple):
    """One figure of a table: where it stands, as printed, and what the formula gives, in the printed unit."""

    row: str
    column: str
    printed: str
    exact: float

    @property
    def follows(self) -> bool:
        """Whether the formula gives the printed digits, rounded or cut off: the papers do both."""
        unit = Decimal(1).scaleb(-len(self.printed.partition(".")[2]))
        exact = Decimal(str(self.exact))
        return Decimal(self.printed) in {exact.quantize(unit, rule) for rule in (ROUND_DOWN, ROUND_HALF_UP)}


STAGES = {1: "P_os", 2: "P_os+g", 3: "P_os+g+p"}
MODELS = {"7.5B": 7_500_000_000, "128B": 128 * 10**9, "1T": 10**12}

#: ZeRO, Table 1, decimal GB per device: N -> model -> the three stages
ZERO_TABLE_1 = {
    1: {"7.5B": ("120", "120", "120"), "128B": ("2048", "2048", "2048"), "1T": ("16000", "16000", "16000")},
    4: {"7.5B": ("52.5", "41.3", "30"), "128B": ("896", "704", "512"), "1T": ("7000", "5500", "4000")},
    16: {"7.5B": ("35.6", "21.6", "7.5"), "128B": ("608", "368", "128"), "1T": ("4750", "2875", "1000")},
    64: {"7.5B": ("31.4", "16.6", "1.88"), "128B": ("536", "284", "32"), "1T": ("4187", "2218", "250")},
    256: {"7.5B": ("30.4", "15.4", "0.47"), "128B": ("518", "263", "8"), "1T": ("4046", "2054", "62.5")},
    1024: {"7.5B": ("30.1", "15.1", "0.12"), "128B": ("513", "257", "2"), "1T": ("4011", "2013", "15.6")},
}

#: ZeRO, Table 2, largest model of 32 GB devices in 10⁹ parameters: MP -> GPUs, then no sharding and the three stages.
#: The last column is printed as 128B, 256B, 0.5T, 1T, 2T.
ZERO_TABLE_2 = {
    1: (64, "2", "7.6", "14.4", "128"),
    2: (128, "4", "15.2", "28.8", "256"),
    4: (256, "8", "30.4", "57.6", "500"),
    8: (512, "16", "60.8", "115.2", "1000"),
    16: (1024, "32", "121.6", "230.4", "2000"),
}

#: Megatron-LM, Table 1, 10⁹ parameters by tensor-parallel size
MEGATRON_TABLE_1 = {1: "1.2", 2: "2.5", 4: "4.2", 8: "8.3"}


def zero_table_1() -> Iterator[TableFigure]:
    for n, models in ZERO_TABLE_1.items():
        for model, cells in models.items():
            for (stage, name), printed in zip(STAGES.items(), cells, strict=True):
                exact = memory.model_states_bytes(MODELS[model], n, stage) / 1e9
                yield TableFigure(f"N = {n}", f"{model}, {name}", printed, exact)


def zero_table_2() -> Iterator[TableFigure]:
    for mp, (gpus, *cells) in ZERO_TABLE_2.items():
        for stage, printed in enumerate(cells):
            exact = memory.largest_model(32e9, gpus // mp, stage, mp) / 1e9
            yield TableFigure(f"MP {mp}, {gpus} GPUs", STAGES.get(stage, "no sharding"), printed, exact)


def megatron_table_1() -> Iterator[TableFigure]:
    for tp, printed in MEGATRON_TABLE_1.items():
        yield TableFigure(f"{tp} GPUs", "10⁹ parameters", printed, scaling.TABLE_1[tp].parameters / 1e9)
