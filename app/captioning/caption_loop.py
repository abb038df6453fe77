"""Prompts about pictures on their way through encoder and engine: conversations in, news out.

A captioner drives it over a folder, a service over requests as they come. One thread only.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.models.oom_retry import OomRetry, attempt
from llama_adapter.app.models.out_of_distribution import OodDetector
from llama_adapter.app.tasks.answers import NOT_FINITE, Answer, Event, TextDelta
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, ScoreRequest
from llama_adapter.llm.tokenizer import IncrementalDetokenizer, Tokenizer
from llama_adapter.vision.backends.base import VisionBackend


class CaptionLoop:
    """What is under way in one engine. Close it before another one is opened on the same engine."""

    _ids = itertools.count()  # of all flows: a step may still speak of requests that an earlier one left behind

    def __init__(
        self,
        *,
        vision: VisionBackend,
        engine: Engine,
        tokenizer: Tokenizer,
        clock: StageClock,
        oom_retry: OomRetry | None = None,
        ood_detector: OodDetector | None = None,
    ) -> None:
        """`oom_retry` outlives the loop: what one of them learns of the memory, the next ones know."""
        self._vision, self._engine, self._tokenizer, self._clock = vision, engine, tokenizer, clock
        self._back_off, self._ood_detector = oom_retry or OomRetry(), ood_detector
        self._engine.timer = clock
        self._in_flight: dict[int, ActiveRequest] = {}

    @property
    def num_unfinished(self) -> int:
        """Conversations that `step` has still to answer."""
        return self._engine.num_unfinished

    @property
    def num_rows(self) -> int:
        """How many are answered at once: the engine's slots, or fewer once memory was not enough."""
        return self._engine.num_rows

    @property
    def num_free(self) -> int:
        """How many more may be submitted so that none waits for a slot."""
        return max(0, self.num_rows - self._engine.num_unfinished)

    @property
    def num_wanted(self) -> int:
        """How many pictures to encode next: half a batch or more, so that never more than a batch is under way.

        0 while requests wait for a slot: pictures that much is asked about keep the slots in use for longer.
        """
        if self.num_unfinished > self.num_rows:
            return 0
        num_pictures = len({id(conversation.prefix) for conversation in self._in_flight.values()})
        num_missing = self.num_rows - num_pictures
        return num_missing if 2 * num_missing >= self.num_rows else 0

    def encode(self, pixels: Sequence[np.ndarray]) -> tuple[list[EncodedPicture], float]:
        """Pixels (size, size, 3) of pictures, uint8 -> what is known of each, and the encoder's milliseconds.

        The prefixes are views of common tensors. Where memory is not enough, fewer pictures are encoded at once.
        """
        pictures: list[EncodedPicture] = []
        clip_ms = 0.0
        while len(pictures) < len(pixels):
            most = self._back_off.most_pictures or len(pixels)
            part = pixels[len(pictures) : len(pictures) + most]
            encoded = attempt(functools.partial(self._encode_at_once, part), is_least=len(part) == 1)
            if encoded is None:
                self._back_off.fewer_pictures(len(part))
                continue
            pictures += encoded[0]
            clip_ms += encoded[1]
        return pictures, clip_ms

    def _encode_at_once(self, pixels: Sequence[np.ndarray]) -> tuple[list[EncodedPicture], float]:
        self._clock.enter("clip")
        started = time.perf_counter()
        visual_query_BQD = self._vision.encode(np.stack(pixels))
        clip_ms = (time.perf_counter() - started) * 1e3
        self._clock.enter("pre")
        prefixes = self._engine.project_prefix(visual_query_BQD)
        if self._ood_detector is None:
            return [EncodedPicture(prefix) for prefix in prefixes], clip_ms
        # Behind the projection, so that the device has work while the host waits for this.
        unfamiliar = self._ood_detector.unfamiliar(visual_query_BQD.float().cpu().numpy())
        return [EncodedPicture(*both) for both in zip(prefixes, unfamiliar, strict=True)], clip_ms

    def submit(self, conversation: ActiveRequest, picture: EncodedPicture) -> int:
        """Hand a conversation about a picture to the engine; returns what `cancel` takes."""
        request_id = next(CaptionLoop._ids)
        conversation.detokenizer = IncrementalDetokenizer(self._tokenizer)
        conversation.prefix, conversation.unfamiliar = picture
        self._hand_over(request_id, conversation)
        self._in_flight[request_id] = conversation
        return request_id

    def _hand_over(self, request_id: int, conversation: ActiveRequest) -> None:
        """Let the engine answer a conversation, or go on with its answer where it ends by now."""
        prompt, prefix = conversation.prompt, conversation.prefix
        assert prefix is not None
        if prompt.choices:
            self._engine.submit(
                ScoreRequest(id=request_id, prompt_ids=prompt.token_ids, prefix=prefix, continuations=prompt.choices)
            )
            return
        self._engine.submit(
            GenerateRequest(
                id=request_id,
                prompt_ids=prompt.token_ids,
                prefix=prefix,
                sampling=conversation.sampling,
                known_ids=tuple(conversation.token_ids),
            )
        )

    def cancel(self, request_id: int) -> None:
        """Forget a conversation; its slot is free at once. Unknown ids are ignored."""
        if self._in_flight.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def step(self) -> list[Event]:
        """One step of the engine, and what it means for readers: new text, answers.

        Where memory is not enough there is no news, and all that is under way goes on with half the rows. Raises what
        the device raises, the lack of memory only when a single row is too much.
        """
        outputs = attempt(self._engine.step, is_least=self.num_rows == 1)
        if outputs is None:
            self._begin_again()
            return []
        self._clock.enter("decode")
        return [event for output in outputs for event in self._news(output)]

    def _begin_again(self) -> None:
        """After a step without enough memory. Answers go on behind the text that readers have: it is not made again."""
        self._back_off.fewer_rows(self._engine, num_rows=min(self.num_rows, len(self._in_flight)))
        for request_id, conversation in self._in_flight.items():
            self._hand_over(request_id, conversation)

    def close(self) -> None:
        """Forget what is under way; harmless when repeated."""
        for request_id in list(self._in_flight):
            self.cancel(request_id)
        self._clock.stop()

    def _news(self, output: Output) -> Iterator[Event]:
        conversation = self._in_flight[output.request_id]
        assert conversation.detokenizer is not None
        finish = output.finish
        text = ""
        if output.token_id is not None:
            conversation.ms.setdefault("first_token", conversation.elapsed_ms())
            conversation.token_ids.append(output.token_id)
            text = conversation.detokenizer.push(output.token_id)
        if finish in ("stop", "length"):
            text += conversation.detokenizer.flush()
        text = conversation.stopping.push(text)
        if conversation.stopping.is_hit:
            if finish is None:
                self._engine.cancel(output.request_id)
            finish = "stop"
        elif finish in ("stop", "length"):
            text += conversation.stopping.flush()
        if text:
            conversation.pieces.append(text)
            yield TextDelta(index=conversation.index, text=text)
        if finish is None:
            return
        del self._in_flight[output.request_id]
        if finish == "not_finite":
            yield conversation.failed(NOT_FINITE)
            return
        conversation.ms["total"] = conversation.elapsed_ms()
        choice = self._choose(conversation, output.logprobs) if finish == "scored" else None
        yield Answer(
            index=conversation.index,
            picture=conversation.picture,
            digest=conversation.digest,
            prompt=conversation.prompt.text,
            text="".join(conversation.pieces),
            token_ids=tuple(conversation.token_ids),
            finish="choice" if finish == "scored" else finish,
            choice=choice,
            ms=conversation.ms,
            prompt_tokens=len(conversation.prompt.token_ids),
            unfamiliar=conversation.unfamiliar,
            is_reused=conversation.is_reused,
            tag=conversation.tag,
        )

    def _choose(self, conversation: ActiveRequest, logprobs: Sequence[float]) -> dict[str, float]:
        """Make the likeliest choice the answer; returns the probability of each."""
        assert conversation.choices is not None
        probabilities = _normalised(logprobs)
        best = probabilities.index(max(probabilities))
        conversation.pieces = [conversation.choices[best]]
        conversation.token_ids = list(conversation.prompt.choices[best])
        if conversation.token_ids[-1] == self._tokenizer.eos_id:
            conversation.token_ids.pop()
        return dict(zip(conversation.choices, probabilities, strict=True))


def _normalised(logprobs: Sequence[float]) -> list[float]:
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
