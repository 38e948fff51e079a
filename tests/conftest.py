"""One warm World per size for the whole session; tests that kill ranks make their own."""

import shutil
import time

import psutil
import pytest

from pardemo import World


@pytest.fixture(scope="session")
def world_of():
    """``world_of(n)``: a World of n ranks, shared by all tests."""
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in worlds:
            worlds[size] = World(size, timeout_s=60)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="module")
def chromium():
    """A headless browser; its event loop ends with the module, so that other tests may have their own."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (requirements.txt)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def out(tmp_path, monkeypatch):
    """An output folder of this test's own."""
    monkeypatch.setenv("PARDEMO_OUT", str(tmp_path))
    return tmp_path


def gone(pids, within_s=10.0):
    """Whether all processes end within that time (zombies count as ended)."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also between the two lines of /proc that psutil reads
        return False


def tiny_folder(folder, texts, **changes):
    """A checkpoint folder with a random Baichuan2 of two small layers and a tokenizer of these texts."""
    import torch

    from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer, save_checkpoint
    from pardemo.finetune.tiny import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 1400))
    tokenizer = Baichuan2Tokenizer(str(folder / "tokenizer.model"))
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = Baichuan2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **{**sizes, **changes})
    save_checkpoint(Baichuan2ForCausalLM(config), folder, tokenizer)
    return folder
