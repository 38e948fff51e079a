"""The site's page that plans: a question by its address, in a real browser, is answered as the command answers it."""

import gc
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from urllib.parse import urlencode

import pytest
from conftest import few, says, served_from

from pardemo import cli
from pardemo.book.run import site
from pardemo.book.run.site import plan_page, pyodide
from pardemo.planner.layouts.url_query import PageSearch, RefusedField

#: Patience in milliseconds: Python starts in 3 s on a quiet core, and a busy one may take many times as long.
PATIENCE = 120_000
QUESTION = {"model": "llama3-8b", "gpu": "H100", "gpus": "16", "sequence": "8192", "samples": "64", "price": "2.5"}
EXPERTS = {
    "model": "qwen3-30b-a3b", "gpu": "B200", "gpus": "16", "host": "4", "link": "400", "samples": "64",
    "precision": "mxfp8",
}  # fmt: skip
TORCHTITAN = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "H100",
    "gpus": "8",
    "program": "torchtitan",
    "precision": "fp8",
}
LORA = {"model": "llama3-70b", "gpu": "H100", "gpus": "8", "samples": "32", "rank": "16", "target": "q_proj,v_proj"}
#: As Qwen's makers publish it: a window that is not used.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
REPLY = "document.getElementById('answer').reply"  # what Python said, beside what is drawn of it
#: What was answered before goes away first; the same address again is asked again.
ASK_ANEW = """address => {
    document.getElementById("answer").replaceChildren();
    document.getElementById("status").classList.remove("refused");
    if (location.href === address) dispatchEvent(new Event("hashchange"));
    else location.href = address;
}"""
OPTIONS = {"host": "hosts", "samples": "per-step"}


def without(key, **changed):
    """The configuration's text without a key."""
    return json.dumps({name: value for name, value in (CONFIG | changed).items() if name != key})


def by_command(question, capsys):
    """What ``pardemo plan --search --json`` says to the same question."""
    options = [f"--{OPTIONS.get(name, name)}={value}" for name, value in question.items() if name != "host"]
    if "host" in question:
        options.append(f"--hosts={int(question['gpus']) // int(question['host'])}")
    assert cli.main(["plan", "--search", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def close(said, wanted, where=""):
    """The same structure, and numbers but for a last digit: a browser's logarithm may round otherwise."""
    if isinstance(wanted, dict):
        assert said.keys() == wanted.keys(), where
        for name in wanted:
            close(said[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        assert len(said) == len(wanted), where
        for place, each in enumerate(wanted):
            close(said[place], each, f"{where}[{place}]")
    elif isinstance(wanted, float):
        assert said == pytest.approx(wanted, rel=1e-12), where
    else:
        assert said == wanted, where


def page(folder, runtime):
    """The page in a folder of its own, with or without Pyodide."""
    plan_page.write_plan_page(folder, runtime)
    entries = [
        site.Entry("index.html", "What it is", "", ""),
        site.Entry(plan_page.FILE, plan_page.TITLE, "", plan_page.body(runtime is not None)),
    ]
    (folder / "pagefind").mkdir()
    (folder / "pagefind" / "pagefind-ui.js").write_text(
        "class PagefindUI {}  // the whole site's search has no part in this"
    )
    (folder / plan_page.FILE).write_text(site._framed(entries, 1), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def runtime():
    try:
        return pyodide.pyodide_folder()
    except pyodide.NoPyodideError as error:
        pytest.skip(f"no Pyodide: {error}")


@pytest.fixture(scope="module")
def served(runtime, tmp_path_factory):
    with served_from(page(tmp_path_factory.mktemp("site"), runtime)) as address:
        yield f"{address}/{plan_page.FILE}"


@pytest.fixture(scope="module")
def shown(chromium, served):
    """``shown(question, width)`` opens the page with a question; Python starts once for each width."""
    tabs = {}

    def open_(question, width=1000):
        address = f"{served}#{urlencode(question)}"
        if width not in tabs:
            tab = tabs[width] = chromium.new_page(viewport={"width": width, "height": 844})
            tab.asked, tab.told = [], []
            tab.on("request", lambda request: tab.asked.append(request.url))
            tab.on("pageerror", lambda error: tab.told.append(str(error)))
            tab.goto(address)
        else:
            tab = tabs[width]
            tab.evaluate(ASK_ANEW, address)
        tab.wait_for_function(
            "document.querySelector('#answer[aria-busy=false] .layouts, #status.refused')", timeout=PATIENCE
        )
        return tab

    yield open_
    for tab in tabs.values():
        tab.close()


@pytest.mark.parametrize(
    "question", few([QUESTION, EXPERTS, TORCHTITAN, LORA]), ids=["dense", "experts", "torchtitan", "LoRA"]
)
def test_the_page_says_what_the_command_says(shown, question, capsys):
    tab = shown(question)
    reply = tab.evaluate(REPLY)
    wanted = by_command(question, capsys)
    money = wanted.pop("money_per_billion_tokens")
    close(reply["json"], {name: wanted[name] for name in reply["json"]} | {"if": {}})
    assert reply["money_per_billion_tokens"][0] == (None if money is None else pytest.approx(money))
    best = wanted["best"]
    cards = tab.locator(".layouts > li")
    assert cards.count() == len(best) > 1
    for place, layout in enumerate(best):
        text = cards.nth(place).inner_text()
        assert f"{layout['seconds']:.3g}" in text.replace(",", "")
        assert f"{100 * layout['mfu']:.1f} %" in text
    assert tab.told == []


def test_bars_add_up_to_what_is_said(shown):
    tab = shown(QUESTION)
    reply = tab.evaluate(REPLY)
    width = "parts => parts.reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)"
    for bar, value in (("time", "seconds"), ("memory", "peak_bytes")):
        tracks = tab.locator(".bar", has_text=bar)
        lengths = [tracks.nth(place).locator(".part").evaluate_all(width) for place in range(tracks.count())]
        values = [layout[value] for layout in reply["shown"]]
        for length, each in zip(lengths, values, strict=True):
            assert length / lengths[0] == pytest.approx(each / values[0], rel=0.01), "a scale that all bars have"
        assert says(tracks.first.locator("[role=img]").get_attribute("aria-label"), "4", "5", "cases")


def test_what_changes_with_an_assumption_is_the_commands(shown, capsys):
    tab = shown(QUESTION)
    tab.locator("#assumptions summary").click()
    tab.wait_for_function(
        "[...document.querySelectorAll('#assumptions li')].filter(li => !li.textContent.endsWith('…')).length === 3",
        timeout=PATIENCE,
    )
    lines = tab.locator("#assumptions li").all_inner_texts()
    for line, (name, changed) in zip(lines, by_command(QUESTION, capsys)["if"].items(), strict=True):
        assert line.startswith(f"if {name}: {changed['same']['seconds']:.2f} s; ")


def test_a_pasted_configuration_is_the_built_in_model(shown, capsys):
    question = {"gpu": "H100", "gpus": "8", "config": json.dumps(CONFIG)}
    tab = shown(question)
    assert tab.locator("#config").is_visible()
    reply = tab.evaluate(REPLY)
    wanted = by_command({"model": "qwen2.5-7b", "gpu": "H100", "gpus": "8"}, capsys)
    close(reply["json"]["best"], wanted["best"])


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"model": "gpt2"}, "sequence", "at most 1,024"),
        ({"gpus": "12", "host": "8"}, "host", "12 GPUs do not fill hosts of 8"),
        ({"gpus": "37"}, "samples", "no layout that megatron-core runs divides"),
        ({"gpu": "A100-80GB", "precision": "fp8"}, "precision", "A100-80GB has no products in fp8"),
        ({"link": "ethernet-100"}, "link", "did you mean 'ethernet-100g'?"),
        ({"model": "llama3-9b"}, "model", "did you mean 'llama3-8b'?"),
        ({"model": "", "config": "{}"}, "config", "it has no model_type, and"),
        ({"model": "", "config": '{"model_type": []}'}, "config", "its model_type is [], and"),
        ({"model": "", "config": "[" * 100_000}, "config", "more than 500 brackets"),
        (
            {"model": "", "config": without("vocab_size")},
            "config",
            "vocab_size must be a whole number of at least 1, not None",
        ),
        (
            {"model": "", "config": without("head_dim", num_attention_heads=10_000)},
            "config",
            "a head's width must be a whole number of at least 1",
        ),
        ({"rank": "4", "program": "nanotron"}, "program", "nanotron has no LoRA; these have: megatron-core"),
        ({"target": "q_projection"}, "target", "is no module of a layer that is known"),
        ({"price": "cheap"}, "price", "a number of at least 0, not cheap"),
        ({"sequence": "9" * 5000}, "sequence", "a number of at most 12 digits"),
    ],
)
def test_what_is_refused_stands_at_its_field(shown, changed, field, message):
    question = {name: value for name, value in (QUESTION | changed).items() if value}
    tab = shown(question)
    assert message in tab.locator(f"#{field}-wrong").inner_text()
    assert tab.locator(f"#{field}").get_attribute("aria-invalid") == "true"
    assert message in tab.locator("#status").inner_text(), "and is read out"
    assert tab.locator(".layouts").count() == 0
    with pytest.raises(RefusedField, match=re.escape(message)) as refused:
        PageSearch(question)
    assert refused.value.field == field


@pytest.mark.nightly
def test_python_that_ended_is_started_again_by_the_next_question(chromium, served):
    tab = chromium.new_page()
    tab.route("**/pardemo.zip", lambda route: route.abort())
    tab.goto(f"{served}#{urlencode(QUESTION)}")
    tab.wait_for_selector("#status.refused", timeout=PATIENCE)
    assert says(tab.locator("#status").inner_text(), "command", "question")
    tab.unroute("**/pardemo.zip")
    tab.locator("#gpus").fill("8")
    tab.wait_for_selector("#answer[aria-busy=false] .layouts", timeout=PATIENCE)
    tab.close()


def test_where_nothing_fits_the_least_is_shown(shown):
    tab = shown({"model": "llama3.1-405b", "gpu": "H100", "gpus": "8"})
    assert says(tab.locator("#status").inner_text(), "Nothing", "memory")
    assert tab.locator(".layouts > li").count() == 1
    assert tab.locator(".bar .mark.has").count() == 1


def test_a_slider_asks_anew_and_the_address_carries_the_question(shown):
    tab = shown(QUESTION)
    slider = tab.locator("[data-for=gpus]")
    assert slider.get_attribute("aria-valuetext") == "16"
    slider.focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#gpus").input_value() == "32"
    tab.wait_for_function("document.getElementById('answer').reply.json.assumed.gpus === 32",
                          timeout=PATIENCE)  # fmt: skip
    assert "gpus=32" in tab.url
    assert tab.locator("#command").inner_text() == (
        "pardemo plan --search --model llama3-8b --gpu H100 --gpus 32 --sequence 8192 --per-step 64 --price 2.5"
    )


def test_it_fits_a_phone_and_every_field_has_a_name(shown, served):
    tab = shown(QUESTION, 390)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    unnamed = "fields => fields.filter(field => !(field.labels.length || field.getAttribute('aria-label'))).length"
    assert tab.locator("#question").locator("input, select, textarea").evaluate_all(unnamed) == 0
    assert tab.locator("#status").get_attribute("aria-live") == "polite"
    host = served.rpartition("/")[0]
    assert [url for url in tab.asked if not url.startswith(host)] == [], "nothing is asked of another host"


def test_without_pyodide_the_page_names_the_command(chromium, tmp_path):
    tab = chromium.new_page()
    tab.goto(f"{(page(tmp_path, None) / plan_page.FILE).as_uri()}#{urlencode(QUESTION)}")
    assert "python3 -m http.server" in tab.locator("#status").inner_text()
    assert says(tab.locator("#command").inner_text(), "--search", "--model", "llama3-8b", "--gpu", "H100")
    assert not (tmp_path / "plan" / "pyodide").exists()
    tab.close()


@pytest.mark.filterwarnings("error")
def test_a_question_that_is_let_go_leaves_no_folder_and_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asked = PageSearch(QUESTION)
    assert len(list(tmp_path.iterdir())) == 1
    del asked
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_archive_plans_without_any_library(tmp_path):
    plan_page.pack_planner(tmp_path / "a.zip")
    plan_page.pack_planner(tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path / "alone")
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "import pardemo; assert pardemo.__file__.startswith(sys.argv[1])\n"
        "from pardemo.planner.layouts.url_query import for_a_page\n"
        "print(for_a_page()(json.dumps({'question': json.loads(sys.argv[2])})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "alone"), json.dumps(QUESTION)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["names"][0]


def test_another_package_than_the_one_that_was_chosen_is_refused(tmp_path):
    (tmp_path / "pyodide.tgz").write_bytes(b"something else")
    with pytest.raises(pyodide.NoPyodideError, match="its SHA-512 is another"):
        pyodide.unpack(tmp_path / "pyodide.tgz", tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_a_folder_without_pyodide_is_named_and_a_machine_without_npm_says_so(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"pyodide\.mjs.*--pyodide.*Pyodide"):
        pyodide.pyodide_folder(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pyodide.NoPyodideError, match="Pyodide"):
        pyodide.pyodide_folder()
