"""An engine process without an engine: it speaks the protocol, and answers each stream with the tokens of its prompt.

`Stubs` runs it in place of Python, as the process that an EngineClient starts. Each process takes the next script of
the folder: info to report, or a reason why it cannot run. What it is sent is written beside it, one line per message.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from weft.core import Source
from weft.observe.engine_metrics import EngineStep
from weft.serve.engines.heartbeat import Heartbeat
from weft.serve.engines.messages import (
    AbortSequences,
    AddPrompt,
    EngineFailed,
    EngineInfo,
    EngineProcessConfig,
    EngineReady,
    ResetPrefixCache,
    SequenceEnd,
    StepOutputs,
    decode_for_engine,
    encode,
)

INFO = EngineInfo(
    max_model_len=100,
    vocab_size=1000,
    block_size=16,
    num_blocks=10,
    max_num_seqs=4,
    policy="chunked",
    enable_prefix_caching=True,
    device="none",
    device_type="cpu",
    gap_target=None,
    gap_source=Source.DEFAULT,
    min_gap_target=0.0,
    ttft_target=None,
    ttft_target_per_1k=0.0,
    ttft_source=Source.DEFAULT,
    calibration_quality="",
)
HOLD = 999  # a prompt that starts with this token gets no answer


class Stubs:
    """Scripts for the processes that will be started, and what they were sent."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *scripts: dict[str, Any]) -> None:
        self.folder = folder
        for number, script in enumerate(scripts):
            (folder / f"{number}.script").write_text(json.dumps(script))
        command = folder / "python"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}"\n')
        command.chmod(0o700)
        patch.setattr(sys, "executable", str(command))

    @property
    def config(self) -> EngineProcessConfig:
        return EngineProcessConfig("", str(self.folder), (), {"max_queued_requests": 2})

    def sent(self, pid: int | None) -> list[str]:
        """The messages to one process: their kinds and the prompts or keys in them."""
        file = self.folder / f"{pid}.sent"
        return file.read_text().splitlines() if file.exists() else []


def taken_script(folder: Path) -> dict[str, Any]:
    for script in sorted(folder.glob("*.script")):
        try:
            os.rename(script, script.with_suffix(".taken"))
        except FileNotFoundError:
            continue  # another process was quicker
        found: dict[str, Any] = json.loads(script.with_suffix(".taken").read_text())
        return found
    return {"failed": "no script is left"}


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineProcessConfig)
    Heartbeat(Path(config.heartbeat_file)).start()
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.connect(config.address)
    script = taken_script(Path(config.path))
    if "failed" in script:
        socket.send(encode(EngineFailed(script["failed"])))
    else:
        socket.send(encode(EngineReady(msgspec.structs.replace(INFO, **script))))
    log, poller, running, taken = Path(config.path) / f"{os.getpid()}.sent", zmq.Poller(), 0, 0
    poller.register(socket, zmq.POLLIN)
    poller.register(0, zmq.POLLIN)  # end of file: the parent wants this process to end
    while True:
        if 0 in dict(poller.poll()):
            return
        message = decode_for_engine(socket.recv())
        ends = []
        match message:
            case AddPrompt():
                tokens = [int(token) for token in np.frombuffer(message.prompt, np.int32)]
                line, taken = f"submit {tokens}", taken + message.params.n
                if tokens[0] == HOLD:
                    running += message.params.n
                else:
                    ends = [SequenceEnd(message.key, tokens[0], "stop", 0.0, 0, None)]
            case AbortSequences(keys):
                line, running = f"abort {keys}", running - len(keys)
            case ResetPrefixCache():
                line = "reset"
        with log.open("a") as file:
            file.write(f"{line}\n")
        step = EngineStep(0.0, 0.0, None, 0, 0, 0, 0, 0, running, 0, 0, 10, num_handled=taken)
        socket.send(encode(StepOutputs([], [], [], ends, {}, [], step)))


if __name__ == "__main__":
    main()
