"""pardemo: parallel training, predicted, run on real processes, and compared.

>>> from pardemo import World
>>> with World(4) as world:                 # doctest: +SKIP
...     world.run(my_function, 1024)        # -> [result of rank 0, 1, 2, 3]

The names of this package are loaded on first use, so that ``import pardemo`` costs milliseconds and loads no torch:

- :class:`Cluster`: hosts and links with limits, for a World on one machine.
- :class:`World`: N real ranks; what goes wrong on them: :class:`RankError` and its kinds :class:`RankFailed`,
  :class:`RankDied`, :class:`RankTimeout`.
- :class:`WireMeter`, :class:`MemoryMeter`, :class:`CallMeter`, :class:`Timeline`: what really happened.
- :class:`Ledger`: claims, each a prediction beside its measurement, with a verdict.

The techniques, each a module, or a package with its public names in ``__init__.py``:

- ``pardemo.collectives``: ring reduce-scatter, all-gather, all-reduce; the parameter server.
- ``pardemo.data_parallel``: replicas with a naive and with an overlapped exchange of gradients.
- ``pardemo.pipeline_parallel``: schedules, proven and drawn without a process, and run on real ranks.
- ``pardemo.tensor_parallel``: layers in columns, rows and heads; sequence parallelism; the vocabulary's loss.
- ``pardemo.context_parallel``: attention over a sequence that the ranks share, by a ring or by all-to-alls.
- ``pardemo.expert_parallel``: a router, and experts on several ranks; ``pardemo.optimizers``: Muon on shards.
- ``pardemo.low_precision``: 8 and 4 bits with their scales, and collectives that send them.
- ``pardemo.zero``: model states in shards, stages 1 to 3; ``pardemo.zero.zero_r``: activations and buffers.
- ``pardemo.groups``: which ranks form a tensor-, data- or pipeline-parallel group.

What they stand on, and beside:

- ``pardemo.world``, ``pardemo.cluster``, ``pardemo.meters``, ``pardemo.claims``: the packages of the names above.
- ``pardemo.formulas``: the predictions, arithmetic alone; ``pardemo.peers``: the frameworks to compare with;
  ``pardemo.small_models``: models for a laptop's ranks.

The book, ``pardemo.book``: ``.chapters``, a folder each; ``.page``, what all pages have; ``.run``: run, report, site.

- ``pardemo.cells``: ``%%ranks 4`` above a notebook cell runs it on four ranks; ``pardemo.draw``: charts and drawings.
- ``pardemo.testing``: tests of yours that run on ranks, by a plug-in of pytest.
- ``pardemo.machine``: what this machine has and can do.

Jobs that are built from all this:

- ``pardemo.baichuan2``, ``pardemo.headlines``, ``pardemo.finetune``: the article's fine-tune.
- ``pardemo.measure``: anybody's training script on ranks: what its step sends, holds and waits for.
- ``pardemo.prove``: the same script in several layouts that must train alike: where they do not, and why.
- ``pardemo.script``: what these two stand on: a script on ranks, what it sends, holds and computes, and reports of it.
- ``pardemo.planner``: a job of full size before its GPUs are rented: memory by a dry run, time, money, files.

On the command line: ``pardemo --help``.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "World": "pardemo.world",
    "Cluster": "pardemo.cluster",
    "RankError": "pardemo.world.errors",
    "RankFailed": "pardemo.world.errors",
    "RankDied": "pardemo.world.errors",
    "RankTimeout": "pardemo.world.errors",
    "WireMeter": "pardemo.meters",
    "MemoryMeter": "pardemo.meters",
    "CallMeter": "pardemo.meters",
    "Timeline": "pardemo.meters",
    "Ledger": "pardemo.claims",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pardemo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell) -> None:
    """``%load_ext pardemo``: cells that begin with ``%%ranks N`` run on N ranks."""
    from pardemo.cells.magic import RanksMagic

    unload_ipython_extension(shell)
    magic = shell.pardemo_ranks = RanksMagic(shell)
    shell.register_magic_function(magic.ranks, "cell", "ranks")


def unload_ipython_extension(shell) -> None:
    """Ends the ranks."""
    if (magic := getattr(shell, "pardemo_ranks", None)) is not None:
        magic.close()


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
