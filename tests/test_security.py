"""docs/security.csv names every place where the package reads what could run code: no more places, and no fewer."""

import ast
import csv
import re

from pardemo import project

ROOT = project.PACKAGE.parent
LIST = ROOT / "docs" / "security.csv"
#: Wherever they come from.
NAMES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",  # pickles
    "recv_bytes", "ProcessPoolExecutor", "get_context", "Manager", "Pool", "SharedMemory", "Unpickler",
    "load_checkpoint", "load_state", "load_from_checkpoint", "resume_from_checkpoint", "safe_open", "load_file",
    "from_pretrained", "load_dataset", "SentencePieceProcessor", "execute_notebook", "read_pickle", "fromfile",
    "import_module", "_import_module_from_library", "exec_module", "spec_from_file_location", "run_path", "run_module",
    "__import__", "CDLL", "LoadLibrary", "load_library", "load_inline",
}  # fmt: skip
#: Of these modules alone, whose names are common words.
OF_MODULES = {
    f"{module}.{name}"
    for module, names in {
        "pickle": ("load", "loads"), "cloudpickle": ("load", "loads"), "torch": ("load",), "np": ("load",),
        "numpy": ("load",), "yaml": ("load", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all"),
        "dcp": ("load", "async_load"), "mp": ("spawn",), "multiprocessing": ("Process", "Queue", "Pipe"),
        "hub": ("load",), "jit": ("load",), "ctypes": ("cdll",),
    }.items()
    for name in names
}  # fmt: skip
BUILT_IN = {"exec", "eval", "compile"}
NOT_AT_ALL = {"marshal", "shelve", "dill", "joblib", "imp"}
#: Who may use torch.distributed.checkpoint, whose other reader unpickles, and the one reader that is given to it.
CHECKPOINTS = {"zero/checkpoint.py": "HuggingFaceStorageReader"}
PROGRAMS = {"deepspeed.checkpoint.ds_to_universal"}  # that are run, and unpickle


def loads(node):
    """What a node of the syntax tree reads with; None where it is nothing of the kind."""
    if isinstance(node, ast.Attribute):
        whole = ast.unparse(node)
        short = ".".join(whole.split(".")[-2:])
        return node.attr if node.attr in NAMES else short if short in OF_MODULES else None
    if isinstance(node, ast.Name) and node.id in NAMES | BUILT_IN:
        return node.id
    if isinstance(node, ast.keyword) and node.arg in NAMES:
        return node.arg
    return node.value if isinstance(node, ast.Constant) and node.value in PROGRAMS else None


def sites(source):
    """(function, what) of each place in a module; functions within functions and classes by dotted names."""

    def visit(node, inside):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = (*inside, node.name)
        if (what := loads(node)) is not None:
            yield ".".join(inside) or "the module", what
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return set(visit(ast.parse(source), ()))


def modules():
    for path in sorted(project.PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT / "pardemo").as_posix(), path.read_text()


def rows():
    """(file, function, name) of each place in the list, and why it is safe."""
    with LIST.open(encoding="utf-8", newline="") as file:
        return {(row["file"], row["function"], name): row["why"] for row in csv.DictReader(file)
                for name in row["loads"].split()}  # fmt: skip


def test_every_place_that_loads_is_in_the_list():
    listed = rows()
    there = {(file, function, what) for file, source in modules() for function, what in sites(source)}
    assert there - set(listed) == set(), "say in docs/security.csv why these are safe"
    assert set(listed) - there == set(), "these are gone from the package, or have another name"
    assert all(len(why) > 20 for why in listed.values()), "each with a reason"


def test_what_the_list_cannot_see_is_not_used():
    """Modules that read code by nature, names taken out of modules, and lists of plain values that pickle."""
    for file, source in modules():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                assert not {name.split(".", 1)[-1] for name in names} & OF_MODULES, file
                assert not set(names[1:]) & OF_MODULES, f"{file} takes {names[1:]}: name it by its module"
            assert not set(names) & NOT_AT_ALL, f"{file} imports {names}"
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code", "weights_only"):
                safe = node.arg == "weights_only"
                assert getattr(node.value, "value", None) is safe, f"{file}: {node.arg} is not {safe}"


def test_torchs_checkpoints_are_read_as_safetensors_alone():
    for file, source in modules():
        tree = ast.walk(ast.parse(source))
        imported = {f"{n.module}.{alias.name}" for n in tree if isinstance(n, ast.ImportFrom) for alias in n.names}
        if any(name.startswith("torch.distributed.checkpoint") for name in imported):
            assert set(re.findall(r"\b\w*Reader\b", source)) == {CHECKPOINTS.get(file)}, file
            loads = re.findall(r"dcp\.\w*load\w*\([^)]*", source)
            assert all("storage_reader=reader" in load for load in loads), file


def test_a_new_place_is_seen():
    source = "class A:\n    def f(self):\n        read = pickle.loads\n        return torch.load('x')\n"
    assert sites(source) == {("A.f", "pickle.loads"), ("A.f", "torch.load")}
    assert sites("model.eval()\ntorch.compile(f)\nre.compile('x')\njson.loads('1')\n") == set()
    assert sites("eval('1')\nSomething(resume_from_checkpoint=x)\n") == {
        ("the module", "eval"),
        ("the module", "resume_from_checkpoint"),
    }
