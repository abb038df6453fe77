"""instructor."""

import json
from typing import Literal

import instructor
from asked import CAPTION, LOOK, PICTURE, QUESTION, URL, Count, Scene, refusal
from instructor.core import InstructorRetryException
from pydantic import BaseModel


class Color(BaseModel):
    color: Literal["red", "yellow", "green"]


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_provider("openai/default", mode=mode, base_url=URL, api_key="none")


def asked(text: str) -> dict:
    messages = [{"role": "user", "content": [text, instructor.Image.from_base64(PICTURE)]}]
    return {"messages": messages, "max_retries": 1}


json_schema, tools = client(instructor.Mode.JSON_SCHEMA), client(instructor.Mode.TOOLS)
results = {
    "`Mode.JSON_SCHEMA`": {
        "route": "/v1/chat/completions",
        "caption": json_schema.create(response_model=None, **asked(CAPTION)).choices[0].message.content,
        "answer": json_schema.create(response_model=Color, **asked(QUESTION)).color,
        "pieces": [partial.caption for partial in json_schema.create_partial(response_model=Scene, **asked(LOOK))],
        "structured": json_schema.create(response_model=Scene, **asked(LOOK)).model_dump(),
        "numbers": refusal(InstructorRetryException, json_schema.create, response_model=Count, **asked(LOOK)),
        "refused": {
            "tools": refusal(InstructorRetryException, tools.create, response_model=Scene, **asked(LOOK)),
        },
    },
}
print(json.dumps(results))
