"""The endpoints `/ask` and `/caption` of Gradio's clients, such as `gradio_client`."""

import asyncio
from typing import Any

import gradio as gr
from gradio.events import api

from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.web.html import told
from llama_adapter.app.serving.web.uploads import read_upload, upload_of
from llama_adapter.llm.engine.sampling_params import SamplingParams


def add_endpoints(service: Service) -> None:
    """Add the endpoints to the present page."""

    async def ask(picture: dict[str, Any], question: str, request: gr.Request) -> str:
        """The answer to a question about a picture, `handle_file(path)`."""
        try:
            if (file := upload_of(picture)) is None or not isinstance(question, str):
                raise ValueError("Wanted a picture as `handle_file(path)`, and a question as text")
            most = service.limits.max_picture_bytes
            data = await asyncio.to_thread(read_upload, file.path, name=file.base_name, max_bytes=most)
            prompt = question.strip() or service.info.default_prompt
            asked = Ask(picture=data, prompt=prompt, sampling=SamplingParams(), client=f"page {request.session_hash}")
            answer = await service.submit(asked).answer()
            if answer.error is not None:
                raise ValueError(answer.error.message)
        except Exception as error:
            raise gr.Error(told(error)[0], print_exception=False) from None
        return answer.text

    async def caption(picture: dict[str, Any], request: gr.Request) -> str:
        """A description of a picture, `handle_file(path)`."""
        return await ask(picture, "", request)

    for endpoint in (ask, caption):
        api(endpoint, concurrency_limit=service.limits.max_waiting)
