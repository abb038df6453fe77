"""pydantic-ai."""

import json
import os
from typing import Any

from asked import CAPTION, LOOK, PICTURE, QUESTION, URL, Count, Scene, refusal
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput

os.environ |= {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": "none"}


def asked(text: str) -> list[Any]:
    return [text, BinaryContent.from_data_uri(PICTURE)]


def results_of(model: str, route: str) -> dict:
    def ask(text: str, output: Any = str) -> Any:
        return Agent(model, output_type=output).run_sync(asked(text)).output

    return {
        "route": route,
        "caption": ask(CAPTION),
        "answer": ask(QUESTION),
        "pieces": list(Agent(model).run_stream_sync(asked(CAPTION)).stream_text(delta=True, debounce_by=None)),
        "structured": ask(LOOK, NativeOutput(Scene)).model_dump(),
        "numbers": refusal(ModelHTTPError, ask, LOOK, NativeOutput(Count)),
        "refused": {
            "tools": refusal(ModelHTTPError, ask, LOOK, Scene),
        },
    }


results = {
    "`openai:default`": results_of("openai:default", "/v1/responses"),
    "`openai-chat:default`": results_of("openai-chat:default", "/v1/chat/completions"),
}
print(json.dumps(results))
