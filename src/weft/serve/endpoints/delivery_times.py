"""DeliveryTimes: when the client of a request was sent its tokens, for the recording."""

import re

from weft.observe.frames import MOST_LATE_CHUNKS, LateChunk, RequestFrame, encode_frame
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.engines.messages import PrefillDone, SequenceEnd, clock
from weft.serve.requests.parsed_request import ParsedRequest

# An id that the server made opens a stored response (resp_ID), so it is recorded in part: enough to find it in a log.
_MADE_HERE = re.compile(r"[0-9a-f]{24}")
_SHOWN_DIGITS = 8
NEVER, NO_TARGET = -1e300, 1e200  # seconds: so that one comparison tells a first or a late chunk from all others


class DeliveryTimes:
    """Times of one request, in seconds. `note_sent` runs for every chunk of a stream."""

    def __init__(self, parsed: ParsedRequest, submitted: float) -> None:
        self._parsed, self._submitted = parsed, submitted
        choices = len(parsed.choices)
        self._first: list[float | None] = [None] * choices
        self._last = [NEVER] * choices
        self.tokens = [0] * choices
        self._late: list[list[LateChunk]] = [[] for _ in range(choices)]
        self._target = min(parsed.promise.gap, NO_TARGET)

    def note_sent(self, index: int, received: float, began: float) -> None:
        """A chunk was written. `received`: when its last token arrived; `began`: when writing it began."""
        now, last = clock(), self._last[index]
        self._last[index] = now
        if now - last <= self._target:
            return
        if last == NEVER:
            self._first[index] = now
        elif len(self._late[index]) < MOST_LATE_CHUNKS:
            self._late[index].append(LateChunk(self.tokens[index] - 1, received, now, now - began, last))

    def note_answer(self) -> None:
        """The whole answer was written at once."""
        self._first = [clock()] * len(self._first)

    def record(
        self,
        recording: RecordingBuffer,
        engine: str,
        keys: list[int],
        prefills: dict[int, PrefillDone],
        ends: dict[int, SequenceEnd],
        reason: str,
    ) -> None:
        """Adds a frame for each sequence. `reason` counts for sequences that the engine has not ended."""
        parsed, now = self._parsed, clock()
        for index, key in enumerate(keys):
            prefill, end = prefills.get(index), ends.get(index)
            prompt = parsed.prompts[index * len(parsed.prompts) // len(parsed.choices)]
            frame = RequestFrame(
                engine=engine,
                key=key,
                request_id=_shown_id(prompt.request_id),
                tenant=prompt.options.tenant,
                choice_index=index,
                arrival=parsed.arrival,
                parsed=self._submitted,
                started=None if prefill is None else prefill.started,
                first_token=None if prefill is None else prefill.first_token,
                first_sent=self._first[index],
                finished=now,
                reason=parsed.choices[index].finish_reason or (reason if end is None else end.reason),
                prompt_tokens=len(prompt.tokens) // 4,
                output_tokens=self.tokens[index],
                cached_tokens=0 if prefill is None else prefill.cached_tokens,
                preemptions=0 if end is None else end.preemptions,
                predicted_ttft=next((found.predicted_ttft for found in (prefill, end) if found is not None), None),
                stream=parsed.stream,
                late_chunks=self._late[index],
            )
            recording.add(encode_frame(frame), "request", now, prompt.options.tenant)


def _shown_id(request_id: str) -> str:
    return _MADE_HERE.sub(lambda found: found[0][:_SHOWN_DIGITS], request_id)
