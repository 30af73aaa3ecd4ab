"""Shows a run in a notebook: the lines of the terminal as one output of the cell that updates itself, without scripts.

It needs IPython's display handles only, so it works in Jupyter, VS Code and Colab. Its last state stays in the saved
notebook. All text is escaped.
"""

from __future__ import annotations

import contextvars
import io
import threading
from importlib import import_module
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from aitrain.events import Ended, Event
from aitrain.ui.terminal import Screen

WIDTH = 90
PAGE = '<pre style="font-family:ui-monospace,monospace;font-size:13px;line-height:1.4;color:inherit">{code}</pre>'


class NotebookDisplay(Screen):
    """Shows the events of a run below the cell that started it."""

    draw_at_most, draw_every = 0.3, 2.0  # each drawing is a message to the browser

    def __init__(self) -> None:
        super().__init__()
        self._notes = list[Text]()
        self._handle: Any = None
        # an update from another thread belongs to this cell, not to the one that runs by then
        self._ticker = threading.Thread(target=contextvars.copy_context().run, args=[self._tick], daemon=True)

    def _open(self) -> None:
        self._handle = import_module("IPython.display").display(self._bundle(), raw=True, display_id=True)

    def _close(self, error: BaseException | None) -> None:
        """Show the last state, which stays in the notebook."""
        if error is not None:
            self.dashboard.phase = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._redraw()

    def _show(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.dashboard.phase = event.status if event.because is None else f"{event.status}: {event.because}"

    def _print(self, text: Text) -> None:
        self._notes.append(text)

    def _redraw(self) -> None:
        self._handle.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """The state as HTML, and as text where a notebook is shown without HTML."""
        console = Console(
            file=io.StringIO(), width=WIDTH, record=True, force_terminal=True, force_jupyter=False, highlight=False
        )
        console.print(Group(*self._notes, self.dashboard))
        html = console.export_html(code_format=PAGE, inline_styles=True, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}
