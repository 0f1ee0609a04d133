"""What a command says on stderr while it runs through many images: how far it is, and what it passes over.

It needs rich, so commands import it where they run: their help and what they say of wrong usage do without.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

console = Console(stderr=True)


class RateColumn(ProgressColumn):
    """Images per second."""

    def render(self, task: Task) -> Text:
        return Text(f'{task.speed:.1f} images/s' if task.speed else '')


def progress_bar(name: str = 'images', disable: bool = False) -> Progress:
    return Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=disable,
    )


def say(text: str) -> None:
    console.print(text, style='yellow', markup=False, highlight=False, soft_wrap=True)
