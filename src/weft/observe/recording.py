"""Recording: the frames of a recording, by engine process, for an analysis."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from weft.observe.frames import (
    EngineFrame,
    Frame,
    LagFrame,
    PromptFrame,
    RecordingError,
    RequestFrame,
    StepFrame,
    read_frames,
)


@dataclass
class EngineRun:
    """The frames of one engine process, in order of time."""

    info: EngineFrame | None = None  # None: the recording begins later
    steps: list[StepFrame] = field(default_factory=list)
    prompts: dict[int, PromptFrame] = field(default_factory=dict)  # by key
    requests: dict[int, RequestFrame] = field(default_factory=dict)  # by key; sequences that have ended


@dataclass
class Recording:
    """All engine processes of a server, and what happened in its API process."""

    runs: list[EngineRun] = field(default_factory=list)
    lags: list[LagFrame] = field(default_factory=list)

    @classmethod
    def of(cls, frames: Iterable[Frame]) -> Self:
        found = cls()
        current: dict[str, EngineRun] = {}
        for frame in frames:
            if isinstance(frame, LagFrame):
                found.lags.append(frame)
                continue
            run = current.get(frame.engine)
            if isinstance(frame, EngineFrame) and run is not None and run.info == frame:
                continue  # a rotated file, or another part of a live recording, begins with the frame again
            if run is None or isinstance(frame, EngineFrame):
                run = current[frame.engine] = EngineRun()
                found.runs.append(run)
            match frame:
                case EngineFrame():
                    run.info = frame
                case StepFrame():
                    run.steps.append(frame)
                case PromptFrame():
                    run.prompts[frame.key] = frame
                case RequestFrame():
                    run.requests[frame.key] = frame
        return found

    @classmethod
    def read(cls, path: Path, progress: Callable[[int], None] = lambda done: None) -> Self:
        """Reads a file. `progress` is told the bytes that were read so far."""
        return cls.of(frames_of_file(path, progress))


def frames_of_file(path: Path, progress: Callable[[int], None] = lambda done: None) -> Iterator[Frame]:
    """Yields the frames of a file, without holding more than one. `progress` is told the bytes of all frames so far.

    If the last frame is cut off, it is left out, and `progress` is never told the size of the file.
    """
    try:
        with path.open("rb") as file:
            for frame in read_frames(file, str(path)):
                progress(file.tell())
                yield frame
    except OSError as error:
        raise RecordingError(f"cannot read the recording {path}: {error.strerror}") from None
