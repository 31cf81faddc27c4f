"""Where results go: JSON, files that appear whole or not at all, the screen."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minitransformer.files import standard_stream, write_text

if TYPE_CHECKING:
    from rich.console import Console


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON proper: NaN and infinities, which it lacks, as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(content), indent=indent, ensure_ascii=False, allow_nan=False)


def as_json(content: Any) -> str:
    """The text of a report's file."""
    return to_json(content, indent=1) + "\n"


def json_lines(items: Iterable[Any]) -> str:
    return "".join(to_json(item) + "\n" for item in items)


def report(path: Path | None, text: str, show: Callable[[], None]) -> None:
    """Writes the file, if one is named, then shows the result. In this order: a reader of the screen may go away
    (`| head`). Where the file can't be written the screen still has everything."""
    on_screen = path is not None and standard_stream(path) is not None
    try:
        if path is not None and not on_screen:
            write_text(path, text)
    finally:
        show()
    if on_screen:
        write_text(path, text)


def console() -> "Console":
    """Standard output: 100 columns at most; without a terminal there is no colour and no box."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError  # rich would end the process with status 1, which means that something differs

    out = Screen(highlight=False)
    out.width = min(out.width, 100) if out.is_terminal else 100
    return out
