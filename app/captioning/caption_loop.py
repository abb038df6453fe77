"""The loop that takes requests through encoder and engine. One thread only.

A captioner runs it over a sequence of pictures, a service over requests as they arrive.
"""

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture, Square, TextPrefixes
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.models.oom_retry import OomRetry, attempt
from llama_adapter.app.pictures.prefixes.file import StoredPicture
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, ScoreRequest
from llama_adapter.llm.prefix import PictureTokens, TextPrefix
from llama_adapter.llm.tokenizer import IncrementalDetokenizer, Tokenizer
from llama_adapter.vision.backends.base import VisionBackend, fetch_array
from llama_adapter.vision.out_of_distribution import OodDetector
from llama_adapter.vision.squares import grid_of, squares_of

Pixels = np.ndarray | tuple[np.ndarray, ...]  # of a picture, or of the pictures of one prompt
Content = Pixels | StoredPicture | TextPrefix  # pixels for the encoder, or a replacement for a picture

LARGE_BATCH = 64  # pictures; devices encode and prefill hardly faster with more, and rows would wait for them


class CaptionLoop:
    """The requests in one engine. Close the loop before you open another one on the same engine."""

    _ids = itertools.count()  # unique over all loops: a step may still output tokens for requests of an earlier loop

    def __init__(
        self,
        *,
        vision: VisionBackend,
        engine: Engine,
        tokenizer: Tokenizer,
        clock: StageClock,
        text_prefixes: TextPrefixes,
        oom_retry: OomRetry,
        ood_detector: OodDetector | None,
        makes_tokens: bool,
    ) -> None:
        """With `makes_tokens`, what `vision` makes of a picture are tokens of the prompt, and no visual query.

        `text_prefixes` and `oom_retry` outlive the loop; the next loop reuses what they hold."""
        self._vision, self._engine, self._tokenizer, self._clock = vision, engine, tokenizer, clock
        self._text_prefixes, self._oom_retry = text_prefixes, oom_retry
        self._ood_detector, self._makes_tokens = ood_detector, makes_tokens
        self._engine.enter_stage = clock.enter
        self.in_flight: dict[int, ActiveRequest] = {}  # requests without an answer, by id

    @property
    def num_rows(self) -> int:
        """Number of requests answered together: the engine's slots, or fewer after an out-of-memory error."""
        return self._engine.num_rows

    @property
    def num_free(self) -> int:
        """Number of requests that can be submitted without waiting for a slot."""
        return max(0, self.num_rows - len(self.in_flight))

    @property
    def num_put_back(self) -> int:
        """How often a row went back into the queue because the rows together had filled the cache."""
        return self._engine.num_put_back

    @property
    def num_wanted(self) -> int:
        """Number of pictures to encode next: at least half a batch or `LARGE_BATCH`, and at most one batch in flight.

        It is 0 while requests wait for a slot, as with a picture that has many questions.
        """
        if len(self.in_flight) > self.num_rows:
            return 0
        num_pictures = len({id(request.prefix) for request in self.in_flight.values()})
        num_missing = self.num_rows - num_pictures
        return num_missing if num_missing >= min(self.num_rows / 2, LARGE_BATCH) else 0

    def least_ready(self, num_wanted: int) -> int:
        """Number of these pictures that must have been read before any is encoded.

        Without requests in flight, the device has no work, so it does not wait for more than `LARGE_BATCH`. With some,
        it has, and a batch of few pictures takes almost as long as one of more.
        """
        return min(num_wanted, self.num_rows // 16 if self.in_flight else LARGE_BATCH)

    def start(self, asked: Sequence[tuple[Content, Sequence[ActiveRequest]]]) -> None:
        """Encode pictures, and hand the requests about each to the engine."""
        encoded, clip_ms = self.encode([picture for picture, _ in asked])
        for (_, requests), picture in zip(asked, encoded, strict=True):
            for request in requests:
                request.ms["clip"] = clip_ms
                self.submit(request, picture)

    def encode(self, pictures: Sequence[Content]) -> tuple[list[EncodedPicture], float]:
        """Encode pictures, or their replacements; returns them, and a picture's share of the time in milliseconds.

        Pixels are (S, S, 3), as the reader returns them. The prefixes are views into shared tensors. After an
        out-of-memory error, batches are smaller.
        """
        encoded, clip_ms = self._encode_pixels([one for one in pictures if not isinstance(one, str)])
        known = self._text_prefixes.encoded
        for wanted in [one for one in pictures if isinstance(one, str)]:
            if wanted not in known:
                known[wanted], elapsed_ms = self._encode_text_prefix(wanted)
                clip_ms += elapsed_ms
        rest = iter(encoded)
        in_order = [known[one] if isinstance(one, str) else next(rest) for one in pictures]
        return in_order, clip_ms / max(1, len(pictures))

    def _encode_text_prefix(self, wanted: TextPrefix) -> tuple[EncodedPicture, float]:
        if wanted != "zeros":
            self._clock.enter("pre")
            engine = self._engine
            return EncodedPicture(engine.empty_prefix() if wanted == "none" else engine.learned_prefix()), 0.0
        [picture], clip_ms = self._encode_pixels([self._text_prefixes.zeros])
        return picture._replace(find_unfamiliar=None), clip_ms

    def _encode_pixels(self, pixels: Sequence[Pixels | StoredPicture]) -> tuple[list[EncodedPicture], float]:
        pictures: list[EncodedPicture] = []
        clip_ms = 0.0
        while len(pictures) < len(pixels):
            most = self._oom_retry.most_pictures or len(pixels)
            part = pixels[len(pictures) : len(pictures) + most]
            encode = self._embed_batch if self._makes_tokens else self._encode_batch
            encoded = attempt(functools.partial(encode, part), is_least=len(part) == 1)
            if encoded is None:
                self._oom_retry.fewer_pictures(len(part))
                continue
            pictures += encoded[0]
            clip_ms += encoded[1]
        return pictures, clip_ms

    def _encode_batch(self, pixels: Sequence[Pixels | StoredPicture]) -> tuple[list[EncodedPicture], float]:
        self._clock.enter("clip")
        started = time.perf_counter()
        # A run has either pixels or stored pictures. For stored ones, `EncodedBefore` takes the visual queries.
        whole = np.stack([one.query_QD if isinstance(one, StoredPicture) else one for one in pixels])
        visual_query_BQD = self._vision.encode(whole)
        clip_ms = (time.perf_counter() - started) * 1e3
        self._clock.enter("pre")
        stored = [one.keys_values for one in pixels if isinstance(one, StoredPicture) and one.keys_values is not None]
        if stored:
            prefixes = [self._engine.stored_prefix(*keys_values) for keys_values in stored]
        else:
            prefixes = self._engine.project_prefix(visual_query_BQD)
        if self._ood_detector is None:
            return [EncodedPicture(prefix) for prefix in prefixes], clip_ms
        detect, query = self._ood_detector.unfamiliar, fetch_array(visual_query_BQD)
        # Computed for the first answer: the host would wait for the device here.
        found = functools.cache(lambda: detect(query()))
        finders = [functools.partial(_item, found, row) for row in range(len(prefixes))]
        return [EncodedPicture(*both) for both in zip(prefixes, finders, strict=True)], clip_ms

    def _embed_batch(self, pixels: Sequence[Pixels | StoredPicture]) -> tuple[list[EncodedPicture], float]:
        """As `_encode_batch`, for pictures that become tokens of prompts."""
        self._clock.enter("clip")
        started = time.perf_counter()
        side, encoded = self._vision.pixels.image_size, list[EncodedPicture]()
        plain = [one for one in pixels if not isinstance(one, StoredPicture)]  # such models have no stored pictures
        prompts = [(one,) if isinstance(one, np.ndarray) else one for one in plain]
        squares = [[square for sheet in sheets for square in squares_of(sheet, side=side)] for sheets in prompts]
        embeddings = iter(self._vision.encode(np.stack([square for own in squares for square in own])))
        for sheets, own in zip(prompts, squares, strict=True):
            made = [Square(next(embeddings), hashlib.sha256(square.tobytes()).hexdigest()) for square in own]
            grids = tuple(grid_of(sheet, side=side) for sheet in sheets)
            encoded.append(EncodedPicture(self._engine.empty_prefix(), grids=grids, squares=tuple(made)))
        return encoded, (time.perf_counter() - started) * 1e3

    def submit(self, request: ActiveRequest, picture: EncodedPicture) -> int:
        """Hand a request about an encoded picture to the engine; returns its id for `cancel`."""
        request_id = next(CaptionLoop._ids)
        request.detokenizer = IncrementalDetokenizer(self._tokenizer)
        request.prefix, request.find_unfamiliar, request.notes = *picture[:2], picture.notes or request.notes
        request.squares = picture.squares
        self._submit_to_engine(request_id, request)
        self.in_flight[request_id] = request
        return request_id

    def _submit_to_engine(self, request_id: int, request: ActiveRequest) -> None:
        """Begin an answer, or continue it after the token ids that are known."""
        prompt, prefix, sampling = request.prompt, request.prefix, request.sampling
        assert prefix is not None
        end_ids = (*self._tokenizer.end_ids, *sampling.stop_token_ids)
        pictures = tuple(
            PictureTokens(start=start, embeddings_SD=square.embeddings_SD, digest=square.digest)
            for start, square in zip(prompt.picture_starts, request.squares, strict=True)
        )
        self._engine.submit(
            ScoreRequest(
                id=request_id,
                prompt_ids=prompt.token_ids,
                prefix=prefix,
                continuations=prompt.continuations,
                pictures=pictures,
            )
            if prompt.continuations
            else GenerateRequest(
                id=request_id,
                prompt_ids=prompt.token_ids,
                prefix=prefix,
                pictures=pictures,
                sampling=sampling,
                known_ids=tuple(request.token_ids),
                num_logprobs=request.num_logprobs,
                constraint=None if prompt.grammar is None else prompt.grammar.start(end_ids),
            )
        )

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its slot. Unknown ids are ignored."""
        if self.in_flight.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def step(self) -> list[Event]:
        """Run one step of the engine; returns new text and answers.

        After an out-of-memory error it returns an empty list, and all requests continue with half the rows. Raises the
        device's errors; an out-of-memory error is raised only with a single row.
        """
        outputs = attempt(self._engine.step, is_least=self.num_rows == 1)
        if outputs is None:
            self._oom_retry.fewer_rows(self._engine, num_rows=min(self.num_rows, len(self.in_flight)))
            for request_id, request in self.in_flight.items():  # known text is not generated again
                self._submit_to_engine(request_id, request)
            return []
        self._clock.enter("decode")
        events: list[Event] = []
        for output in outputs:
            found = self.in_flight[output.request_id].take(output)
            events += found
            if found and isinstance(found[-1], Answer):
                del self.in_flight[output.request_id]
                if output.finish is None:  # at a stop string
                    self._engine.cancel(output.request_id)
        return events

    def close(self) -> None:
        """Drop all requests. Can be called again."""
        for request_id in list(self.in_flight):
            self.cancel(request_id)
        self._clock.stop()


def _item(values: Callable[[], Sequence[bool]], place: int) -> bool:
    return values()[place]
