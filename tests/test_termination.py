"""Commands that are told to end: what is ignored stays so, and one signal is enough."""

import signal
import subprocess
import sys
import textwrap

import pytest

COMMAND = """
import signal, sys, time
from pardemo.termination import ends_in_order
signal.signal(signal.SIGHUP, {hangup})
with ends_in_order("run"):
    try:
        print("begun", flush=True)
        for _ in range(6000):  # one long sleep is not ended by a signal that came just before it
            time.sleep(0.1)
    finally:
        print("clears up", flush=True)
        signal.raise_signal(signal.SIGHUP)
        print("cleared up", flush=True)
"""


@pytest.mark.parametrize("hangup", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_a_second_signal_does_not_disturb_the_clearing_up(hangup):
    """As systemd sends SIGHUP behind SIGTERM; under nohup it is ignored."""
    words = [sys.executable, "-c", textwrap.dedent(COMMAND.format(hangup=hangup))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        if hangup == "signal.SIG_IGN":
            process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        printed, error = process.communicate(timeout=120)
    assert printed == "clears up\ncleared up\n"
    assert error == "\npardemo run: ended by SIGTERM\n"
    assert process.returncode == 128 + signal.SIGTERM
