"""An extension of a notebook's kernel: before the notebook closes its ledger, its claims and answers are run once more.

Each cell that booked a claim or revealed an answer runs again in the same kernel, after all other cells, and what it
books and reveals is written beside what it did first: ``$PARDEMO_RUN_AGAIN/<notebook>.json``, a list of
``{"cell", "first", "again"}``. A cell that measures by itself is left out: the second time takes as long and shows
other seconds.
"""

import contextlib
import io
import json
import os
import re
from pathlib import Path
from unittest import mock

FOLDER = "PARDEMO_RUN_AGAIN"
MEASURES = re.compile(r"^%%|World\(|\btimes\(|perf_counter|monotonic|\.run\(")


def load_ipython_extension(shell):
    Again(shell)


class Again:
    """Follows the cells of one kernel."""

    def __init__(self, shell):
        self._shell, self._cells, self._told = shell, [], []
        shell.events.register("pre_run_cell", self._before)
        shell.events.register("post_run_cell", self._after)

    def _before(self, info):
        """Notes the claims so far; before the last cell runs the others again."""
        self._claims, self._told = self._booked(), []
        if "claim.close()" in info.raw_cell:
            cells, self._cells = self._cells, []
            with mock.patch.dict(os.environ):
                del os.environ["PARDEMO_HEADLESS"]  # in which no cell runs twice
                for cell in cells:
                    cell["again"] = self._run_again(cell)
            path = Path(os.environ[FOLDER], f"{os.environ['PARDEMO_NOTEBOOK']}.json")
            path.write_text(json.dumps(cells, ensure_ascii=False, indent=1))

    def _after(self, result):
        source = result.info.raw_cell
        self._listen()
        booked = {id: row for id, row in self._booked().items() if id not in self._claims}
        if (booked or self._told) and not MEASURES.search(source):
            self._cells.append({"cell": source, "first": [booked, self._told]})

    def _run_again(self, cell):
        self._told = []
        code = compile(self._shell.transform_cell(cell["cell"]), "<run again>", "exec")
        try:
            with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(self._shell, "display_pub"):
                exec(code, self._shell.user_ns)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        booked = self._booked()
        return [{id: booked.get(id) for id in cell["first"][0]}, self._told]

    def _booked(self):
        claim = self._shell.user_ns.get("claim")
        return {row["id"]: row["measured"] for row in claim.rows} if claim is not None else {}

    def _listen(self):
        """Notes every answer that is revealed."""
        if hasattr(self, "_reveal"):
            return
        from pardemo.book.page.guesses import Guess as kind

        self._reveal = reveal = kind.reveal

        def noted(*args, **kwargs):
            answer = reveal(*args, **kwargs)
            self._told.append(answer.message)
            return answer

        kind.reveal = noted
