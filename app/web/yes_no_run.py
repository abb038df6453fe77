"""One question with fixed choices about many pictures, several under way at once. Knows the service, not Gradio."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from llama_adapter.app.online.service import Ask, BusyError, Service
from llama_adapter.app.web.runs import Run
from llama_adapter.app.web.thumbnails import thumbnail
from llama_adapter.app.web.troubles import told
from llama_adapter.app.web.uploads import read_upload
from llama_adapter.app.web.yes_no_state import Judged

MAX_PICTURES = 100  # of one press; Batch takes more
_NEWS_SECONDS = 0.2  # between two states of the page
_NOT_ASKED = "Stopped before it was asked."


async def judge(
    service: Service,
    run: Run,
    *,
    files: Sequence[tuple[str, str]],
    question: str,
    choices: tuple[str, ...],
    client: str,
) -> AsyncGenerator[tuple[Judged, ...]]:
    """All pictures at first, then as they are answered, a few times a second; ends when all are, or stopped."""
    results = [Judged(name=name) for _, name in files]
    room = asyncio.Semaphore(2 * service.batch_size)

    async def one(index: int) -> None:
        async with room:
            if run.is_stopped:
                results[index] = replace(results[index], problem=_NOT_ASKED)
                return
            path = files[index][0]
            try:
                results[index] = await _judge_one(
                    service, run, results[index], path=path, question=question, choices=choices, client=client
                )
            except Exception as error:
                results[index] = replace(results[index], problem=told(error)[0])

    yield tuple(results)
    pending = {asyncio.create_task(one(index)) for index in range(len(files))}
    try:
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_NEWS_SECONDS)
            yield tuple(results)
    finally:
        for task in pending:
            task.cancel()


async def _judge_one(
    service: Service, run: Run, result: Judged, *, path: str, question: str, choices: tuple[str, ...], client: str
) -> Judged:
    data = await asyncio.to_thread(read_upload, path, max_bytes=service.limits.max_picture_bytes)
    result = replace(result, thumbnail=await thumbnail(service, data, name=result.name, client=client))
    request = Ask(picture=data, prompt=question, label=result.name, choices=choices, client=client)
    while True:
        try:
            handle = service.submit(request)
            break
        except BusyError as error:
            await asyncio.sleep(min(error.retry_after_s or 1.0, 5.0))
            if run.is_stopped:
                return replace(result, problem=_NOT_ASKED)
    run.add(handle)
    try:
        answer = await handle.answer()
    finally:
        run.discard(handle)
    if answer.error is not None:
        stopped = answer.error.code == "cancelled"
        return replace(result, problem="Stopped." if stopped else answer.error.message)
    return replace(result, choice=answer.choice, is_reused=answer.is_reused, unfamiliar=answer.unfamiliar)
