"""Whatever a checkpoint's files hold: it is read, or a ValueError of one line. No other file, no code, no change."""

import copy
import json
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_zero_checkpoint_refused import everything, make, sign, steps

from pardemo.zero import checkpoint_folder, load, save

EXAMPLES = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
#: Events of Python's own audit that a reader of JSON and tensors has no use for.
CODE = ("pickle.find_class", "exec", "compile", "import", "os.system", "subprocess.Popen", "ctypes.dlopen")

PATHS = ["..", "../outside", "/etc/passwd", "rank-00000.safetensors/../../outside", "\\\\host\\share", "~", "file:///x"]
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.just(10**400) | st.floats() | st.text(max_size=8)
    | st.sampled_from([*PATHS, "torch.float32", "torch.float64", "os.system", "\ud800", "two\nlines"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(PATHS) | st.text(max_size=4), inner),
    max_leaves=6,
)

_events: list | None = None


def _audit(event, arguments):
    if _events is not None and (event == "open" or event in CODE):
        _events.append((event, str(arguments[0])))


def places(value, above=()):
    """The ways to everything within a JSON value."""
    yield above
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*above, key))


@st.composite
def mutations(draw, original):
    """Some values of a JSON object replaced, removed or added."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        if not value:  # all of it has been removed
            return value
        *way, last = draw(st.sampled_from([place for place in places(value) if place]))
        inside = value
        for key in way:
            inside = inside[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "add", "twice"]))
        if how == "replace":
            inside[last] = draw(VALUES)
        elif how == "remove":
            del inside[last]
        elif isinstance(inside, dict):
            inside[draw(st.sampled_from([*PATHS, "params", "0.parameters"]))] = draw(VALUES)
        else:
            inside.append(copy.deepcopy(inside[last]) if how == "twice" else draw(VALUES))
    return value


def read_or_refused(stage, folder):
    """Reads a checkpoint under watch."""
    global _events
    engine = make(stage, seed=1)
    before = everything(engine)
    _events, opened, safe_open = [], [], checkpoint_folder.safe_open

    def seen(path, framework):
        opened.append(path)
        return safe_open(path, framework=framework)

    checkpoint_folder.safe_open = seen
    refused = None
    try:
        load(engine, folder)
    except ValueError as error:
        refused = str(error)
    finally:
        events, _events, checkpoint_folder.safe_open = _events, None, safe_open
    assert [event for event in events if event[0] in CODE] == []
    files = {Path(path) for path in (*opened, *(name for event, name in events if event == "open"))}
    assert {path.parent for path in files} <= {folder}, files
    if refused is not None:
        assert refused.startswith("checkpoint "), refused
        assert refused.isprintable(), refused
        assert len(refused) < 1000, refused
        assert everything(engine) == before
    return refused


def watched(stage, folder):
    """A checkpoint, read once, so that what is imported at first use is there."""
    if not getattr(sys, "_pardemo_audited", False):
        sys.addaudithook(_audit)
        sys._pardemo_audited = True
    save(steps(make(stage)), folder)
    (folder.parent / "outside").write_bytes(b"no business of a checkpoint's")
    everything(make(stage))
    load(make(stage), folder)
    assert read_or_refused(stage, folder) is None
    return json.loads((folder / "pardemo.json").read_text())["content"]


def manifests(stage, folder):
    original = watched(stage, folder)
    refusals = []

    @EXAMPLES
    @given(mutations(original))
    def check(content):
        sign(folder, content)
        refusals.append(read_or_refused(stage, folder))

    check()
    assert len({refusal for refusal in refusals if refusal}) > 10, "the cases are of many kinds"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_manifest_may_hold_anything(world_of, stage, tmp_path):
    world_of(1).run(manifests, stage, tmp_path / "at")


def damaged_manifests(folder):
    watched(1, folder)
    whole = (folder / "pardemo.json").read_bytes()

    @EXAMPLES
    @given(st.data())
    def check(data):
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, min(len(whole), begin + 20)) | st.just(len(whole)))
        middle = data.draw(st.binary(max_size=5) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]))
        (folder / "pardemo.json").write_bytes(whole[:begin] + middle + whole[end:])
        refused = read_or_refused(1, folder)
        assert refused or json.loads((folder / "pardemo.json").read_bytes()) == json.loads(whole)

    check()


def test_a_damaged_manifest_is_refused(world_of, tmp_path):
    world_of(1).run(damaged_manifests, tmp_path / "at")


def damaged_tensors(stage, folder):
    """The manifest is signed anew each time: it is the reader of the tensors that has to see what is wrong."""
    original = watched(stage, folder)
    path = folder / "rank-00000.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])

    @EXAMPLES
    @given(st.data())
    def check(data):
        if data.draw(st.booleans()):
            text = json.dumps(data.draw(mutations(header))).encode()
            changed = struct.pack("<Q", len(text)) + text + whole[8 + length :]
        else:
            at, more = data.draw(st.integers(0, len(whole))), data.draw(st.binary(max_size=20))
            changed = whole[:at] + more + whole[at + len(more) :] * data.draw(st.booleans())
        path.write_bytes(changed)
        entry = {"bytes": len(changed), "sha256": checkpoint_folder.checksum(path)}
        sign(folder, original | {"files": [entry]})
        read_or_refused(stage, folder)

    check()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_of_tensors_may_hold_anything(world_of, stage, tmp_path):
    world_of(1).run(damaged_tensors, stage, tmp_path / "at")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("unknown \x1b[2J, twice\nat 7", "unknown \N{REPLACEMENT CHARACTER}[2J, twice"),
        ("\n", "OSError"),
        ("a" * 200, "a" * 150),
    ],
)
def test_what_a_file_makes_an_error_say_commands_no_terminal(message, line):
    assert checkpoint_folder.first_line(OSError(message)) == line


def folders(folder):
    """Where the folder lies is the caller's own business."""
    save(make(), folder)
    (folder.parent / "x").mkdir()
    for way in (folder, folder.parent / "x" / ".." / "at", str(folder) + "/"):
        load(make(), way)


def test_a_folder_is_named_in_any_way(world_of, tmp_path):
    world_of(1).run(folders, tmp_path / "at")
