"""`weft timeline`: a recording as a picture of time, for Perfetto or chrome://tracing."""

import argparse
import math
import os
import sys
from pathlib import Path

from weft.errors import OptionError

EPILOG = """\
Open the result in https://ui.perfetto.dev or chrome://tracing. There is a track for each request (queue, prefill,
decode, stall, preempted), one for the steps, one for the host, and counters for the KV cache, the queue and the running
requests.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "timeline",
        help="turn a recording into a timeline for Perfetto",
        description="Turns a recording of weft serve --record or weft simulate --record into a timeline.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recording", type=Path, metavar="FILE", help="the recording")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument("--last", type=float, metavar="SECONDS", help="only the last SECONDS (default: all)")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.observe.frames import RecordingError
    from weft.observe.recording import frames_of_file
    from weft.observe.timeline import last_time, write_timeline
    from weft.progress import work_progress

    source, output, last = arguments.recording, arguments.output, arguments.last
    if last is not None and not 0 < last < math.inf:
        raise OptionError(f"--last {last:g} must be above 0 seconds")
    if output.is_dir() or output.resolve() == source.resolve():
        raise OptionError(f"--output {output}: name another file, for the timeline")
    size = source.stat().st_size if source.is_file() else 0
    passes = 1 if last is None else 2
    read = 0
    with work_progress("timeline", passes * size, arguments.progress) as show:

        def advance(done: int) -> None:
            nonlocal read
            read = done
            show(done)

        since = -math.inf if last is None else last_time(frames_of_file(source, advance)) - last
        frames = frames_of_file(source, lambda done: advance(done + (passes - 1) * size))
        part = output.with_name(f"{output.name}.part")  # an error leaves no half of a timeline
        try:
            with part.open("wb") as file:
                events = write_timeline(frames, file, since)
            if events:
                os.replace(part, output)
        except OSError as error:
            raise OptionError(f"--output {output}: {error.strerror}; name a file that can be written") from None
        finally:
            part.unlink(missing_ok=True)
    if not events:
        raise RecordingError(f"{source} is empty: it was recorded without a step or a request")
    if read < passes * size:
        print(f"weft: {source} ends in the middle of a frame; the timeline has all before it", file=sys.stderr)
    print(f"{output}: {events:,} events; open it in https://ui.perfetto.dev")
    return 0
