"""pydantic-ai."""

import json
import os
from typing import Any

from asked import CAPTION, LOOK, PICTURE, QUESTION, URL, Count, Scene
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput

os.environ |= {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": "none"}


def asked(text: str) -> list[Any]:
    return [text, BinaryContent.from_data_uri(PICTURE)]


def results_of(model: str, route: str) -> dict:
    def refusal(output: Any) -> str:
        try:
            return f"answered: {Agent(model, output_type=output).run_sync(asked(LOOK)).output}"
        except ModelHTTPError as error:
            return str(error)

    return {
        "route": route,
        "caption": Agent(model).run_sync(asked(CAPTION)).output,
        "answer": Agent(model).run_sync(asked(QUESTION)).output,
        "pieces": list(Agent(model).run_stream_sync(asked(CAPTION)).stream_text(delta=True, debounce_by=None)),
        "structured": Agent(model, output_type=NativeOutput(Scene)).run_sync(asked(LOOK)).output.model_dump(),
        "refused": {"integers": refusal(NativeOutput(Count)), "tools": refusal(Scene)},
    }


results = {
    "`openai:default`": results_of("openai:default", "/v1/responses"),
    "`openai-chat:default`": results_of("openai-chat:default", "/v1/chat/completions"),
}
print(json.dumps(results))
